"""The split book's rules one by one; random histories are in test_split_schedules.py."""

from __future__ import annotations

import time

import pytest
from split_bench import Bench

from hetero.control.split_epoch import Report
from hetero.control.split_fences import FENCE_SPLITS
from hetero.control.split_rules import RELIEF_WAIT_S
from hetero.control.splits import Mismatch


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.open(0)
    return bench


# --- handing out ------------------------------------------------------------------------------------------------------


def test_splits_are_handed_out_lowest_first_as_feeds_ask(bench):
    bench.feed("d1", 1)
    bench.feed("d2", 2)
    assert bench.given("d1") == [(0, 0)]
    assert bench.given("d2") == [(0, 1), (0, 2)]
    bench.book.feed_wanted("d1", 2)
    assert bench.given("d1") == [(0, 3)]
    bench.book.feed_wanted("d1", 3)
    assert bench.given("d1") == []


def test_a_later_epoch_waits_until_the_earlier_is_handed_out(bench):
    bench.book.rank_begun(0, 1)
    bench.feed("d1", 6)
    assert bench.given("d1") == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_a_new_epoch_needs_no_fence(bench):
    assert bench.answer() == []
    bench.feed("d1", 1)
    assert bench.given("d1") == [(0, 0)]


def test_attempts_grow_with_every_hand_out():
    bench = Bench(first_attempt=1000)
    bench.open(0)
    bench.feed("d1", 4)
    bench.given("d1")
    assert [key.attempt for key in bench.keys] == [1001, 1002, 1003, 1004]


def test_nothing_is_handed_out_before_all_ranks_are_there():
    bench = Bench()
    bench.book.rank_hello(0, 2, begun=[0])
    bench.feed("d1", 1)
    assert bench.given("d1") == []
    bench.book.rank_hello(1, 2)
    bench.answer()
    assert bench.given("d1") == [(0, 0)]


def test_an_epoch_ends_with_its_last_split_and_everybody_is_told(bench):
    bench.feed("d1", 4)
    bench.feed("d2")
    bench.given("d1")
    bench.done("d1", *bench.keys[:3])
    assert 0 in bench.book.epochs
    bench.done("d1", bench.keys[3])
    assert bench.book.feed_mail("d1").ended == bench.book.feed_mail("d2").ended == [0]
    assert bench.book.rank_mail(0).ended == bench.book.rank_mail(1).ended == [0]
    assert (bench.book.past[0].done, bench.book.past[0].batches) == (4, 20)


def test_who_was_away_when_an_epoch_ended_is_told_when_it_comes(bench):
    bench.feed("d1", 4)
    bench.given("d1")
    bench.book.feed_gone("d1")
    bench.book.rank_gone(1)
    bench.feed("d1", 0, [], [Report(key, "done", 5) for key in bench.keys])
    assert bench.book.feed_mail("d1").ended == [0]
    bench.book.rank_hello(1, 2, begun=[0])
    assert bench.book.rank_mail(1).ended == [0]
    bench.feed("d2")
    assert bench.book.feed_mail("d2").ended == [0]
    bench.feed("d2", ended=[0])
    assert bench.book.feed_mail("d2").ended == []


def test_a_job_without_splits_has_epochs_that_end_at_once():
    bench = Bench(splits=0)
    bench.open(0)
    assert bench.book.rank_mail(0).ended == [0]


# --- again, but not twice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["returned", "host lost", "feed replaced", "assignment lost"])
def test_a_split_is_handed_out_again_only_after_all_ranks_have_answered(bench, loss):
    bench.feed("d1", 1)
    bench.given("d1")
    lost = bench.keys[0]
    if loss == "returned":
        bench.book.feed_report("d1", Report(lost, "returned"))
    elif loss == "host lost":
        bench.book.set_hosts({"d1", "d2"}, {"d1"})
        assert bench.book.feed_mail("d1").revoked == [lost]
    else:
        bench.book.feed_gone("d1")
        bench.feed("d1", 0)
    bench.feed("d2", 4)
    assert bench.given("d2") == [(0, 1), (0, 2), (0, 3)]
    first, second = (bench.book.rank_mail(rank).fences for rank in range(2))
    assert first == second
    assert (first[0].epoch, list(first[0].splits)) == (0, [0])
    assert first[0].attempt >= lost.attempt
    bench.book.rank_fenced(0, first[0].id, {0: b"\x05"})
    assert bench.given("d2") == []
    bench.book.rank_fenced(1, first[0].id, {0: b"\x02\x01"})
    assert bench.given("d2") == [(0, 0)]
    assert bench.mail.assignments[0].arrived == b"\x07\x01"
    assert bench.keys[0].attempt > first[0].attempt


