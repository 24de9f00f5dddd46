"""A rank reads from feeds that break, move and come back: each batch once, in bounded memory, until it is closed."""

from __future__ import annotations

import threading
import time

import pytest
from fake_feed import DEADLINE_S, FakeFeed, Rank, item, split_end, threads_of_feeds, until

from hetero import bitmap
from hetero.data import feed_client
from hetero.data.feed_wire import CHUNK_BYTES
from hetero.errors import HeteroError


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    until(lambda: not threads_of_feeds(), "for the client's threads to end")


@pytest.fixture
def start_feed():
    """Starts feeds, and kills them after the test."""
    feeds = []

    def start(*args, **options):
        feeds.append(FakeFeed(*args, **options))
        return feeds[-1]

    yield start
    for feed in feeds:
        feed.kill()


def known_by(data):
    assert (data["id"] == data["id"][0]).all()
    return tuple(data["id"][0].tolist())


def read(source):
    return [known_by(data) for data in source]


def batches(epoch, split, count, **options):
    return [item(epoch, split, q, **options) for q in range(count)]


def ids(epoch, split, count):
    return [(epoch, split, q) for q in range(count)]


def in_thread(work):
    """Run it in a thread; gives a function that waits for its result."""
    results = []

    def main():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()

    def result():
        thread.join(DEADLINE_S)
        assert results, "the thread hangs"
        return results[0]

    return result


def test_batches_of_two_feeds_come_each_once(start_feed):
    one, two = start_feed("one"), start_feed("two")
    one.put(*batches(0, 0, 200))
    two.put(*batches(0, 1, 300))
    with Rank({"data-1": one.address, "data-2": two.address}) as client:
        source = client.open(0)
        result = in_thread(lambda: read(source))
        until(lambda: one.acked.get(0) == 200 and two.acked.get(0) == 300)
        one.end_epoch(0)

        assert sorted(result()) == sorted([*ids(0, 0, 200), *ids(0, 1, 300)])
        assert (client.stats().batches, client.stats().rows) == (500, 2000)


@pytest.mark.parametrize("row_bytes", [1 << 18, (1 << 20) + 1, 4 << 20])
def test_large_batches_come_whole(start_feed, row_bytes):
    feed = start_feed()
    feed.put(*batches(0, 0, 3, row_bytes=row_bytes))
    with Rank({"data-1": feed.address}) as client:
        source = iter(client.open(0))
        for q in range(3):
            data = next(source)
            assert known_by(data) == (0, 0, q)
            assert data["x"].shape == (4, row_bytes)
            assert not data["x"].any()


def test_an_epoch_ends_when_the_follower_hears_of_it_after_all_that_arrived(start_feed):
    feed = start_feed()
    feed.put(*batches(0, 0, 5))
    with Rank({"data-1": feed.address}) as client:
        source = iter(client.open(0))
        assert known_by(next(source)) == (0, 0, 0)
        until(lambda: feed.acked.get(0) == 5)
        client.on_epoch_end(0)

        assert read(source) == ids(0, 0, 5)[1:]


def test_an_epoch_that_ended_before_it_was_opened_is_empty():
    with Rank({}) as client:
        client.on_epoch_end(3)
        assert read(client.open(3)) == []


def test_nothing_is_granted_before_iteration_begins_and_epochs_do_not_mix(start_feed):
    feed = start_feed()
    feed.put(*batches(1, 0, 3), *batches(0, 0, 3))
    rank = Rank({"data-1": feed.address})
    with rank as client:
        first, second = client.open(0), client.open(1)
        assert rank.follower.begun == [0, 1]
        until(lambda: feed.hellos)
        assert not feed.grants

        result = in_thread(lambda: read(first))
        until(lambda: feed.acked.get(0) == 3)
        assert {grant.epoch for grant in feed.grants} == {0}
        client.on_epoch_end(0)
        assert result() == ids(0, 0, 3)

        result = in_thread(lambda: read(second))
        until(lambda: feed.acked.get(0) == 6)
        client.on_epoch_end(1)
        assert result() == ids(1, 0, 3)
        first.close()
        second.close()
        second.close()
        assert rank.follower.left == [0, 1]


def test_a_batch_that_was_not_asked_for_is_not_acknowledged_but_sent_again_when_it_is(start_feed):
    feed = start_feed()
    with Rank({"data-1": feed.address}) as client:
        first, second = iter(client.open(0)), client.open(1)
        until(lambda: feed.grants)
        with feed.changed:
            early = feed.grants[-1]
            early.epoch = 1  # as if the feed had taken it for a grant of epoch 1
        feed.put(item(1, 0, 0))
        until(lambda: len(feed.hellos) > 1)
        assert not feed.acked.get(0)
        first.close()

        second = iter(second)
        assert known_by(next(second)) == (1, 0, 0)


