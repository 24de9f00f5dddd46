"""What data hosts list where each has files of its own: all lists together are the splits of an epoch. Pure.

Without such a channel one host's list is everybody's. With one, all data hosts list, and a split has a home: the host
that alone can prepare it. It has one if it names a file of such a channel, and also if no other host has listed it: a
job may list names instead of paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple


class Home(NamedTuple):
    """The host that alone can prepare a split, and the channel that it reads from, "" if that is not known."""

    host: str
    channel: str


@dataclass(frozen=True)
class HostList:
    """One host's list.

    Args:
        values: The splits, JSON texts.
        channels: By position, the channel that a split reads from, where each host has other files of it.
    """

    values: tuple[str, ...]
    channels: Mapping[int, str] = field(default_factory=dict)


class Splits(NamedTuple):
    """The splits of every epoch, JSON texts, and the home of each; no homes at all: any host can prepare any split."""

    values: tuple[str, ...]
    homes: tuple[Home | None, ...] = ()


class Loss(NamedTuple):
    """A host that was given up, and the channels of which it alone has files that are still to be read.

    It had listed them, or else they may be any: it was lost before that.
    """

    host: str
    channels: tuple[str, ...]
    was_listed: bool


def merge(lists: Mapping[str, HostList]) -> Splits:
    """Put the lists of all hosts together.

    Splits with a home are kept as each host lists them. Of the others, each is there as often as in the list that has
    it most often, so that equal lists are one. Hosts take turns, so that they all have work also where splits are read
    in order.

    Args:
        lists: By host, in natural order.
    """
    if len(lists) == 1:
        ((host, only),) = lists.items()
        homes = [Home(host, only.channels[i]) if i in only.channels else None for i in range(len(only.values))]
        return Splits(only.values, tuple(homes) if any(homes) else ())
    listed_by = Counter(value for one in lists.values() for value in dict.fromkeys(_homeless(one)))
    shared: list[tuple[str, Home | None]] = []
    lanes = [shared]
    known: Counter[str] = Counter()
    for host, one in lists.items():
        own: list[tuple[str, Home | None]] = []
        seen: Counter[str] = Counter()
        for position, value in enumerate(one.values):
            channel = one.channels.get(position)
            if channel is not None or listed_by[value] == 1:
                own.append((value, Home(host, channel or "")))
                continue
            seen[value] += 1
            if seen[value] > known[value]:
                known[value] += 1
                shared.append((value, None))
        lanes.append(own)
    splits = [split for split in chain.from_iterable(zip_longest(*lanes)) if split is not None]
    homes = [home for _, home in splits]
    return Splits(tuple(value for value, _ in splits), tuple(homes) if any(homes) else ())


def hosts_of(splits: Splits) -> Sequence[str | None]:
    """Return by split the host that alone can prepare it."""
    if not splits.homes:
        return (None,) * len(splits.values)
    return [home and home.host for home in splits.homes]


def _homeless(one: HostList) -> Iterable[str]:
    return (value for position, value in enumerate(one.values) if position not in one.channels)
