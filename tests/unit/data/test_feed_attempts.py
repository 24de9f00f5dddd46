"""Attempts at a split: revoked, given anew, older and newer, and what each leaves behind."""

from __future__ import annotations

from feed_parts import FakePort, assign, assignment, key, split_id
from feed_tasks_fixtures import clock, connected, coordinator, outlet, tasks

from hetero._proto import splits_pb2 as pb

__all__ = ["clock", "connected", "coordinator", "outlet", "tasks"]  # fixtures


def test_a_split_that_an_earlier_attempt_got_further_in_has_its_batches_too(tasks, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, attempt=2, arrived=b"\x1f")))
    tasks.on_failed(worker, {"exception": "OSError"}, 2, 2)
    assert [bad.batches for bad in coordinator.bad] == [5]


def test_a_revoked_split_is_dropped_with_everything_that_still_comes_of_it(tasks, outlet, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, attempt=1)))
    worker.batch(0)
    tasks.on_reply(pb.ServeReply(revoked=[split_id(0, attempt=1)]))
    assert worker.abandoned == 1
    assert len(worker.freed) == 1
    assert outlet.forgotten == [(0, 0, 1)]
    worker.batch(1)  # it had not heard yet
    assert len(worker.freed) == 2
    tasks.on_reply(assign(assignment(0, attempt=2)))
    assert len(worker.given) == 1, "it is not idle before it has heard"
    outlet.arrive()  # what was on its way to a rank
    tasks.on_abandoned(worker)
    assert [(task.attempt, task.start) for task in worker.given] == [(1, 0), (2, 0)]
    worker.batch(0)
    worker.end(1)
    outlet.arrive()
    assert coordinator.done_keys() == [(0, 0, 2)]
    assert len(worker.freed) == 3
    assert not worker.memory


def test_a_worker_that_had_just_ended_when_its_split_was_revoked_is_idle(tasks, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0)))
    tasks.on_reply(pb.ServeReply(revoked=[split_id(0)]))
    worker.end(4)
    assert not coordinator.done
    tasks.on_reply(assign(assignment(1)))
    assert [task.split for task in worker.given] == [0, 1]


def test_an_old_revocation_does_not_touch_a_newer_attempt(tasks):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, attempt=5)))
    tasks.on_reply(pb.ServeReply(revoked=[split_id(0, attempt=4)]))
    assert worker.abandoned == 0
    assert [key(split) for split in tasks.hello()[0]] == [(0, 0, 5)]


def test_a_newer_attempt_takes_the_place_of_an_older_one_and_not_the_other_way_round(tasks, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, attempt=2)))
    tasks.on_reply(assign(assignment(0, attempt=2)))
    tasks.on_reply(assign(assignment(0, attempt=1)))
    assert worker.abandoned == 0
    tasks.on_reply(assign(assignment(0, attempt=3)))
    assert worker.abandoned == 1
    tasks.on_abandoned(worker)
    assert [task.attempt for task in worker.given] == [2, 3]
    worker.end(0)
    assert coordinator.done_keys() == [(0, 0, 3)]


def test_a_done_split_that_is_handed_out_again_is_held_and_no_longer_done(tasks):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, attempt=1)))
    worker.end(0)
    tasks.on_reply(assign(assignment(0, attempt=2)))
    held, done = tasks.hello()
    assert [key(split) for split in held] == [(0, 0, 2)]
    assert not done