@pytest.mark.parametrize("message", [0, 1, 4, 9])
def test_a_stream_that_is_cut_in_mid_batch_goes_on_with_what_had_not_arrived(start_feed, message):
    feed = start_feed()
    feed.put(*batches(0, 0, 8, row_bytes=CHUNK_BYTES))  # five messages each
    feed.cut_in(message)
    with Rank({"data-1": feed.address}, prefetch_bytes=100 << 20) as client:
        result = in_thread(lambda: read(client.open(0)))
        until(lambda: feed.acked.get(0) == 8)
        client.on_epoch_end(0)

        assert result() == ids(0, 0, 8)
        assert feed.cuts == 1
        assert [(hello.feed_id, hello.received) for hello in feed.hellos] == [("", 0), ("feed-1", message // 5)]
        assert client.stats().batches == 8


def test_a_feed_that_was_killed_in_mid_batch_is_read_again_where_its_successor_listens(start_feed):
    first = start_feed("first")
    first.put(*batches(0, 0, 6, row_bytes=1 << 20))
    rank = Rank({"data-1": first.address}, prefetch_bytes=100 << 20)
    with rank as client:
        source = iter(client.open(0))
        assert known_by(next(source)) == (0, 0, 0)
        first.kill()
        arrived = client.on_fence(0, 1, [0])[0]
        left = [q for q in range(6) if not bitmap.has(arrived, q)]

        second = start_feed("second")
        second.put(*(item(0, 0, q, attempt=2, row_bytes=1 << 20) for q in left))
        rank.feeds["data-1"] = second.address
        until(lambda: second.hellos)
        result = in_thread(lambda: read(source))
        until(lambda: second.acked.get(0, 0) == len(left))
        client.on_epoch_end(0)

        assert sorted([(0, 0, 0), *result()]) == ids(0, 0, 6)
        assert second.hellos[0].feed_id == "first"


def test_a_feed_that_comes_back_at_the_same_address_is_found_soon(start_feed):
    first = start_feed("first")
    with Rank({"data-1": first.address}) as client:
        source = iter(client.open(0))
        until(lambda: first.grants)
        first.kill()
        second = start_feed("second", port=first.port)
        start_s = time.monotonic()
        second.put(item(0, 0, 0))

        assert known_by(next(source)) == (0, 0, 0)
        assert time.monotonic() - start_s < 3.0


def test_duplicates_are_acknowledged_and_dropped(start_feed):
    one, two = start_feed("one"), start_feed("two")
    one.put(*batches(0, 0, 4), *batches(0, 0, 4))
    two.put(*batches(0, 0, 4, attempt=2))
    with Rank({"data-1": one.address, "data-2": two.address}) as client:
        result = in_thread(lambda: read(client.open(0)))
        until(lambda: one.acked.get(0) == 8 and two.acked.get(0) == 4)
        client.on_epoch_end(0)

        assert sorted(result()) == ids(0, 0, 4)
        assert client.stats().batches == 4


def test_batches_of_fenced_attempts_are_acknowledged_and_refused(start_feed):
    feed = start_feed()
    with Rank({"data-1": feed.address}) as client:
        result = in_thread(lambda: read(client.open(0)))
        assert client.on_fence(0, 7, [2, 3]) == {}
        feed.put(item(0, 2, 0, attempt=7), item(0, 1, 0, attempt=7), item(0, 3, 0, attempt=8), split_end(0, 2, 9, 7))
        until(lambda: feed.acked.get(0) == 4)
        client.on_epoch_end(0)

        assert result() == [(0, 1, 0), (0, 3, 0)]
        assert client.highest_attempt() == 8


def test_what_a_fence_answers_is_what_comes_out(start_feed):
    feed = start_feed()
    feed.put(*batches(0, 0, 3000))
    with Rank({"data-1": feed.address}) as client:
        result = in_thread(lambda: read(client.open(0)))
        until(lambda: client.stats().batches > 200)
        arrived = client.on_fence(0, 1, [0])[0]
        until(lambda: feed.acked.get(0) == 3000)
        client.on_epoch_end(0)

        taken = result()
        assert 200 < len(taken) < 3000
        assert taken == [(0, 0, q) for q in range(3000) if bitmap.has(arrived, q)]


@pytest.mark.parametrize("feeds", [1, 3])
def test_a_slow_consumer_bounds_what_is_queued_and_does_not_hold_up_acknowledgements(start_feed, feeds):
    started = [start_feed(f"feed-{number}") for number in range(feeds)]
    for number, feed in enumerate(started):
        feed.put(*batches(0, number, 40, row_bytes=1000))  # 4096 bytes each
    addresses = {f"data-{number}": feed.address for number, feed in enumerate(started)}
    with Rank(addresses, prefetch_bytes=2 * 6 * 4200) as client:
        source = iter(client.open(0))
        for taken in range(1, 20):
            next(source)
            until(lambda least=taken + 6 - 6 % feeds: sum(feed.acked.get(0, 0) for feed in started) >= least)
            assert client.stats().waiting_batches <= 6
            assert client.stats().waiting_bytes <= 6 * 4200
        assert client.stats().epoch == 0


def test_a_batch_larger_than_the_window_comes_all_the_same_one_at_a_time(start_feed):
    feed = start_feed()
    feed.put(*batches(0, 0, 5, row_bytes=1 << 16))
    with Rank({"data-1": feed.address}, prefetch_bytes=10) as client:
        source = iter(client.open(0))
        for q in range(5):
            assert known_by(next(source)) == (0, 0, q)
            assert client.stats().waiting_batches <= 1


def test_streams_that_break_again_and_again_leave_no_more_queued_than_the_window(start_feed):
    feed = start_feed()
    feed.put(*batches(0, 0, 60))
    with Rank({"data-1": feed.address}, prefetch_bytes=2 * 500) as client:
        source = iter(client.open(0))
        until(lambda: client.stats().waiting_batches >= 2)
        fits = client.stats().waiting_batches
        for cuts in range(1, 6):
            streams = len(feed.hellos)
            feed.cut_in(0)
            next(source)  # makes room for the message that is cut
            until(lambda cuts=cuts, streams=streams: feed.cuts == cuts and len(feed.hellos) > streams)
            until(lambda: client.stats().waiting_batches >= fits)
            assert client.stats().waiting_bytes <= 500
        result = in_thread(lambda: read(source))
        until(lambda: feed.acked.get(0) == 60)  # all the credit came back
        client.on_epoch_end(0)

        assert result() == ids(0, 0, 60)[5:]


def test_a_host_that_vanishes_ends_its_thread_and_what_it_sent_stays(start_feed):
    one, two = start_feed("one"), start_feed("two")
    one.put(*batches(0, 0, 3))
    rank = Rank({"data-1": one.address, "data-2": two.address})
    with rank as client:
        source = iter(client.open(0))
        until(lambda: one.acked.get(0) == 3)
        del rank.feeds["data-1"]
        until(lambda: not any(thread.name == "hetero-feed-data-1" for thread in threads_of_feeds()))
        two.put(*batches(0, 1, 50))
        result = in_thread(lambda: read(source))
        until(lambda: two.acked.get(0) == 50)
        client.on_epoch_end(0)
        assert sorted(result()) == [*ids(0, 0, 3), *ids(0, 1, 50)]

        rank.feeds["data-1"] = one.address  # its feed must not give to others what had arrived
        until(lambda: len(one.hellos) == 2)
        assert (one.hellos[1].feed_id, one.hellos[1].received) == ("one", 3)


def test_addresses_that_cannot_be_learned_just_now_change_nothing(start_feed, capsys):
    feed = start_feed()
    rank = Rank({"data-1": feed.address})
    with rank as client:
        source = iter(client.open(0))
        until(lambda: feed.grants)
        rank.feeds = None
        until(lambda: "cannot learn the feeds' addresses" in capsys.readouterr().out)
        feed.put(item(0, 0, 0))
        assert known_by(next(source)) == (0, 0, 0)


def test_a_feed_that_refuses_is_named_once_and_tried_again(start_feed, capsys):
    feed = start_feed(refuse="this is run abc")
    with Rank({"data-1": feed.address}) as client:
        source = iter(client.open(0))
        said = []
        until(lambda: said.append(capsys.readouterr().out) or any("run abc" in text for text in said))
        time.sleep(0.3)  # several more tries
        feed.refuse = None
        feed.put(item(0, 0, 0))
        assert known_by(next(source)) == (0, 0, 0)
        said.append(capsys.readouterr().out)

    assert "The feed of data-1" in "".join(said)
    assert "".join(said).count("run abc") == 1


def test_the_token_is_sent(start_feed):
    feed = start_feed(token="secret")
    feed.put(item(0, 0, 0))
    with Rank({"data-1": feed.address}, token="secret") as client:
        assert known_by(next(iter(client.open(0)))) == (0, 0, 0)


def test_replies_that_make_no_sense_reach_the_consumer(start_feed):
    feed = start_feed(garbage=True)
    with (
        Rank({"data-1": feed.address}) as client,
        pytest.raises(HeteroError, match="Rank 0 cannot use what the feed of data-1"),
    ):
        next(iter(client.open(0)))


def test_an_epoch_is_read_once_and_a_later_one_leaves_it(start_feed):
    rank = Rank({})
    with rank as client:
        first = iter(client.open(2))
        result = in_thread(lambda: read(first))
        iter(client.open(3))
        assert result() == []
        assert rank.follower.left == [2]
        with pytest.raises(HeteroError, match="Epoch 2 was read before"):
            iter(client.open(2))


def test_a_source_needs_somebody_who_tells_the_coordinator():
    client = feed_client.FeedClient(0, 1, "run", None, feeds=dict, prefetch_bytes=1, deterministic=False)
    with pytest.raises(HeteroError, match="follower"):
        client.open(0)
    client.close()
