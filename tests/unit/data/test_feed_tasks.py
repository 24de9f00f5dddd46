"""The splits that a feed has at hand: who works on them, what is reported, and what outlives a worker."""

from __future__ import annotations

import json

from feed_parts import FakePort, assign, assignment, key, split_id
from feed_tasks_fixtures import clock, connected, coordinator, outlet, tasks

from hetero._proto import splits_pb2 as pb
from hetero.data.feed_tasks import MAX_DEATHS, MOST_DEATHS, Tasks

__all__ = ["clock", "connected", "coordinator", "outlet", "tasks"]  # fixtures


def test_a_split_runs_on_an_idle_worker_and_is_done_once_its_batches_have_arrived(
    tasks, outlet, coordinator, connected
):
    worker = FakePort(tasks)
    assert connected == ["worker-0"]
    assert coordinator.wanted == 1
    tasks.on_reply(assign(assignment(3, attempt=7)))
    assert [(task.epoch, task.split, task.attempt, task.value_json) for task in worker.given] == [(0, 3, 7, '"file-3"')]
    worker.batch(0)
    worker.batch(1)
    worker.end(2)
    assert coordinator.wanted == 2, "a worker that has ended asks for more before its batches have arrived"
    outlet.arrive(1)
    assert not coordinator.done
    assert len(worker.freed) == 1
    outlet.arrive()
    assert len(worker.freed) == 2
    assert [(key(done.id), done.batches, done.replayed) for done in coordinator.done] == [((0, 3, 7), 2, 0)]


def test_workers_are_told_their_share_of_the_hosts_memory_where_it_changes(outlet, coordinator):
    parts = {"no_worker_s": 5.0, "on_worker": lambda _: None}
    tasks = Tasks("algo-1", coordinator.hear, outlet, **parts, share_bytes=lambda workers: 1200 // max(2, workers))
    first = [FakePort(tasks, "worker-0"), FakePort(tasks, "worker-1")]
    added = [FakePort(tasks, "worker-2"), FakePort(tasks, "worker-3")]
    assert [port.shares for port in first] == [[600, 400, 300], [600, 400, 300]]
    assert [port.shares for port in added] == [[400, 300], [300]]
    for port in added:
        port.die()
    assert [port.shares[-2:] for port in first] == [[400, 600], [400, 600]]
    first[1].die()
    assert FakePort(tasks, "worker-1").shares == [600]
    assert first[0].shares[-1] == 600


def test_workers_are_all_busy_if_none_waits_for_a_split(tasks):
    assert not tasks.all_busy
    worker = FakePort(tasks)
    assert not tasks.all_busy
    tasks.on_reply(assign(assignment(0)))
    assert tasks.all_busy
    worker.end(0)
    assert not tasks.all_busy


def test_no_more_splits_are_asked_for_than_workers_are_idle(tasks, coordinator):
    workers = [FakePort(tasks, f"worker-{index}") for index in range(3)]
    assert coordinator.wanted == 3
    tasks.on_reply(assign(assignment(0), assignment(1)))
    assert coordinator.wanted == 3
    workers[0].die()  # its split goes to the third one, for which another is on its way already
    assert [task.split for task in workers[2].given] == [0]
    FakePort(tasks, "worker-0")
    assert coordinator.wanted == 3
    workers[1].end(0)
    assert coordinator.wanted == 4


def test_a_new_stream_to_the_coordinator_asks_for_the_idle_workers(tasks, coordinator):
    workers = [FakePort(tasks, f"worker-{index}") for index in range(3)]
    tasks.on_reply(assign(assignment(0)))
    coordinator.wanted = 0
    assert tasks.wanted() == 2
    held, done = tasks.hello()
    assert [key(split) for split in held] == [(0, 0, 1)]
    assert not done
    workers[0].end(0)
    assert coordinator.wanted == 3
    assert [key(split.id) for split in tasks.hello()[1]] == [(0, 0, 1)]


def test_a_batch_that_a_worker_gives_twice_is_taken_once(tasks, outlet, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0)))
    for sequence in (0, 0, 1, 0):
        worker.batch(sequence)
    worker.end(2)
    assert len(worker.freed) == 2
    assert [batch.sequence for batch in outlet.ready] == [0, 1]
    outlet.arrive()
    assert [done.batches for done in coordinator.done] == [2]


def test_lower_splits_are_worked_on_first(tasks):
    tasks.on_reply(assign(assignment(2), assignment(0, epoch=1), assignment(1)))
    worker = FakePort(tasks)
    for _ in range(3):
        worker.end(0)
    assert [(task.epoch, task.split) for task in worker.given] == [(0, 1), (0, 2), (1, 0)]


