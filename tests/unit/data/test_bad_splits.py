"""Deterministic jobs that skip bad splits: no rank waits for a batch that never comes, and none loses one that came."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from feed_parts import Coordinator, FakeOutlet, FakePort, assign, assignment

from hetero import bitmap
from hetero.data.arrivals import Arrivals
from hetero.data.feed_queue import ReadyQueue
from hetero.data.feed_source import Queued, SplitOrder
from hetero.data.feed_splits import HeldSplit
from hetero.data.feed_tasks import MAX_DEATHS, Tasks
from hetero.data.feed_wire import BatchId

SPLITS, BATCHES = 3, 8  # and as many batches in each, unless it goes bad


class Rank:
    """Takes what it is given, and hands on what is next."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.arrivals = rank, Arrivals()
        self.order = SplitOrder(0, rank, size, self.arrivals)
        self.accepted: list[tuple[int, int]] = []
        self.handed_out: list[tuple[int, int]] = []

    def receive(self, batch: BatchId) -> None:
        if self.arrivals.accept(*batch):
            self.accepted.append((batch.split, batch.sequence))
            self.order.put(Queued(batch, 1, None, None))

    def read(self) -> None:
        while (queued := self.order.pop(ended=False)) is not None:
            self.handed_out.append((queued.batch.split, queued.batch.sequence))


class Feed:
    """A feed with one worker, whose ranks are always connected."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks, self.coordinator, self.outlet = ranks, Coordinator(), FakeOutlet()
        self.outlet.ranks_to_tell = len(ranks)
        self.tasks = Tasks("algo-1", self.coordinator.hear, self.outlet, no_worker_s=5.0, on_worker=lambda _: None)
        self.queue = ReadyQueue(deterministic=True)
        self.queue.set_size(len(ranks))
        self.ends: list[tuple[Rank, HeldSplit]] = []
        self.worker = FakePort(self.tasks)

    def work(self, split: int, attempt: int, arrived: bytes, upto: int, outcome: str) -> None:
        """Prepare what is missing of a split's first `upto` batches; then it ends, or fails, or neither."""
        self.tasks.on_reply(assign(assignment(split, attempt, arrived=arrived)))
        for sequence in range(upto):
            if not bitmap.has(arrived, sequence):
                self.worker.batch(sequence)
        if outcome == "end":
            self.worker.end(upto)
        elif outcome == "fail":
            self.tasks.on_failed(self.worker, {"exception": "ValueError"}, upto, 0)
        elif outcome == "kill":
            for _ in range(MAX_DEATHS):
                self.worker.die()
                self.worker = FakePort(self.tasks)
        for batch in self.outlet.ready:
            self.queue.put(batch)
        self.ends += [(rank, ended) for ended in self.outlet.ended for rank in self.ranks]
        self.outlet.ready, self.outlet.ended = [], []

    def send(self, chance: random.Random) -> bool:
        """Bring a batch or the word of an end to its rank. Returns False if nothing can be sent."""
        heads = [(rank, self.queue.head(0, rank.rank, rank.order.asked())) for rank in self.ranks]
        steps: list[tuple[Rank, object]] = [*((rank, head) for rank, head in heads if head is not None), *self.ends]
        if not steps:
            return False
        rank, what = chance.choice(steps)
        if isinstance(what, HeldSplit):
            self.ends.remove((rank, what))
            rank.arrivals.accept_end(0, what.split, what.attempt, what.total)
            what.end_received(rank.rank)
        else:
            self.queue.take(what, rank.rank)
            rank.receive(what.id)
            what.received()
        if chance.random() < 0.5:
            rank.read()
        return True


