"""The streams of `hetero.v1.Splits`: a peer's messages turned into calls of the split book, its mail into replies."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hetero._proto import splits_pb2 as pb
from hetero.control.split_epoch import Fence, Report, SplitId
from hetero.control.splits import SplitBook
from hetero.control.state import cause_from_json

_MOST_ATTEMPT = 1 << 62
"""No attempt gets as far; with a greater one heard of, the next could not be told."""

Fail = Callable[[Mapping[str, object]], None]


@dataclass
class Figures:
    """The newest figures of each peer; a feed's with the time at which they came, in monotonic seconds."""

    feeds: dict[str, tuple[float, pb.FeedStats]] = field(default_factory=dict)
    ranks: dict[int, pb.RankStats] = field(default_factory=dict)


class PeerStream(ABC):
    """One stream of one peer.

    Attributes:
        peer: A feed's host, or a rank.
        mail: Set when there is something to tell the peer.
        over: Set when the stream is to end.
    """

    peer: str | int
    welcome: bytes

    def __init__(self) -> None:
        self.mail, self.over = asyncio.Event(), asyncio.Event()

    @abstractmethod
    def hello(self) -> None:
        """Hand the first request to the book; `Mismatch` if the peer is none of this job's."""

    @abstractmethod
    def take(self, raw: bytes) -> None:
        """Hand a later request to the book; ValueError or DecodeError if it makes no sense."""

    @abstractmethod
    def reply(self) -> bytes:
        """Return the mail that waits, as one reply."""

    @abstractmethod
    def gone(self) -> None:
        """Tell the book that the stream has ended."""


class FeedStream(PeerStream):
    """A feed's stream.

    Args:
        book: The split book.
        figures: Takes in its figures.
        first: Its first request.
        fail: Called with a failure that ends the job.

    Raises:
        ValueError: The request makes no sense.
    """

    welcome = pb.ServeReply(welcome=True).SerializeToString()

    def __init__(self, book: SplitBook, figures: Figures, first: pb.ServeRequest, fail: Fail) -> None:
        super().__init__()
        self._book, self._figures, self._first, self._fail = book, figures, first, fail
        self.peer: str = first.hello.host
        self._held = [_split_id(message) for message in first.hello.held]
        self._reports = [*map(_done, first.hello.done), *_reports(first)]

    def hello(self) -> None:
        """See `PeerStream`."""
        self._book.feed_hello(self.peer, self._held, self._reports, self._first.hello.ended)
        self._take(self._first)

    def take(self, raw: bytes) -> None:
        """See `PeerStream`."""
        request = pb.ServeRequest.FromString(raw)
        for report in _reports(request):
            self._book.feed_report(self.peer, report)
        self._take(request)

    def _take(self, request: pb.ServeRequest) -> None:
        if request.HasField("list") and self._book.values is None:
            if request.list.cause_json:
                self._fail({"host": self.peer, **(cause_from_json(request.list.cause_json) or {})})
            else:
                channels = {split: local.channel for local in request.list.local for split in local.splits}
                self._book.feed_list(self.peer, request.list.values, channels)
        if request.wanted:
            self._book.feed_wanted(self.peer, request.wanted)
        if request.HasField("stats"):
            self._figures.feeds[self.peer] = (time.monotonic(), request.stats)

    def reply(self) -> bytes:
        """See `PeerStream`."""
        mail = self._book.feed_mail(self.peer)
        message = pb.ServeReply(list_splits=mail.list_splits, epochs_ended=mail.ended)
        for key, value, arrived in mail.assignments:
            message.assignments.add(id=_to_proto(key), value=value, arrived=arrived)
        message.revoked.extend(map(_to_proto, mail.revoked))
        return bytes(message.SerializeToString())

    def gone(self) -> None:
        """See `PeerStream`."""
        self._book.feed_gone(self.peer)


class RankStream(PeerStream):
    """A rank's stream.

    Args:
        book: The split book.
        figures: Takes in its figures.
        first: Its first request.
    """

    welcome = pb.FollowReply(welcome=True).SerializeToString()

    def __init__(self, book: SplitBook, figures: Figures, first: pb.FollowRequest) -> None:
        super().__init__()
        self._book, self._figures, self._first = book, figures, first
        self.peer: int = first.hello.rank

    def hello(self) -> None:
        """See `PeerStream`."""
        hello = self._first.hello
        self._book.rank_hello(
            self.peer,
            hello.size,
            highest_attempt=_attempt(hello.highest_attempt),
            obeyed=[Fence(fence.id, fence.epoch, _attempt(fence.attempt), fence.splits) for fence in hello.obeyed],
            ended=hello.ended,
            begun=_epochs(self._first.begun),
            left=_epochs(self._first.left),
            stray_channels=hello.stray_channels,
        )
        if self._first.bye:
            self._book.rank_bye(self.peer)

    def take(self, raw: bytes) -> None:
        """See `PeerStream`."""
        request = pb.FollowRequest.FromString(raw)
        for fenced in request.fenced:
            self._book.rank_fenced(self.peer, fenced.id, {one.split: one.batches for one in fenced.arrived})
        for number in _epochs(request.begun):
            self._book.rank_begun(self.peer, number)
        for number in _epochs(request.left):
            self._book.rank_left(self.peer, number)
        if request.HasField("stats"):
            self._figures.ranks[self.peer] = request.stats
        if request.bye:
            self._book.rank_bye(self.peer)

    def reply(self) -> bytes:
        """See `PeerStream`."""
        mail = self._book.rank_mail(self.peer)
        message = pb.FollowReply(epochs_ended=mail.ended)
        for fence in mail.fences:
            message.fences.add(id=fence.id, epoch=fence.epoch, attempt=fence.attempt, splits=fence.splits)
        return bytes(message.SerializeToString())

    def gone(self) -> None:
        """See `PeerStream`."""
        self._book.rank_gone(self.peer)


def _split_id(message: pb.SplitId) -> SplitId:
    if message.epoch < 0 or message.split < 0:
        raise ValueError(f"there is no split {message.split} of epoch {message.epoch}")
    return SplitId(message.epoch, message.split, _attempt(message.attempt))


def _attempt(number: int) -> int:
    if not 0 <= number < _MOST_ATTEMPT:
        raise ValueError(f"there is no attempt {number}")
    return number


def _to_proto(key: SplitId) -> pb.SplitId:
    return pb.SplitId(epoch=key.epoch, split=key.split, attempt=key.attempt)


def _done(message: pb.SplitDone) -> Report:
    return Report(_split_id(message.id), "done", message.batches, message.replayed)


def _reports(request: pb.ServeRequest) -> list[Report]:
    bad = [
        Report(_split_id(m.id), "bad", m.batches, m.replayed, cause_from_json(m.cause_json) or {}) for m in request.bad
    ]
    return [*map(_done, request.done), *bad, *(Report(_split_id(m), "returned") for m in request.returned)]


def _epochs(numbers: Iterable[int]) -> list[int]:
    epochs = list(numbers)
    if min(epochs, default=0) < 0:
        raise ValueError(f"there is no epoch {min(epochs)}")
    return epochs
