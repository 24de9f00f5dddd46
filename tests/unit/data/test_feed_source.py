"""Deterministic jobs read split by split and by sequence, whoever sends a batch and when it comes."""

from __future__ import annotations

import numpy as np
import pytest
from fake_feed import FakeFeed, Rank, item, split_end, threads_of_feeds, until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_feed_client import in_thread, known_by, read

from hetero import bitmap
from hetero.data.arrivals import Arrivals
from hetero.data.epoch import InputStream
from hetero.data.feed_source import AnyOrder, Queued, SplitOrder
from hetero.data.feed_wire import BatchId


def own(splits, rank, size):
    """What a rank is given, in order; splits: batches of each."""
    return [(s, q) for s, count in enumerate(splits) for q in range(count) if (s + q) % size == rank]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_order_they_arrive_in_they_are_handed_out_in_order(data):
    splits = data.draw(st.lists(st.integers(0, 7), max_size=6))
    size = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, size - 1))
    arrivals = Arrivals()
    order = SplitOrder(0, rank, size, arrivals)
    events = [*own(splits, rank, size), *((s, -1) for s in range(len(splits)))]
    seen = []
    for s, q in data.draw(st.permutations(events)):
        if q < 0:
            arrivals.accept_end(0, s, 1, splits[s])
        elif arrivals.accept(0, s, q, 1):
            order.put(Queued(BatchId(0, s, q, 1), 10, None, None))
        asked = order.asked()
        assert all(arrivals.end(0, before) is not None for before in range(asked))
        while (queued := order.pop(ended=False)) is not None:
            seen.append((queued.batch.split, queued.batch.sequence))
        assert order.bytes == 10 * order.batches == 10 * len(list(order.held()))

    assert seen == own(splits, rank, size)
    assert order.asked() == len(splits)


def test_an_epoch_that_ends_without_the_end_of_a_split_gives_all_that_came():
    order = SplitOrder(0, 0, 1, Arrivals())
    for s, q in ((1, 0), (0, 1), (0, 0)):
        order.put(Queued(BatchId(0, s, q, 1), 1, None, None))

    assert order.pop(ended=False).batch[1:3] == (0, 0)
    assert order.pop(ended=False).batch[1:3] == (0, 1)
    assert order.pop(ended=False) is None
    assert order.pop(ended=True).batch[1:3] == (1, 0)
    assert order.pop(ended=True) is None


def test_any_order_is_that_of_arrival_and_clear_forgets():
    order = AnyOrder()
    for q in (3, 1, 2):
        order.put(Queued(BatchId(0, 0, q, 1), 5, None, None))
    assert (order.batches, order.bytes) == (3, 15)
    assert order.pop(ended=False).batch.sequence == 3
    order.clear()
    assert (order.batches, order.bytes, order.pop(ended=True)) == (0, 0, None)


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    until(lambda: not threads_of_feeds(), "for the client's threads to end")


@pytest.fixture
def two_feeds():
    feeds = FakeFeed("one"), FakeFeed("two")
    yield feeds
    for feed in feeds:
        feed.kill()


def addresses(feeds):
    return {f"data-{number}": feed.address for number, feed in enumerate(feeds)}


def test_two_ranks_each_read_their_own_in_order_from_two_feeds(two_feeds):
    splits = [5, 0, 1, 9, 4]
    for rank in (0, 1):
        for s, count in enumerate(splits):
            feed = two_feeds[s % 2]
            feed.put(*(item(0, s, q) for s_, q in own(splits, rank, 2) if s_ == s), rank=rank)
            feed.put(split_end(0, s, count), rank=rank)
    two_feeds[0].end_epoch(7)  # of no interest
    with (
        Rank(addresses(two_feeds), 0, 2, deterministic=True) as zero,
        Rank(addresses(two_feeds), 1, 2, deterministic=True) as one,
    ):
        results = [in_thread(lambda client=client: read(client.open(0))) for client in (zero, one)]
        for rank in (0, 1):
            wanted = len(own(splits, rank, 2)) + len(splits)
            until(lambda rank=rank, wanted=wanted: sum(feed.acked.get(rank, 0) for feed in two_feeds) == wanted)
        for client in (zero, one):
            client.on_epoch_end(0)

        for rank in (0, 1):
            assert [entry[1:] for entry in results[rank]()] == own(splits, rank, 2)