@pytest.mark.parametrize("how", ["fail", "kill"])
def test_a_split_that_goes_bad_before_what_had_arrived_leaves_no_rank_waiting(how):
    ranks = [Rank(rank, 2) for rank in range(2)]
    for sequence in (0, 1, 2, 4, 6):  # 3 and 5, of rank 1, are lost with their host
        ranks[sequence % 2].receive(BatchId(0, 0, sequence, 1))
    feed = Feed(ranks)
    feed.work(0, 2, b"\x57", 3, how)
    while feed.send(random.Random(0)):
        pass
    for rank in ranks:
        rank.read()
    assert [rank.handed_out for rank in ranks] == [[(0, 0), (0, 2), (0, 4), (0, 6)], [(0, 1)]]
    assert [rank.order.asked() for rank in ranks] == [1, 1]
    assert [bad.batches for bad in feed.coordinator.bad] == [5]


def test_what_another_attempt_gets_of_a_split_that_was_over_still_comes():
    """It went bad, one rank heard of it and went on; then its host was lost, and the next one gets further."""
    ranks = [Rank(rank, 2) for rank in range(2)]
    ranks[0].receive(BatchId(0, 0, 0, 1))
    ranks[0].arrivals.accept_end(0, 0, 1, 1)
    ranks[0].read()
    assert ranks[0].order.asked() == 1
    ranks[0].receive(BatchId(0, 1, 1, 2))
    ranks[0].read()
    for rank in ranks:
        rank.arrivals.fence(0, 1, [0])
    feed = Feed(ranks)
    feed.work(0, 3, b"\x01", 4, "end")
    while feed.send(random.Random(0)):
        pass
    for rank in ranks:
        rank.read()
    assert ranks[0].handed_out == [(0, 0), (1, 1), (0, 2)]
    assert ranks[1].handed_out == [(0, 1), (0, 3)]
    assert feed.coordinator.done_keys() == [(0, 0, 3)]


def test_whatever_fails_and_is_lost_every_batch_is_handed_out_once_and_no_rank_waits():
    """Feeds work on a split, break down in the middle, and are followed by others, until one lives."""
    happened: Counter[str] = Counter()
    for seed in range(1500):
        chance = random.Random(seed)
        size = chance.randrange(1, 4)
        ranks = [Rank(rank, size) for rank in range(size)]
        attempt, arrived = 0, dict.fromkeys(range(SPLITS), b"")
        for left in range(chance.randrange(4), -1, -1):
            feed, outcomes = Feed(ranks), {}
            for split in range(SPLITS):
                outcomes[split] = chance.choice(("end", "fail", "kill") if left == 0 else ("end", "fail", "none"))
                upto = BATCHES if outcomes[split] == "end" else chance.randrange(BATCHES)
                attempt += 1
                feed.work(split, attempt, arrived[split], upto, outcomes[split])
                gaps = [q for q in range(upto, BATCHES) if not bitmap.has(arrived[split], q)]
                happened["gap"] += outcomes[split] != "end" and min(gaps, default=BATCHES) < _length(arrived[split])
                if outcomes[split] == "none":
                    break
            for _ in range(10_000 if left == 0 else chance.randrange(40)):
                if not feed.send(chance):
                    break
            happened["word"] += left > 0 and any(0 < len(held.told) < size for held in feed.tasks._held.values())
            if left:
                for rank in ranks:
                    for split, batches in rank.arrivals.fence(0, attempt, range(SPLITS)).items():
                        arrived[split] = bitmap.union(arrived[split], batches)

        over = [*feed.coordinator.done, *feed.coordinator.bad]
        assert sorted(report.id.split for report in over) == list(range(SPLITS)), seed
        for rank in ranks:
            rank.read()
            assert sorted(rank.handed_out) == sorted(rank.accepted), seed
            assert len(set(rank.accepted)) == len(rank.accepted), seed
            assert rank.order.asked() == SPLITS, seed
            happened["late"] += rank.handed_out != sorted(rank.handed_out)
        arrived_of = Counter(split for rank in ranks for split, _ in rank.accepted)
        assert {report.id.split: report.batches for report in over} == {s: arrived_of[s] for s in range(SPLITS)}, seed
    assert min(happened[what] for what in ("gap", "word", "late")) > 10, happened


def _length(batches: bytes) -> int:
    return int.from_bytes(batches, "little").bit_length()
