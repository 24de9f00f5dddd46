"""What the split book has to say to its peers, and what it knows of each. Pure.

Mail is lost when a stream breaks: whoever comes again says first what it knows, and is told anew what it must know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hetero.control.split_epoch import Fence, SplitId


class Assignment(NamedTuple):
    """A split for a feed; `arrived` is the bitmap of its batches that are at ranks already."""

    id: SplitId
    value: str
    arrived: bytes


@dataclass
class FeedMail:
    """What a feed is to be told."""

    assignments: list[Assignment] = field(default_factory=list)
    revoked: list[SplitId] = field(default_factory=list)
    list_splits: bool = False
    ended: list[int] = field(default_factory=list)


@dataclass
class RankMail:
    """What a rank is to be told."""

    fences: list[Fence] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


@dataclass
class Feed:
    """A data host's feed, or that of a trainer host's local workers.

    Args:
        host: Its host.
        spare: Whether its host trains: the job can do without it, and it does without what only data hosts have.
        connected: Whether there is a stream from it.
        registered: Whether the host has registered.
        gone: Whether the host was given up.
        wanted: Splits asked for on this stream.
        given: Splits given on this stream.
        held: (epoch, split) of what it has in hand.
        mail: What it is to be told.
    """

    host: str
    spare: bool = False
    connected: bool = False
    registered: bool = False
    gone: bool = False
    wanted: int = 0
    given: int = 0
    held: set[tuple[int, int]] = field(default_factory=set)
    mail: FeedMail = field(default_factory=FeedMail)

    @property
    def serves(self) -> bool:
        """Whether it can be given something."""
        return self.connected and not self.gone

    @property
    def credit(self) -> int:
        """How many splits it waits for."""
        return self.wanted - self.given if self.serves else 0


@dataclass
class Rank:
    """A rank; `closed` is one that has said goodbye, `begun` are its epochs that have not ended."""

    connected: bool = False
    closed: bool = False
    begun: set[int] = field(default_factory=set)
    mail: RankMail = field(default_factory=RankMail)


class Skipped(NamedTuple):
    """A split that was left out because the job's code failed in it."""

    epoch: int
    split: int
    value: str
    host: str
    cause: str


class Past(NamedTuple):
    """An epoch that has ended."""

    epoch: int
    done: int
    batches: int