def test_only_batches_of_the_lowest_split_that_is_not_over_are_asked_for(two_feeds):
    one, two = two_feeds
    one.put(item(0, 0, 0), item(0, 0, 1))
    two.put(item(0, 1, 0), split_end(0, 1, 1))
    with Rank(addresses(two_feeds), deterministic=True) as client:
        source = iter(client.open(0))
        until(lambda: one.acked.get(0) == 2 and two.acked.get(0) == 1)  # the end of split 1, not its batch
        assert {grant.split for grant in two.grants} == {0}
        one.put(split_end(0, 0, 2))
        until(lambda: two.acked.get(0) == 2)  # without anything having been taken
        client.on_epoch_end(0)

        assert read(source) == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]


def test_a_split_that_moves_to_another_feed_keeps_its_order(two_feeds):
    one, two = two_feeds
    one.put(*(item(0, 0, q) for q in range(5)))
    rank = Rank(addresses(two_feeds), deterministic=True, prefetch_bytes=1 << 22)
    with rank as client:
        source = iter(client.open(0))
        assert known_by(next(source)) == (0, 0, 0)
        until(lambda: one.acked.get(0) == 5)
        one.kill()
        del rank.feeds["data-0"]
        arrived = client.on_fence(0, 1, [0])[0]
        assert [q for q in range(5) if bitmap.has(arrived, q)] == [0, 1, 2, 3, 4]

        two.put(*(item(0, 0, q, attempt=2) for q in range(5, 40)), split_end(0, 0, 40, attempt=2))
        result = in_thread(lambda: read(source))
        until(lambda: two.acked.get(0) == 36)
        client.on_epoch_end(0)
        assert result() == [(0, 0, q) for q in range(1, 40)]


def test_batches_that_wait_for_an_earlier_one_do_not_keep_it_out(two_feeds):
    """A window full of later batches must not be the reason why the one that is missing cannot come."""
    feed = two_feeds[0]
    feed.put(*(item(0, 0, q) for q in range(1, 40)), item(0, 0, 0), split_end(0, 0, 40))
    with Rank({"data-1": feed.address}, deterministic=True, prefetch_bytes=2000) as client:
        result = in_thread(lambda: read(client.open(0)))
        until(lambda: feed.acked.get(0) == 41)
        client.on_epoch_end(0)

        assert result() == [(0, 0, q) for q in range(40)]


def test_a_stream_over_feeds_gives_exact_batches_and_the_same_digest_whatever_feeds_serve_it(two_feeds):
    def digest(feeds, by_split):
        for s in range(4):
            feed = by_split(s)
            feed.put(*(item(0, s, q, rows=3) for q in range(5)), split_end(0, s, 5))
        with Rank(addresses(feeds), deterministic=True) as client:
            stream = InputStream(client.open, 4, digest=True, prefetch_bytes=1000, epochs=1)
            iterator = stream.batches(0)
            first = next(iterator)
            until(lambda: sum(feed.acked.get(0, 0) for feed in feeds) == 4 * 6)
            client.on_epoch_end(0)
            rest = [batch.data["id"] for batch in iterator]
            stream.close()
            ids = np.concatenate([first.data["id"], *rest])
            assert ids[:, 1:].tolist() == [[s, q] for s in range(4) for q in range(5) for _ in range(3)]
            return stream.digest

    one = digest(two_feeds, lambda s: two_feeds[s % 2])
    third = FakeFeed("three")
    try:
        assert digest([third], lambda _: third) == one
    finally:
        third.kill()
