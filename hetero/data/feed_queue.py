"""Finished batches on their way out of a feed, in the order in which ranks get them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from operator import attrgetter

from hetero.data.feed_splits import HeldSplit, ReadyBatch

ANY_SPLIT = -1
_ANYBODY = -1
_by_order = attrgetter("order")


class ReadyQueue:
    """Batches that wait for a rank, of all epochs. Pure.

    In an ordinary job any rank may have any batch, the oldest first. In a deterministic one batch q of split s is that
    of rank (s + q) % size, so that ranks get the same batches whatever the workers do.

    Args:
        deterministic: which of the two.

    Attributes:
        size: number of ranks; 0 as long as it is unknown, when nobody gets anything.
    """

    def __init__(self, *, deterministic: bool) -> None:
        self.size = 0
        self._deterministic = deterministic
        self._waiting: dict[int, dict[int, dict[int, deque[ReadyBatch]]]] = {}  # by epoch, split, and whose they are
        self._given: dict[int, dict[int, int]] = {}  # by epoch and rank

    def epochs(self) -> list[int]:
        """Return the epochs of which batches wait, ascending."""
        return sorted(self._waiting)

    def set_size(self, size: int) -> None:
        """Set the number of ranks, and with it whose the batches are that wait already."""
        self.size = size
        waiting, self._waiting = self._waiting, {}
        for splits in waiting.values():
            for owners in splits.values():
                for batch in sorted((batch for lane in owners.values() for batch in lane), key=_by_order):
                    self.put(batch)

    def put(self, batch: ReadyBatch) -> None:
        """Add a batch that is ready."""
        self._lane(batch).append(batch)

    def put_back(self, batches: Iterable[ReadyBatch], rank: int) -> None:
        """Add batches that were given to a rank and have not arrived; they come before younger ones."""
        for batch in batches:
            self._count(batch.split.epoch, rank, -1)
            lane = self._lane(batch)
            younger = list(lane)
            lane.clear()
            lane.extend(sorted((batch, *younger), key=_by_order))

    def head(self, epoch: int, rank: int, split: int) -> ReadyBatch | None:
        """Return what a rank gets next; None: nothing waits for it.

        Args:
            epoch: of which epoch.
            rank: whose stream it is.
            split: only of splits up to this one, the lower ones being late; ANY_SPLIT: of any.
        """
        heads = [lane[0] for lane in self._lanes(epoch, rank, split) if lane]
        return min(heads, key=_by_order, default=None)

    def take(self, batch: ReadyBatch, rank: int) -> None:
        """Remove a batch that `head` returned: that rank gets it."""
        splits = self._waiting[batch.split.epoch]
        owners = splits[batch.split.split]
        owner = self._owner(batch)
        owners[owner].popleft()
        if not owners[owner]:
            del owners[owner]
            self._tidy(batch.split)
        self._count(batch.split.epoch, rank, 1)

    def given(self, epoch: int, rank: int) -> int:
        """Return how many batches of an epoch a rank got."""
        return self._given.get(epoch, {}).get(rank, 0)

    def forget(self, split: HeldSplit) -> None:
        """Remove a split's batches."""
        self._waiting.get(split.epoch, {}).pop(split.split, None)
        self._tidy(split)

    def end_epoch(self, epoch: int) -> None:
        """Remove all that is known of an epoch."""
        self._waiting.pop(epoch, None)
        self._given.pop(epoch, None)

    def _owner(self, batch: ReadyBatch) -> int:
        if not self._deterministic or self.size == 0:
            return _ANYBODY
        return (batch.split.split + batch.sequence) % self.size

    def _lane(self, batch: ReadyBatch) -> deque[ReadyBatch]:
        owners = self._waiting.setdefault(batch.split.epoch, {}).setdefault(batch.split.split, {})
        return owners.setdefault(self._owner(batch), deque())

    def _lanes(self, epoch: int, rank: int, split: int) -> Iterator[deque[ReadyBatch]]:
        splits = self._waiting.get(epoch, {})
        owner = rank if self._deterministic else _ANYBODY
        chosen = (owners for number, owners in splits.items() if split == ANY_SPLIT or number <= split)
        return (owners[owner] for owners in chosen if owner in owners)

    def _tidy(self, split: HeldSplit) -> None:
        splits = self._waiting.get(split.epoch, {})
        if not splits.get(split.split, True):
            del splits[split.split]
        if not splits:
            self._waiting.pop(split.epoch, None)

    def _count(self, epoch: int, rank: int, by: int) -> None:
        ranks = self._given.setdefault(epoch, {})
        ranks[rank] = ranks.get(rank, 0) + by
