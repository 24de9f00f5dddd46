"""What a split book does that comes after another one, with or without its memory."""

from __future__ import annotations

import pytest
from split_bench import Bench

from hetero.control.split_epoch import Fence, Report, SplitId
from hetero.control.split_rules import FEED_WAIT_S


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.open(0)
    return bench


def test_feeds_and_ranks_are_believed_without_any_memory(bench):
    bench.feed("d1", 2)
    bench.given("d1")
    held, done = bench.keys
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 0, [held], [Report(done, "done", 5)])
    bench.feed("d2", 4)
    bench.ranks(0, highest_attempt=done.attempt)
    assert bench.given("d1") == []
    assert bench.mail.revoked == []
    assert bench.given("d2") == [(0, 2), (0, 3)]
    bench.done("d1", held)
    bench.done("d2", *bench.keys)
    assert bench.book.rank_mail(0).ended == [0]


def test_attempts_go_on_above_all_that_is_seen_even_if_the_clock_was_set_back(bench):
    bench.begin_again(first_attempt=10)
    bench.feed("d1", 0, [SplitId(0, 0, 90)])
    bench.feed("d2", 3)
    bench.book.rank_hello(0, 2, begun=[0], highest_attempt=80)
    bench.book.rank_hello(1, 2, begun=[0], highest_attempt=70, obeyed=[Fence(1, 0, 100, [3])])
    assert [fence.attempt for fence in bench.answer()] == [100, 100]
    bench.given("d2")
    assert [key.attempt for key in bench.keys] == [101, 102, 103]


def test_what_nobody_holds_is_fenced_first(bench):
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 4)
    bench.feed("d2")
    for rank in range(2):
        bench.book.rank_hello(rank, 2, begun=[0], highest_attempt=7)
    assert bench.given("d1") == []
    fences = bench.answer({0: {2: b"\x01"}})
    assert list(fences[0].splits) == [0, 1, 2, 3]
    assert fences[0].attempt == 1000
    assert bench.given("d1") == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert bench.mail.assignments[2].arrived == b"\x01"


def test_what_ranks_refuse_is_not_a_feeds_own_any_more(bench):
    """The old coordinator had fenced it and died before it could take it away."""
    held = SplitId(0, 0, 50)
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 0, [held], [Report(SplitId(0, 1, 51), "done", 5)])
    bench.feed("d2")
    bench.book.rank_hello(0, 2, begun=[0], highest_attempt=55, obeyed=[Fence(1, 0, 55, [0, 1])])
    bench.book.rank_hello(1, 2, begun=[0], highest_attempt=20)
    fences = bench.answer()
    assert list(fences[0].splits) == [0, 1, 2, 3]
    assert bench.book.feed_mail("d1").revoked == [held, SplitId(0, 1, 51)]
    assert bench.book.epochs[0].done_count == 0


@pytest.mark.parametrize("hosts", [("d1", "d2"), ("d2", "d1")])
def test_of_two_that_hold_a_split_the_later_attempt_counts(bench, hosts):
    attempts = {"d1": 50, "d2": 51}
    bench.begin_again(first_attempt=1000)
    for host in hosts:
        bench.feed(host, 0, [SplitId(0, 0, attempts[host])])
    bench.ranks(0, highest_attempt=51)
    assert bench.book.epochs[0].held[0] == ("d2", 51)
    assert bench.book.feed_mail("d1").revoked == [SplitId(0, 0, 50)]


def test_reports_that_come_before_everybody_is_there_are_not_lost(bench):
    keys = [SplitId(0, split, 50 + split) for split in range(3)]
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 0, keys)
    bench.feed("d2")
    bench.done("d1", keys[0])
    bench.book.feed_report("d1", Report(keys[1], "returned"))
    bench.ranks(0, highest_attempt=60)
    assert bench.book.epochs[0].done_count == 1
    assert set(bench.book.epochs[0].held) == {2}


def test_feeds_have_some_time_to_come_back_before_their_splits_are_handed_out_again(bench):
    bench.begin_again(first_attempt=1000)
    bench.feed("d2", 4)
    bench.ranks(0, highest_attempt=50)
    bench.book.tick()
    assert bench.given("d2") == []
    bench.clock.now_s += FEED_WAIT_S
    bench.book.tick()
    bench.answer()
    assert bench.given("d2") == [(0, 0), (0, 1), (0, 2), (0, 3)]
    late = SplitId(0, 0, 50)
    bench.feed("d1", 0, [late])  # its work is lost, nothing else
    assert bench.book.feed_mail("d1").revoked == [late]