def test_a_report_of_an_old_attempt_changes_nothing(bench):
    bench.feed("d1", 1)
    bench.given("d1")
    old = bench.keys[0]
    bench.book.feed_report("d1", Report(old, "returned"))
    bench.done("d1", old)
    assert bench.book.epochs[0].done_count == 0
    bench.answer()
    bench.book.feed_wanted("d1", 2)
    assert bench.given("d1") == [(0, 0)]
    for kind in ("done", "returned", "bad"):
        bench.book.feed_report("d1", Report(old, kind, 5))
        bench.book.feed_report("d2", Report(bench.keys[0], kind, 5))  # nor does another host's
    assert bench.book.epochs[0].done_count == 0
    assert bench.book.epochs[0].held[0].attempt == bench.keys[0].attempt


def test_an_unanswered_fence_is_said_again_to_a_rank_that_comes_back(bench):
    bench.feed("d1", 1)
    bench.given("d1")
    bench.book.rank_gone(1)
    bench.book.feed_report("d1", Report(bench.keys[0], "returned"))
    bench.book.rank_hello(1, 2, begun=[0])
    fences = bench.book.rank_mail(1).fences
    assert len(fences) == 1
    bench.book.rank_fenced(1, fences[0].id, {})
    bench.book.rank_hello(1, 2, begun=[0])
    assert bench.book.rank_mail(1).fences == []


def test_an_answer_to_a_fence_that_nobody_waits_for_is_ignored(bench):
    bench.book.rank_fenced(0, 12345, {0: b"\x01"})
    bench.feed("d1", 1)
    bench.given("d1")
    assert bench.mail.assignments[0].arrived == b""


def test_many_splits_are_fenced_in_parts_that_can_be_answered():
    bench = Bench(splits=2 * FENCE_SPLITS + 1)
    bench.ranks()
    for rank in range(2):
        bench.book.rank_hello(rank, 2, begun=[0])
    assert [len(fence.splits) for fence in bench.book.rank_mail(0).fences] == [FENCE_SPLITS, FENCE_SPLITS, 1]


def test_a_stream_that_breaks_costs_nothing_while_its_feed_lives(bench):
    bench.feed("d1", 2)
    bench.given("d1")
    first, second = bench.keys
    bench.book.feed_gone("d1")
    bench.feed("d1", 0, [first], [Report(second, "done", 5)])
    assert bench.answer() == []
    assert bench.mail.revoked == []
    assert bench.book.epochs[0].done_count == 1
    bench.done("d1", first)
    assert bench.book.epochs[0].done_count == 2


def test_a_host_that_comes_back_is_told_what_is_not_its_own_and_gets_work(bench):
    bench.feed("d1", 1)
    bench.given("d1")
    held = bench.keys[0]
    bench.book.feed_gone("d1")
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    bench.answer()
    bench.feed("d1", 1, [held])
    assert bench.given("d1") == []  # the ledger has not heard of it yet
    assert bench.mail.revoked == [held]
    bench.book.set_hosts({"d1", "d2"}, set())
    assert bench.given("d1") == [(0, 0)]


def test_batches_prepared_twice_are_counted(bench):
    bench.feed("d1", 2)
    bench.given("d1")
    bench.done("d1", *bench.keys, replayed=3)
    bench.done("d1", *bench.keys, replayed=3)  # said again
    assert bench.book.replayed == 6


# --- bad splits -------------------------------------------------------------------------------------------------------


def test_a_bad_split_is_a_failure_and_its_epoch_does_not_end():
    bench = Bench(splits=1)
    bench.open(0)
    bench.feed("d1", 1)
    bench.given("d1")
    bench.book.feed_report("d1", Report(bench.keys[0], "bad", 2, 0, {"message": "odd", "process": "worker-0"}))
    assert bench.book.failure == {"host": "d1", "message": "odd", "process": "worker-0"}
    assert bench.book.rank_mail(0).ended == []


def test_a_bad_split_can_be_skipped():
    bench = Bench(splits=1, skip_bad=True)
    bench.open(0)
    bench.feed("d1", 1)
    bench.given("d1")
    cause = {"process": "worker-0", "time_s": 0.0, "host": "d1", "exception": "ValueError", "message": "odd"}
    bench.book.feed_report("d1", Report(bench.keys[0], "bad", 2, 1, cause))
    assert bench.book.failure is None
    assert bench.book.rank_mail(0).ended == [0]
    assert bench.book.replayed == 1
    assert [tuple(skipped) for skipped in bench.book.skipped] == [
        (0, 0, '"0"', "d1", "ValueError: odd (worker-0 on d1)")
    ]


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_an_epoch_that_all_ranks_have_left_is_cancelled(bench):
    bench.feed("d1", 2)
    bench.given("d1")
    bench.book.rank_left(0, 0)
    assert 0 in bench.book.epochs
    bench.book.rank_left(1, 0)
    mail = bench.book.feed_mail("d1")
    assert (mail.revoked, mail.ended) == (bench.keys, [0])
    assert bench.book.rank_mail(0).ended == [0]
    bench.done("d1", *bench.keys)  # too late
    assert bench.book.past[0].done == 0


