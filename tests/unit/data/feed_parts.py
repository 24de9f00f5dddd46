"""What tests of the feed put around it: workers and an outlet that only remember, and what the coordinator says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hetero._proto import splits_pb2 as pb
from hetero.data.arena import SlotId
from hetero.data.feed_splits import HeldSplit, ReadyBatch
from hetero.data.feed_tasks import Tasks
from hetero.data.feed_wire import encode
from hetero.data.worker_link import Task, WorkerBatch


class FakePort:
    """A worker as the feed sees it; the test says what it does."""

    def __init__(self, tasks: Tasks, name: str = "worker-0") -> None:
        self.name, self.pid = name, 0
        self.tasks = tasks
        self.given: list[Task] = []
        self.abandoned = self.listings = 0
        self.shares: list[int] = []
        self.memory: dict[SlotId, memoryview] = {}
        self.freed: list[SlotId] = []
        self._offset = 0
        tasks.on_worker(self)

    def run(self, task: Task) -> None:
        self.given.append(task)

    def abandon(self) -> None:
        self.abandoned += 1

    def list_splits(self) -> None:
        self.listings += 1

    def share(self, size: int) -> None:
        self.shares.append(size)

    def payload(self, slot: SlotId) -> memoryview:
        return self.memory[slot]

    def free(self, slot: SlotId) -> None:
        self.freed.append(slot)
        del self.memory[slot]

    def batch(self, sequence: int, content: Any = None, rows: int = 2) -> SlotId:
        """Finish a batch: `content`, by default an array that says which it is."""
        if content is None:
            task = self.given[-1]
            content = {"id": np.tile(np.array([task.epoch, task.split, sequence]), (rows, 1))}
        encoded = encode(content)
        slot = SlotId(0, self._offset, encoded.size)
        self._offset += max(64, encoded.size)
        self.memory[slot] = memoryview(b"".join(encoded.buffers))
        self.tasks.on_batch(self, WorkerBatch(sequence, encoded.rows, slot, encoded.layout))
        return slot

    def end(self, batches: int, replayed: int = 0) -> None:
        self.tasks.on_end(self, batches, replayed)

    def die(self) -> None:
        self.tasks.on_gone(self)


class FakeOutlet:
    """Takes what is ready and remembers what it was told."""

    def __init__(self) -> None:
        self.ranks_to_tell = 0
        self.ready: list[ReadyBatch] = []
        self.ended: list[HeldSplit] = []
        self.forgotten: list[tuple[int, int, int]] = []
        self.ended_epochs: list[int] = []

    def put(self, batch: ReadyBatch) -> None:
        self.ready.append(batch)

    def end(self, split: HeldSplit) -> None:
        self.ended.append(split)

    def forget(self, split: HeldSplit) -> None:
        self.forgotten.append((split.epoch, split.split, split.attempt))

    def end_epoch(self, epoch: int) -> None:
        self.ended_epochs.append(epoch)

    def arrive(self, count: int | None = None) -> None:
        """Let ready batches arrive at ranks."""
        batches, self.ready = self.ready[:count], self.ready[len(self.ready[:count]) :]
        for batch in batches:
            batch.received()


def assignment(split: int, attempt: int = 1, epoch: int = 0, arrived: bytes = b"") -> pb.Assignment:
    return pb.Assignment(id=split_id(split, attempt, epoch), value=f'"file-{split}"', arrived=arrived)


def assign(*assignments: pb.Assignment) -> pb.ServeReply:
    return pb.ServeReply(assignments=assignments)


def split_id(split: int, attempt: int = 1, epoch: int = 0) -> pb.SplitId:
    return pb.SplitId(epoch=epoch, split=split, attempt=attempt)


def key(split: pb.SplitId) -> tuple[int, int, int]:
    return split.epoch, split.split, split.attempt


class Coordinator:
    """Hears what a feed says."""

    def __init__(self) -> None:
        self.wanted = 0
        self.done: list[pb.SplitDone] = []
        self.bad: list[pb.SplitBad] = []
        self.returned: list[pb.SplitId] = []
        self.lists: list[pb.SplitList] = []

    def hear(self, request: pb.ServeRequest) -> None:
        if request.wanted:
            assert request.wanted > self.wanted, "the number of splits wanted is a total: it only grows"
            self.wanted = request.wanted
        self.done += request.done
        self.bad += request.bad
        self.returned += request.returned
        if request.HasField("list"):
            self.lists.append(request.list)

    def done_keys(self) -> list[tuple[int, int, int]]:
        return [key(done.id) for done in self.done]


def keys(splits: Iterable[Any]) -> list[tuple[int, int, int]]:
    return [key(split.id) for split in splits]