def test_a_split_without_new_batches_is_done_at_once(tasks, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, arrived=b"\x07")))
    assert worker.given[0].skip == b"\x07"
    worker.end(3, replayed=3)
    assert [(done.batches, done.replayed) for done in coordinator.done] == [(3, 3)]


def test_the_split_of_a_dead_worker_goes_on_elsewhere_with_what_is_missing(tasks, outlet, coordinator):
    first, second = FakePort(tasks), FakePort(tasks, "worker-1")
    tasks.on_reply(assign(assignment(0)))
    first.batch(0)
    first.batch(1)
    first.die()
    assert [(task.split, task.start) for task in second.given] == [(0, 2)]
    second.batch(2)
    second.end(3, replayed=2)
    assert [batch.id.sequence for batch in outlet.ready] == [0, 1, 2]
    assert not first.freed, "what a worker had finished before it died is sent"
    outlet.arrive()
    assert len(first.freed) == 2
    assert [(done.batches, done.replayed) for done in coordinator.done] == [(3, 2)]


def test_what_a_worker_repeated_before_it_died_is_counted_too(tasks, outlet, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, arrived=b"\x0a")))  # 1 and 3 have arrived
    worker.batch(0)
    worker.batch(2)
    worker.die()
    second = FakePort(tasks)
    assert second.given[0].start == 3
    second.die()  # before it had got so far
    third = FakePort(tasks)
    third.batch(4)
    third.end(5, replayed=4)
    outlet.arrive()
    assert [(done.batches, done.replayed) for done in coordinator.done] == [(5, 1 + 4)]


def test_a_split_that_kills_worker_after_worker_is_bad(tasks, outlet, coordinator):
    FakePort(tasks)
    tasks.on_reply(assign(assignment(5, attempt=2)))
    for death in range(MAX_DEATHS - 1):
        worker = next(iter(tasks._workers))
        worker.die()
        worker = FakePort(tasks, f"again-{death}")
    worker.batch(0)  # one batch further: counted anew
    for death in range(MAX_DEATHS):
        assert not coordinator.bad
        assert [task.start for task in worker.given] == [1 if death else 0]
        worker.die()
        worker = FakePort(tasks, f"once more-{death}")
    assert not worker.given
    assert not coordinator.bad, "its batch is still on its way"
    outlet.arrive()
    (bad,) = coordinator.bad
    cause = json.loads(bad.cause_json)
    assert (key(bad.id), bad.batches, cause["exception"], cause["host"]) == ((0, 5, 2), 1, "ChildFailed", "algo-1")
    assert "split 5 of epoch 0" in cause["message"]
    assert "file-5" in cause["message"]
    assert f"killed {MAX_DEATHS} workers" in cause["message"]
    assert not coordinator.done


def test_a_split_is_not_bad_where_workers_die_in_other_splits_as_well(tasks, outlet, coordinator):
    one, other = FakePort(tasks, "one"), FakePort(tasks, "other")
    tasks.on_reply(assign(assignment(0), assignment(1)))
    for death in range(MOST_DEATHS - 1):
        for worker in (one, other):
            worker.die()
        one, other = FakePort(tasks, f"one-{death}"), FakePort(tasks, f"other-{death}")
        assert not coordinator.bad
    one.die()
    assert [key(bad.id)[1] for bad in coordinator.bad] == [0], "but not without end"


def test_a_failure_of_the_jobs_code_is_told_once_what_was_finished_has_arrived(tasks, outlet, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0)))
    worker.batch(0)
    tasks.on_failed(worker, {"exception": "ValueError", "message": "no such image"}, 1, 0)
    assert not coordinator.bad
    assert coordinator.wanted == 2, "the worker goes on with other splits"
    outlet.arrive()
    (bad,) = coordinator.bad
    assert json.loads(bad.cause_json)["exception"] == "ValueError"
    assert bad.batches == 1


def test_a_bad_split_stays_held_until_the_coordinator_has_dealt_with_it(tasks, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0), assignment(1)))
    for _ in range(2):
        tasks.on_failed(worker, {"exception": "ValueError"}, 0, 0)
    assert [key(split) for split in tasks.hello()[0]] == [(0, 0, 1), (0, 1, 1)]
    tasks.on_reply(pb.ServeReply(welcome=True, revoked=[split_id(0)]))
    assert [key(split) for split in tasks.hello()[0]] == [(0, 1, 1)]
    tasks.on_reply(pb.ServeReply(epochs_ended=[0]))
    assert tasks.hello() == ([], [])
    assert [bad.id.split for bad in coordinator.bad] == [0, 1]


