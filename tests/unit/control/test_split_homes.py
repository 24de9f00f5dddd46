"""The split book where data hosts have files of their own: every host lists, and nobody else gets what is its own."""

from __future__ import annotations

import pytest
from split_bench import Bench

from hetero.control.split_epoch import Report, SplitId
from hetero.control.split_lists import Home, Loss
from hetero.control.split_state import FEED_WAIT_S

SHARDED = {"sharded": ["training"], "epochs": 1}


@pytest.fixture
def bench() -> Bench:
    """Return a book whose splits 0, 2 and 4 are d1's own, 1 and 3 d2's, with one epoch begun."""
    bench = Bench(splits=None, **SHARDED)
    list_own(bench)
    bench.open(0)
    return bench


def list_own(bench: Bench) -> None:
    bench.book.feed_list("d1", ['"a"', '"b"', '"c"'], dict.fromkeys(range(3), "training"))
    bench.book.feed_list("d2", ['"x"', '"y"'], dict.fromkeys(range(2), "training"))


# --- listing ----------------------------------------------------------------------------------------------------------


def test_every_host_is_asked_and_nothing_is_handed_out_before_all_have_listed() -> None:
    bench = Bench(splits=None, **SHARDED)
    bench.open(0)
    bench.feed("d1", 1)
    bench.feed("d2", 1)
    assert bench.book.feed_mail("d1").list_splits
    assert bench.book.feed_mail("d2").list_splits
    bench.book.feed_list("d2", ['"x"'], {0: "training"})
    bench.book.feed_list("d2", ['"late"'], {0: "training"})  # a host's first list holds
    assert (bench.book.unlisted, bench.book.values) == (("d1",), None)
    assert bench.given("d2") == []
    bench.book.feed_list("d1", ['"a"'], {0: "training"})
    assert bench.book.values == ('"a"', '"x"')
    assert (bench.given("d1"), bench.given("d2")) == ([(0, 0)], [(0, 1)])


def test_a_host_that_is_late_is_waited_for() -> None:
    bench = Bench(splits=None, **SHARDED)
    bench.book.set_hosts({"d1"}, ())
    bench.open(0)
    bench.feed("d1", 1)
    bench.book.feed_list("d1", ['"a"'], {0: "training"})
    bench.clock.now_s += 1000
    bench.book.tick()
    assert (bench.given("d1"), bench.book.loss) == ([], None)
    bench.book.set_hosts({"d1", "d2"}, ())
    bench.feed("d2", 1)
    assert bench.book.feed_mail("d2").list_splits
    bench.book.feed_list("d2", ['"x"'], {0: "training"})
    assert bench.given("d1") == [(0, 0)]


def test_a_host_whose_workers_are_all_busy_is_made_to_list_too() -> None:
    held = {"d1": [SplitId(0, 0, 50)], "d2": [SplitId(0, 1, 51)]}
    bench = Bench(splits=None)
    bench.begin_again(first_attempt=1000, **SHARDED)
    for host, keys in held.items():
        bench.feed(host, held=keys)
    bench.ranks(0, highest_attempt=60)
    assert bench.book.feed_mail("d1").list_splits
    assert bench.book.feed_mail("d2").list_splits
    bench.book.feed_list("d1", ['"a"'], {0: "training"})
    bench.clock.now_s += FEED_WAIT_S + 1
    bench.book.tick()
    assert bench.book.feed_mail("d2").revoked == held["d2"]
    assert bench.book.feed_mail("d1").revoked == []


def test_if_nobody_has_files_that_is_the_failure() -> None:
    bench = Bench(splits=None, **SHARDED)
    bench.book.feed_list("d1", [])
    assert bench.book.failure is None
    bench.book.feed_list("d2", [])
    assert "'training' (ShardedByS3Key) gave no splits on any of the hosts d1, d2" in str(bench.book.failure)