def test_a_lost_host_is_not_waited_for(bench):
    bench.begin_again(first_attempt=1000)
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    bench.feed("d2", 1)
    bench.ranks(0, highest_attempt=50)
    assert bench.given("d2") == [(0, 0)]


def test_a_host_that_is_lost_before_it_is_known_whose_its_splits_are_is_told_to_drop_them(bench):
    held = SplitId(0, 0, 50)
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 0, [held])
    bench.book.feed_mail("d1")
    bench.book.set_hosts({"d1", "d2"}, {"d1"})
    assert bench.book.feed_mail("d1").revoked == [held]


def test_at_the_first_start_no_feed_is_waited_for():
    bench = Bench()
    bench.feed("d2", 1)
    bench.ranks(0)
    assert bench.given("d2") == [(0, 0)]


def test_what_is_remembered_as_done_is_not_done_again(bench):
    bench.feed("d1", 4)
    bench.given("d1")
    bench.done("d1", *bench.keys[:2], replayed=2)
    memory = bench.book.memory()
    bench.done("d1", bench.keys[2])  # not in the memory, and the feed is gone too
    bench.begin_again(memory, first_attempt=1000)
    bench.feed("d1")
    bench.feed("d2", 4)
    bench.ranks(0, highest_attempt=9)
    assert bench.given("d2") == [(0, 2), (0, 3)]
    assert bench.book.replayed == 4
    assert bench.book.epochs[0].batches == 10


def test_a_memory_outlives_restarts_before_anybody_has_come(bench):
    bench.feed("d1", 4)
    bench.given("d1")
    bench.done("d1", *bench.keys[:3])
    bench.begin_again(bench.book.memory(), first_attempt=1000)
    bench.begin_again(bench.book.memory(), first_attempt=2000)
    bench.feed("d1")
    bench.feed("d2", 4)
    bench.ranks(0, highest_attempt=9)
    assert bench.given("d2") == [(0, 3)]


@pytest.mark.parametrize("witness", ["rank", "feed", "memory"])
def test_an_epoch_of_whose_end_anybody_has_heard_is_over(bench, witness):
    bench.feed("d1", 4)
    bench.given("d1")
    bench.done("d1", *bench.keys)
    memory = bench.book.memory() if witness == "memory" else None
    bench.begin_again(memory, first_attempt=1000)
    bench.feed("d1", 4, ended=[0] if witness == "feed" else [])
    bench.feed("d2")
    bench.book.rank_hello(0, 2, begun=[0], highest_attempt=9)
    bench.book.rank_hello(1, 2, begun=[], ended=[0] if witness == "rank" else [], highest_attempt=9)
    assert bench.book.rank_mail(0).ended == [0]
    assert bench.given("d1") == []


def test_an_epoch_that_no_rank_reads_is_over_for_a_feed_that_still_holds_splits_of_it(bench):
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 0, [SplitId(0, 0, 5)])
    bench.feed("d2")
    bench.ranks(1, highest_attempt=9)
    assert bench.book.feed_mail("d1").ended == [0]
    assert list(bench.book.epochs) == [1]


def test_an_epoch_begun_while_a_rank_is_missing_may_be_an_old_one():
    bench = Bench()
    bench.feed("d1", 4)
    bench.feed("d2")
    bench.book.rank_hello(0, 2)
    bench.book.rank_begun(0, 0)
    bench.book.rank_hello(1, 2, begun=[0], highest_attempt=9)
    assert bench.given("d1") == []
    assert len(bench.answer()) == 2


def test_a_rank_that_has_ended_is_not_waited_for_even_if_its_goodbye_was_lost(bench):
    bench.begin_again(first_attempt=1000)
    bench.feed("d1", 1)
    bench.feed("d2")
    bench.book.ranks_ended([1])  # as many ranks there are is not known yet
    bench.book.rank_hello(0, 2, begun=[0], highest_attempt=9)
    assert bench.given("d1") == []
    bench.book.ranks_ended([1, 2])
    bench.answer()
    assert bench.given("d1") == [(0, 0)]
    assert bench.book.memory().closed == (1,)


def test_a_rank_that_had_said_goodbye_is_not_waited_for(bench):
    bench.book.rank_bye(1)
    bench.begin_again(bench.book.memory(), first_attempt=1000)
    bench.feed("d1", 1)
    bench.feed("d2")
    bench.book.rank_hello(0, 2, begun=[0], highest_attempt=9)
    bench.answer()
    assert bench.given("d1") == [(0, 0)]
