"""One epoch of the grpc engine as a rank reads it, and the order in which batches that have arrived are handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

from hetero.data.arrivals import Arrivals
from hetero.data.feed_wire import BatchId

ANY_SPLIT = -1


class Queued:
    """A batch that has arrived and is not handed out yet.

    Attributes:
        batch: what it is known by.
        size: its bytes.
        data: nested structure of arrays.
        stream: on whose credit it is; None once that was given back.
    """

    __slots__ = ("batch", "data", "size", "stream")

    def __init__(self, batch: BatchId, size: int, data: Any, stream: Any) -> None:
        self.batch, self.size, self.data, self.stream = batch, size, data, stream


class Order(Protocol):
    """Batches of one epoch on their way through the rank; the client's lock guards it."""

    batches: int
    bytes: int

    def put(self, queued: Queued) -> None:
        """Take one that has arrived."""
        ...

    def pop(self, *, ended: bool) -> Queued | None:
        """Give the next one; None if it is not here.

        Args:
            ended: Whether all batches of the epoch have arrived.
        """
        ...

    def asked(self) -> int:
        """Return the split of which batches are wanted, ANY_SPLIT: of any."""
        ...

    def held(self) -> Iterator[Queued]:
        """Give those that are here, in any order."""
        ...

    def clear(self) -> None:
        """Forget all of them."""
        ...


class AnyOrder:
    """Hands batches out as they came.

    Attributes:
        batches: how many are here.
        bytes: how large they are.
    """

    def __init__(self) -> None:
        self.batches = self.bytes = 0
        self._queue: deque[Queued] = deque()

    def put(self, queued: Queued) -> None:
        """Take one that has arrived."""
        self.batches += 1
        self.bytes += queued.size
        self._queue.append(queued)

    def pop(self, *, ended: bool) -> Queued | None:  # noqa: ARG002  part of the contract
        """Give the oldest."""
        if not self._queue:
            return None
        queued = self._queue.popleft()
        self.batches -= 1
        self.bytes -= queued.size
        return queued

    def asked(self) -> int:
        """Return ANY_SPLIT."""
        return ANY_SPLIT

    def held(self) -> Iterator[Queued]:
        """Give those that are here."""
        return iter(self._queue)

    def clear(self) -> None:
        """Forget all of them."""
        self._queue.clear()
        self.batches = self.bytes = 0


class SplitOrder:
    """Hands batches out split by split and by sequence, whoever sent them and when: the same in every run.

    Batch q of split s is this rank's if (s + q) % size == rank. A split is over when its end is known and all of this
    rank's batches below that have arrived; the next one is asked for then, whether or not they were handed out.

    Where data hosts are lost and the job's code fails in a split as well, one attempt may get further than another. A
    split that goes bad has its end where it failed, and what an earlier attempt had sent of later batches comes next,
    gaps and all. What comes of a split that was over is handed out at once: then order is lost, and no row.

    Args:
        epoch: which one.
        rank: this rank.
        size: number of ranks.
        arrivals: what has arrived; changed by others.

    Attributes:
        batches: how many are here.
        bytes: how large they are.
    """

    def __init__(self, epoch: int, rank: int, size: int, arrivals: Arrivals) -> None:
        self.batches = self.bytes = 0
        self._epoch, self._rank, self._size, self._arrivals = epoch, rank, size, arrivals
        self._here: dict[tuple[int, int], Queued] = {}
        self._late: deque[Queued] = deque()
        self._next = self._asked = self._first(0)  # to be handed out, and to arrive: (split, sequence)

    def put(self, queued: Queued) -> None:
        """Take one that has arrived."""
        self.batches += 1
        self.bytes += queued.size
        place = queued.batch.split, queued.batch.sequence
        if place < self._next:
            self._late.append(queued)
        else:
            self._here[place] = queued

    def pop(self, *, ended: bool) -> Queued | None:
        """Give the next one in order."""
        queued = self._late.popleft() if self._late else self._pop_next(ended=ended)
        if queued is None:
            return None
        self.batches -= 1
        self.bytes -= queued.size
        return queued

    def asked(self) -> int:
        """Return the lowest split that was never over."""
        while True:
            split, sequence = self._asked
            if self._arrivals.has(self._epoch, split, sequence):
                self._asked = split, sequence + self._size
            elif self._is_over(self._asked):
                self._asked = self._first(split + 1)
            else:
                return split

    def held(self) -> Iterator[Queued]:
        """Give those that are here."""
        return chain(self._late, self._here.values())

    def clear(self) -> None:
        """Forget all of them."""
        self._here.clear()
        self._late.clear()
        self.batches = self.bytes = 0

    def _pop_next(self, *, ended: bool) -> Queued | None:
        while self._next not in self._here and self._is_over(self._next):
            split = self._next[0]
            beyond = (place for place in self._here if self._next < place < (split + 1, 0))
            self._next = min(beyond, default=self._first(split + 1))
        if self._next not in self._here:
            if not ended or not self._here:
                return None
            self._next = min(self._here)  # the end of a split was never told; nothing is missing all the same
        split, sequence = place = self._next
        self._next = split, sequence + self._size
        return self._here.pop(place)

    def _first(self, split: int) -> tuple[int, int]:
        return split, (self._rank - split) % self._size

    def _is_over(self, place: tuple[int, int]) -> bool:
        end = self._arrivals.end(self._epoch, place[0])
        return end is not None and place[1] >= end


class Giver(Protocol):
    """What a source needs of the client that opened it."""

    def begin(self, source: FeedSource) -> None:
        """Let batches of its epoch come."""
        ...

    def take(self, source: FeedSource) -> Any:
        """Wait for the next batch. Raises StopIteration after the last, and what the client cannot go on after."""
        ...

    def leave(self, source: FeedSource) -> None:
        """Take no more."""
        ...


class FeedSource:
    """The raw batches of one rank in one epoch (`hetero.data.engine.Source`); made by `FeedClient.open`.

    Attributes:
        epoch: which one.
        order: those that have arrived; guarded by the client's lock, as is `closed`.
        closed: nobody wants more.
    """

    def __init__(self, epoch: int, order: Order, giver: Giver) -> None:
        self.epoch, self.order, self.closed = epoch, order, False
        self._giver = giver

    def __iter__(self) -> FeedSource:
        """Let batches come; before that the feeds send none of this epoch."""
        self._giver.begin(self)
        return self

    def __next__(self) -> Any:
        """Wait for the next batch: a nested structure of arrays, which may be read-only.

        Raises:
            HeteroError: the client was closed, or what a feed sent cannot be used.
        """
        return self._giver.take(self)

    def close(self) -> None:
        """Take no more, and wake whoever waits in `next`. May be repeated."""
        self._giver.leave(self)

    def is_stuck(self, *, ended_elsewhere: bool) -> bool:  # noqa: ARG002  part of the contract
        """Tell that it never is: whatever a lost data host had in hand is prepared again by another."""
        return False