def test_splits_go_back_when_no_worker_comes(tasks, clock, outlet, coordinator):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0), assignment(1)))
    worker.batch(0)
    worker.end(1)  # finished: stays, workers or not
    worker.batch(0)
    worker.die()
    clock.now_s += 4.9
    tasks.tick()
    assert not coordinator.returned
    clock.now_s += 0.2
    tasks.tick()
    assert [key(split) for split in coordinator.returned] == [(0, 1, 1)]
    assert len(worker.freed) == 1, "its finished batch is not sent any more"
    assert [key(split) for split in tasks.hello()[0]] == [(0, 0, 1)]
    tasks.on_reply(assign(assignment(2)))  # had been on its way
    tasks.tick()
    assert [split.split for split in coordinator.returned] == [1, 2]
    outlet.arrive()
    assert coordinator.done_keys() == [(0, 0, 1)]


def test_a_split_that_finds_no_free_worker_goes_back_in_the_end(tasks, clock, coordinator):
    first, second = FakePort(tasks), FakePort(tasks, "worker-1")
    tasks.on_reply(assign(assignment(0), assignment(1)))
    first.die()
    for _ in range(29):
        clock.now_s += 1.0
        tasks.tick()
    assert not coordinator.returned
    clock.now_s += 1.0
    tasks.tick()
    assert [split.split for split in coordinator.returned] == [0]
    assert second.abandoned == 0


def test_an_ended_epoch_leaves_nothing(tasks, outlet):
    worker, idle = FakePort(tasks), FakePort(tasks, "worker-1")
    tasks.on_reply(assign(assignment(0), assignment(1), assignment(0, epoch=1)))
    worker.batch(0)
    idle.end(0)
    assert idle.given[-1].epoch == 1
    tasks.on_reply(pb.ServeReply(epochs_ended=[0]))
    held, done = tasks.hello()
    assert [key(split) for split in held] == [(1, 0, 1)]
    assert not done
    assert worker.abandoned == 1
    assert not worker.memory
    assert outlet.ended_epochs == [0]


def test_a_split_of_a_deterministic_job_is_done_once_every_rank_knows_its_end(tasks, outlet, coordinator):
    outlet.ranks_to_tell = 2
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0)))
    worker.end(0)
    (split,) = outlet.ended
    split.end_received(0)
    split.end_received(0)
    assert not coordinator.done
    split.end_received(1)
    assert coordinator.done_keys() == [(0, 0, 1)]
    split.end_received(1)  # from a stream that was taken up again
    assert len(coordinator.done) == 1


def test_the_end_of_a_revoked_attempt_does_not_settle_its_successor(tasks, outlet, coordinator):
    outlet.ranks_to_tell = 1
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(0, attempt=1)))
    worker.end(0)
    tasks.on_reply(assign(assignment(0, attempt=2)))
    outlet.ended[0].end_received(0)
    assert not coordinator.done
    worker.end(0)
    outlet.ended[1].end_received(0)
    assert coordinator.done_keys() == [(0, 0, 2)]


def test_the_list_of_splits_is_made_by_one_worker_and_kept(tasks, coordinator):
    tasks.on_reply(pb.ServeReply(list_splits=True))
    first, second = FakePort(tasks), FakePort(tasks, "worker-1")
    tasks.on_reply(pb.ServeReply(list_splits=True))
    assert (first.listings, second.listings) == (1, 0)
    first.die()
    assert second.listings == 1, "another one does it"
    tasks.on_splits(second, ['"a"', '"b"'])
    tasks.on_reply(pb.ServeReply(list_splits=True))  # a coordinator that has lost it
    assert second.listings == 1
    assert [list(answer.values) for answer in coordinator.lists] == [['"a"', '"b"']] * 2


def test_a_list_that_cannot_be_made_is_told(tasks, coordinator):
    tasks.on_reply(pb.ServeReply(list_splits=True))
    worker = FakePort(tasks)
    tasks.on_list_failed(worker, {"exception": "KeyError", "message": "'training'"})
    for _ in range(MAX_DEATHS):
        tasks.on_reply(pb.ServeReply(list_splits=True))
        worker.die()
        worker = FakePort(tasks)
    causes = [json.loads(answer.cause_json)["exception"] for answer in coordinator.lists]
    assert causes == ["KeyError", "ChildFailed"]


def test_statistics_add_up(tasks, outlet):
    worker = FakePort(tasks)
    tasks.on_reply(assign(assignment(4)))
    slot = worker.batch(0, rows=3)
    (stats,), batches, size = tasks.stats()
    assert (batches, size) == (1, slot.size)
    assert (stats.name, stats.rows, stats.batches, stats.splits) == ("worker-0", 3, 1, 0)
    assert (stats.epoch, stats.split, stats.waiting_batches) == (0, 4, 1)
    outlet.arrive()
    worker.end(1)
    worker.die()
    (stats,), batches, size = tasks.stats()
    assert (batches, size, stats.splits, stats.split, stats.waiting_batches) == (0, 0, 1, -1, 0)
