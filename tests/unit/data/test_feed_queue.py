"""Whose a ready batch is, and in which order ranks get them."""

from __future__ import annotations

import pytest
from feed_parts import FakeOutlet, FakePort, assign, assignment

from hetero.data.feed_queue import ANY_SPLIT, ReadyQueue
from hetero.data.feed_tasks import Tasks


def ready(splits: int, sequences: int) -> list:
    """Return batches in the order of their sequences, as workers side by side finish them."""
    outlet = FakeOutlet()
    tasks = Tasks("algo-1", lambda _: None, outlet, no_worker_s=5.0, on_worker=lambda _: None)
    workers = [FakePort(tasks, f"worker-{index}") for index in range(splits)]
    tasks.on_reply(assign(*(assignment(split) for split in range(splits))))
    for sequence in range(sequences):
        for worker in workers:
            worker.batch(sequence)
    return outlet.ready


def drain(queue: ReadyQueue, rank: int, split: int = ANY_SPLIT, epoch: int = 0) -> list[tuple[int, int]]:
    taken = []
    while (batch := queue.head(epoch, rank, split)) is not None:
        queue.take(batch, rank)
        taken.append((batch.split.split, batch.sequence))
    return taken


def test_any_rank_gets_the_oldest_batch():
    queue = ReadyQueue(deterministic=False)
    for batch in ready(splits=2, sequences=2):
        queue.put(batch)
    queue.set_size(3)
    assert queue.epochs() == [0]
    assert drain(queue, rank=2) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert queue.given(0, 2) == 4
    assert not queue.epochs()


def test_a_rank_may_ask_for_splits_up_to_one():
    queue = ReadyQueue(deterministic=False)
    queue.set_size(1)
    for batch in ready(splits=2, sequences=2):
        queue.put(batch)
    assert drain(queue, rank=0, split=0) == [(0, 0), (0, 1)]
    assert drain(queue, rank=0, split=0) == []
    assert drain(queue, rank=0, split=7) == [(1, 0), (1, 1)]


def test_what_is_put_back_comes_before_what_is_younger():
    queue = ReadyQueue(deterministic=False)
    queue.set_size(2)
    batches = ready(splits=1, sequences=4)
    for batch in batches:
        queue.put(batch)
    for batch in batches[:3]:
        queue.take(batch, 0)
    queue.put_back([batches[2], batches[0]], 0)
    assert queue.given(0, 0) == 1
    assert drain(queue, rank=1) == [(0, 0), (0, 2), (0, 3)]


@pytest.mark.parametrize("known", [True, False])
def test_batches_of_a_deterministic_job_have_fixed_ranks(known):
    queue = ReadyQueue(deterministic=True)
    if known:
        queue.set_size(2)
    for batch in ready(splits=2, sequences=3):
        queue.put(batch)
    if not known:
        assert queue.head(0, 0, 0) is None
        queue.set_size(2)
    assert drain(queue, rank=0, split=0) == [(0, 0), (0, 2)]
    assert drain(queue, rank=0, split=1) == [(1, 1)]
    assert drain(queue, rank=1) == [(1, 0), (0, 1), (1, 2)]
    assert not queue.epochs()


def test_a_split_that_is_given_up_leaves_nothing():
    queue = ReadyQueue(deterministic=False)
    queue.set_size(1)
    batches = ready(splits=2, sequences=2)
    for batch in batches:
        queue.put(batch)
    queue.forget(batches[0].split)
    queue.forget(batches[0].split)
    assert drain(queue, rank=0) == [(1, 0), (1, 1)]
    assert queue.given(0, 0) == 2
    queue.end_epoch(0)
    assert queue.given(0, 0) == 0
