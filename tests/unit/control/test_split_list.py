"""How the split book comes to know the job's list of splits."""

from __future__ import annotations

import pytest
from split_bench import Bench

from hetero.control.split_epoch import SplitId
from hetero.control.split_rules import FEED_WAIT_S


def test_one_feed_that_asks_is_told_to_list_the_splits():
    bench = Bench(splits=None)
    bench.feed("d1")
    assert not bench.book.feed_mail("d1").list_splits
    bench.feed("d2", 1)
    bench.book.feed_wanted("d1", 1)
    assert bench.book.feed_mail("d2").list_splits
    assert not bench.book.feed_mail("d1").list_splits
    bench.open(0)
    bench.book.feed_list("d2", ['"x"'])
    bench.book.feed_list("d1", ['"y"', '"z"'])  # the first list holds
    assert bench.book.values == ('"x"',)
    assert bench.given("d1") == [(0, 0)] or bench.given("d2") == [(0, 0)]


@pytest.mark.parametrize("lost", ["stream", "host"])
def test_another_feed_lists_the_splits_if_the_first_is_lost(lost):
    bench = Bench(splits=None)
    bench.feed("d1", 1)
    bench.feed("d2", 1)
    if lost == "stream":
        bench.book.feed_gone("d1")
    else:
        bench.book.set_hosts({"d1", "d2"}, {"d1"})
    assert bench.book.feed_mail("d2").list_splits


def test_if_all_workers_are_busy_one_is_freed_to_list_the_splits():
    bench = Bench(splits=None)
    held = {host: [SplitId(0, split, 50 + split)] for split, host in ((3, "d1"), (7, "d2"))}
    bench.begin_again(deterministic=True)
    for host, keys in held.items():
        bench.feed(host, held=keys)
    bench.ranks(0, highest_attempt=60)
    assert bench.book.feed_mail("d1").list_splits  # who has made the list before answers at once
    assert bench.book.feed_mail("d2").list_splits
    bench.clock.now_s += FEED_WAIT_S + 1
    bench.book.tick()
    assert bench.book.feed_mail("d2").revoked == held["d2"]
    assert bench.book.feed_mail("d1").revoked == []
    bench.book.feed_wanted("d2", 1)
    assert bench.book.feed_mail("d2").list_splits
