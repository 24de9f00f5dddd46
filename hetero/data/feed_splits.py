"""One attempt at a split, and its finished batches, as the feed of a data host keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero._proto import splits_pb2 as pb
from hetero.data.feed_wire import BatchId
from hetero.data.worker_link import Task, WorkerBatch, WorkerPort


class Tally:
    """What one worker has done since the feed started, its successors of the same name included.

    Attributes:
        rows, batches: prepared.
        splits: finished.
        waiting: batches prepared and not yet at a rank.
    """

    __slots__ = ("batches", "rows", "splits", "waiting")

    def __init__(self) -> None:
        self.rows = self.batches = self.splits = self.waiting = 0


class ReadyBatch:
    """A finished batch in the memory of its worker.

    Attributes:
        split: what it is part of.
        sequence: 0, 1, ... within the split.
        rows, size: number of rows, of bytes.
        layout: a serialised `Layout`.
        order: ascends as batches become ready.
        dropped: it is not to be sent any more.
    """

    __slots__ = ("_holds", "_port", "_slot", "dropped", "layout", "order", "rows", "sequence", "size", "split", "tally")

    def __init__(self, split: HeldSplit, batch: WorkerBatch, port: WorkerPort, tally: Tally, order: int) -> None:
        self.split, self.sequence, self.rows, self.size = split, batch.sequence, batch.rows, batch.slot.size
        self.layout, self.order, self.tally, self.dropped = batch.layout, order, tally, False
        self._port, self._slot, self._holds = port, batch.slot, 1

    @property
    def id(self) -> BatchId:
        """What it is known by."""
        return BatchId(self.split.epoch, self.split.split, self.sequence, self.split.attempt)

    def hold(self) -> memoryview:
        """Return its bytes, which stay there until `release`."""
        self._holds += 1
        return self._port.payload(self._slot)

    def release(self) -> None:
        """Let go; with the last one the worker gets its memory back."""
        self._holds -= 1
        if self._holds == 0:
            self._port.free(self._slot)

    def received(self) -> None:
        """It has arrived at a rank."""
        if not self.dropped:
            self.split.batch_received(self)


class HeldSplit:
    """One attempt at a split.

    Attributes:
        epoch, split, attempt: which.
        value: the split itself, JSON.
        arrived: bitmap of batches that ranks had before.
        produced: number of the next batch; those below it are finished or were left out.
        unreceived: finished and not yet at a rank, by sequence.
        total: all batches below it are finished or at ranks, and no others come; None as long as a worker has to work
            on it.
        batches: of the whole split, once `total` is known: an earlier attempt may have got further, and with gaps.
        cause: why it has no more than these; None: it is complete.
        told: ranks that know its end.
        deaths: of workers in a row that did not get it a batch further.
        deaths_before: of workers of the host, in whichever split, before these.
    """

    def __init__(self, assignment: pb.Assignment, settle: Callable[[HeldSplit], None]) -> None:
        self.epoch, self.split, self.attempt = assignment.id.epoch, assignment.id.split, assignment.id.attempt
        self.value, self.arrived = assignment.value, assignment.arrived
        self.produced = self.replayed = self.start = 0
        self.deaths = self.deaths_before = 0
        self.unreceived: dict[int, ReadyBatch] = {}
        self.total: int | None = None
        self.batches = 0
        self.cause: dict[str, Any] | None = None
        self.told: set[int] = set()
        self.waits_since_s = 0.0  # for a worker
        self._settle = settle

    @property
    def key(self) -> tuple[int, int]:
        """Epoch and position: the order in which splits are worked on."""
        return self.epoch, self.split

    @property
    def id(self) -> pb.SplitId:
        """What the coordinator knows it by."""
        return pb.SplitId(epoch=self.epoch, split=self.split, attempt=self.attempt)

    def task(self) -> Task:
        """Return what the next worker has to do."""
        self.start = self.produced
        return Task(self.epoch, self.split, self.value, self.attempt, self.arrived, self.start)

    def batch_received(self, batch: ReadyBatch) -> None:
        """A batch has arrived at a rank."""
        if self.unreceived.pop(batch.sequence, None) is not None:
            batch.tally.waiting -= 1
            batch.release()
            self._settle(self)

    def end_received(self, rank: int) -> None:
        """A rank knows how many batches there are."""
        self.told.add(rank)
        self._settle(self)

    def end(self, batches: int, cause: dict[str, Any] | None) -> None:
        """No worker has to go on with it."""
        self.total, self.cause = max(batches, self.produced), cause
        self.batches = self.total + (int.from_bytes(self.arrived, "little") >> self.total).bit_count()

    def worker_died(self, deaths: int) -> None:
        """Count the death, and what its worker had prepared a second time, as far as that is known.

        Args:
            deaths: of workers of the host so far, this one included.
        """
        if self.deaths == 0:
            self.deaths_before = deaths - 1
        self.deaths += 1
        if self.produced > self.start:
            window = (1 << self.produced - self.start) - 1
            left_out = int.from_bytes(self.arrived, "little") >> self.start & window
            self.replayed += self.start + left_out.bit_count()