def test_a_channel_of_which_trainers_have_a_part_is_refused_only_if_it_is_read() -> None:
    for told, fails in (("training", True), ("validation", False)):
        bench = Bench(splits=None, **SHARDED)
        list_own(bench)
        bench.book.rank_hello(1, 2, stray_channels=[told])
        assert (bench.book.failure is not None) == fails
        if fails:
            assert "the host of rank 1 has files of it that no data host would read" in str(bench.book.failure)
            assert bench.book.failure["suggested_exit_code"] == 2


# --- handing out ------------------------------------------------------------------------------------------------------


def test_each_host_gets_its_own_and_what_all_can_read(bench: Bench) -> None:
    bench.feed("d2", 9)
    assert bench.given("d2") == [(0, 1), (0, 3)]
    bench.feed("d1", 2)
    assert bench.given("d1") == [(0, 0), (0, 2)]
    bench.book.feed_wanted("d1", 9)
    assert bench.given("d1") == [(0, 4)]


def test_a_host_that_has_handed_in_its_own_begins_the_next_epoch_while_others_have_not(bench: Bench) -> None:
    bench.book.rank_begun(0, 1)
    bench.feed("d2", 3)
    assert bench.given("d2") == [(0, 1), (0, 3), (1, 1)]


def test_a_later_epoch_waits_for_a_split_of_the_hosts_own_that_is_being_fenced(bench: Bench) -> None:
    bench.book.rank_begun(0, 1)
    bench.feed("d2", 2)
    bench.given("d2")
    bench.book.feed_report("d2", Report(bench.keys[0], "returned"))
    bench.book.feed_wanted("d2", 3)
    assert bench.given("d2") == []
    bench.answer()
    assert bench.given("d2") == [(0, 1)]


def test_only_a_worker_of_the_host_that_can_prepare_it_is_freed_for_a_split_that_ranks_wait_for() -> None:
    bench = Bench(splits=None, deterministic=True, **SHARDED)
    list_own(bench)
    bench.open(0)
    bench.feed("d2", 2)
    bench.given("d2")
    lower, higher = bench.keys  # splits 1 and 3
    bench.feed("d1", 3)
    bench.given("d1")
    bench.done("d1", bench.keys[0])  # it goes on with 2 and 4
    bench.book.feed_report("d2", Report(lower, "returned"))
    bench.answer()
    assert bench.book.feed_mail("d2").revoked == [higher]
    assert bench.book.feed_mail("d1").revoked == []


# --- losing a host ----------------------------------------------------------------------------------------------------


def lose(bench: Bench, host: str) -> None:
    bench.book.set_hosts({"d1", "d2"}, {host})


def test_a_lost_host_with_splits_of_its_own_cannot_be_done_without(bench: Bench) -> None:
    bench.feed("d2", 2)
    lose(bench, "d2")
    assert bench.book.loss == Loss("d2", ("training",), was_listed=True)


def test_a_host_that_is_lost_before_it_has_listed_may_have_anything() -> None:
    bench = Bench(splits=None, **SHARDED)
    bench.book.feed_list("d1", ['"a"'], {0: "training"})
    lose(bench, "d2")
    assert bench.book.loss == Loss("d2", ("training",), was_listed=False)


def test_a_host_that_is_lost_while_others_have_not_listed_is_missed_if_it_had_files() -> None:
    for listed, lost in (({0: "training"}, True), ({}, False)):
        bench = Bench(splits=None, **SHARDED)
        bench.book.feed_list("d1", ['"a"'], listed)
        lose(bench, "d1")
        assert (bench.book.loss is not None) == lost


def test_a_lost_host_without_splits_of_its_own_can_be_done_without() -> None:
    bench = Bench(splits=None, **SHARDED)
    for host in ("d1", "d2"):
        bench.book.feed_list(host, ['"a"', '"b"'])
    assert bench.book.memory().splits == (('"a"', '"b"'), ())
    bench.open(0)
    bench.feed("d1", 2)
    lose(bench, "d2")
    assert (bench.book.loss, bench.given("d1")) == (None, [(0, 0), (0, 1)])