def test_an_answer_that_comes_after_its_epoch_has_ended_changes_nothing(bench):
    bench.feed("d1", 1)
    bench.given("d1")
    bench.book.feed_report("d1", Report(bench.keys[0], "returned"))
    for rank in range(2):
        bench.book.rank_left(rank, 0)
    bench.answer()
    assert not bench.book.epochs


def test_nobody_waits_for_the_word_of_a_rank_that_has_said_goodbye(bench):
    bench.feed("d1", 1)
    bench.given("d1")
    bench.book.feed_report("d1", Report(bench.keys[0], "returned"))
    fence = bench.book.rank_mail(0).fences[0]
    bench.book.rank_fenced(0, fence.id, {})
    bench.feed("d2", 4)
    assert (0, 0) not in bench.given("d2")
    bench.book.rank_bye(1)
    assert bench.given("d2") == [(0, 0)]
    bench.book.rank_left(0, 0)
    assert 0 not in bench.book.epochs


def test_a_rank_of_another_size_is_refused(bench):
    for rank, size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(Mismatch, match=f"rank {rank} of {size}"):
            bench.book.rank_hello(rank, size)


# --- priority inversion -----------------------------------------------------------------------------------------------


def test_a_worker_is_freed_if_all_work_on_later_epochs_while_an_earlier_split_waits(bench):
    bench.open(1)
    bench.feed("d1", 4)
    bench.feed("d2", 2)
    bench.given("d1")
    lost, bench.keys = bench.keys, []
    assert bench.given("d2") == [(1, 0), (1, 1)]
    later = bench.keys
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    bench.answer()
    assert bench.book.feed_mail("d2").revoked == [later[1]]
    bench.book.feed_wanted("d2", 3)
    assert bench.given("d2") == [(0, 0)]
    assert bench.mail.revoked == []  # one worker is enough
    assert lost


def test_no_worker_is_freed_while_one_works_on_the_same_epoch(bench):
    bench.feed("d1", 1)
    bench.feed("d2", 3)
    bench.given("d1")
    bench.book.feed_report("d1", Report(bench.keys[0], "returned"))
    bench.answer()
    assert bench.book.feed_mail("d2").revoked == []


def test_in_order_a_worker_is_freed_for_a_lower_split_of_the_same_epoch():
    bench = Bench(deterministic=True)
    bench.open(0)
    bench.feed("d1", 1)
    bench.feed("d2", 3)
    bench.given("d2")
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    bench.answer()
    assert bench.book.feed_mail("d2").revoked == [bench.keys[-1]]


def test_another_split_is_taken_if_taking_one_has_freed_no_worker():
    """Its worker had ended already and had another split in hand, which cannot go on before the one that waits."""
    bench = Bench(deterministic=True)
    bench.open(0)
    bench.feed("d1", 1)
    bench.feed("d2", 3)
    bench.given("d2")
    held = bench.keys
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    bench.answer()
    assert bench.book.feed_mail("d2").revoked == [held[2]]
    bench.answer()
    bench.clock.now_s += RELIEF_WAIT_S - 0.1
    bench.book.tick()
    assert bench.book.feed_mail("d2").revoked == []
    bench.clock.now_s += 0.2
    bench.book.tick()
    assert bench.book.feed_mail("d2").revoked == [held[1]]
    bench.answer()
    bench.book.feed_wanted("d2", 4)
    assert bench.given("d2") == [(0, 0)]


def test_nobody_is_freed_where_a_feed_waits_for_work(bench):
    bench.open(1)
    bench.feed("d1", 6)
    bench.given("d1")
    bench.feed("d2", 3)
    assert bench.given("d2") == [(1, 2), (1, 3)]
    bench.book.feed_report("d1", Report(bench.keys[0], "returned"))  # not its own: nothing happens
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    bench.answer()
    assert bench.given("d2") == [(0, 0)]
    assert bench.mail.revoked == []


# --- size -------------------------------------------------------------------------------------------------------------


def test_ten_thousand_splits_take_well_under_a_millisecond_each():
    bench = Bench(splits=10_000)
    bench.open(0)
    for host in ("d1", "d2"):
        bench.feed(host, 50)
    started_s, done = time.process_time(), 0
    wanted = {"d1": 50, "d2": 50}
    while done < 10_000:
        for host, asked in wanted.items():
            bench.given(host)
            wanted[host] = asked + len(bench.keys)
            for index, key in enumerate(bench.keys):
                bench.done(host, key)
                bench.book.feed_wanted(host, asked + index + 1)
            done += len(bench.keys)
    assert bench.book.past[0].done == 10_000
    assert time.process_time() - started_s < 5.0