def test_a_host_whose_splits_of_the_last_epoch_are_done_can_be_done_without(bench: Bench) -> None:
    bench.feed("d2", 2)
    bench.given("d2")
    bench.done("d2", *bench.keys)
    lose(bench, "d2")
    bench.book.tick()
    assert bench.book.loss is None
    bench.feed("d1", 3)
    bench.given("d1")
    bench.done("d1", *bench.keys)
    assert bench.book.rank_mail(0).ended == [0]
    bench.book.rank_begun(0, 1)  # one more than the job had said
    assert bench.book.loss == Loss("d2", ("training",), was_listed=True)


def test_a_later_epoch_counts_although_nobody_has_begun_it() -> None:
    bench = Bench(splits=None, sharded=["training"], epochs=2)
    list_own(bench)
    bench.open(0)
    bench.feed("d2", 2)
    bench.given("d2")
    bench.done("d2", *bench.keys)
    lose(bench, "d2")
    assert bench.book.loss is not None


def test_nobody_misses_a_host_once_all_ranks_have_said_goodbye(bench: Bench) -> None:
    for rank in range(2):
        bench.book.rank_bye(rank)
    lose(bench, "d2")
    assert bench.book.loss is None


def test_splits_that_only_one_host_listed_are_missed_with_it() -> None:
    bench = Bench(splits=None, **SHARDED)
    bench.book.feed_list("d1", ['"a"', '"both"'])
    bench.book.feed_list("d2", ['"x"', '"both"'])
    bench.open(0)
    lose(bench, "d2")
    assert bench.book.loss == Loss("d2", ("training",), was_listed=True)


# --- a coordinator that comes after another one -----------------------------------------------------------------------


def test_homes_are_remembered(bench: Bench) -> None:
    memory = bench.book.memory()
    assert memory.splits is not None
    assert memory.splits.homes[:2] == (Home("d1", "training"), Home("d2", "training"))
    bench.begin_again(memory, first_attempt=1000, **SHARDED)
    bench.feed("d2", 9)
    bench.feed("d1", 1)
    bench.ranks(0, highest_attempt=9)
    assert bench.given("d2") == [(0, 1), (0, 3)]
    assert bench.given("d1") == [(0, 0)]


def test_without_memory_the_hosts_list_again_and_the_splits_keep_their_numbers(bench: Bench) -> None:
    bench.feed("d2", 1)
    bench.given("d2")
    held = bench.keys
    values = bench.book.values
    bench.begin_again(first_attempt=1000, **SHARDED)
    bench.feed("d2", 1, held)
    bench.feed("d1", 9)
    bench.ranks(0, highest_attempt=held[0].attempt)
    list_own(bench)
    assert bench.book.values == values
    bench.answer()
    assert bench.given("d2") == [(0, 3)]
    assert bench.mail.revoked == []
    assert bench.given("d1") == [(0, 0), (0, 2), (0, 4)]


def test_a_lost_host_is_judged_only_when_it_is_known_what_was_done(bench: Bench) -> None:
    bench.feed("d2", 2)
    bench.given("d2")
    bench.done("d2", *bench.keys)
    memory = bench.book.memory()
    bench.begin_again(memory, first_attempt=1000, **SHARDED)
    lose(bench, "d2")
    bench.feed("d1")
    assert bench.book.loss is None
    bench.ranks(0, highest_attempt=9)
    assert bench.book.loss is None
    bench.begin_again(memory, first_attempt=2000, sharded=["training"], epochs=2)
    lose(bench, "d2")
    bench.feed("d1")
    assert bench.book.loss is None  # ranks may know that the second epoch is over
    bench.ranks(0, highest_attempt=9)
    assert bench.book.loss is not None
