"""Whoever closes a feed client gets it closed at once, whatever it is doing, and no thread stays."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

import pytest
from fake_feed import DEADLINE_S, Rank, item, threads_of_feeds, until
from test_feed_client import batches, in_thread, no_thread_left, read, start_feed

from hetero.errors import HeteroError

__all__ = ["no_thread_left", "start_feed"]  # fixtures


def test_closing_the_source_wakes_its_reader_and_drops_what_comes_later(start_feed):
    feed = start_feed()
    rank = Rank({"data-1": feed.address})
    with rank as client:
        source = client.open(0)
        result = in_thread(lambda: read(source))
        until(lambda: feed.grants)
        source.close()
        assert result() == []
        feed.put(item(0, 0, 0))
        until(lambda: feed.acked.get(0) == 1)
        assert client.stats().waiting_batches == 0
        assert client.on_fence(0, 1, [0]) == {0: b"\x01"}
        assert not source.is_stuck(ended_elsewhere=True)


def silent_server():
    """A port that takes connections and never says a word."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    "moment", ["at once", "no feed", "nobody listens", "no answer", "waiting", "mid-batch", "full"]
)
def test_close_is_prompt_at_every_moment_and_leaves_no_thread(start_feed, moment):
    listening, silent = silent_server()
    feed = start_feed()
    address = {"no feed": None, "nobody listens": "127.0.0.1:1", "no answer": silent}.get(moment, feed.address)
    rank = Rank({} if address is None else {"data-1": address})
    try:
        source = rank.client.open(0)
        result = in_thread(lambda: read(source)) if moment != "full" else None
        if moment in ("waiting", "mid-batch", "full"):
            if moment == "full":
                iter(source)
            until(lambda: feed.grants)
        if moment == "mid-batch":
            big = item(0, 0, 0, row_bytes=1 << 20)
            feed.put(dataclasses.replace(big, messages=big.messages[:2]))
            until(lambda: feed.sent.get(0))
        if moment == "full":
            feed.put(*batches(0, 0, 100))
            until(lambda: feed.acked.get(0) == 32)  # all that its window takes: no more come
        start_s = time.monotonic()
        rank.client.close()
        assert time.monotonic() - start_s < 2.0
        if result is not None:
            assert isinstance(result(), HeteroError)
        rank.client.close()
        until(lambda: not threads_of_feeds())
    finally:
        rank.client.close()
        listening.close()


def test_close_may_come_from_any_thread_while_feeds_come_and_go(start_feed):
    feeds = [start_feed(f"feed-{number}") for number in range(3)]
    for number, feed in enumerate(feeds):
        feed.put(*batches(0, number, 500))
    for turn in range(5):
        rank = Rank({})
        source = rank.client.open(0)
        result = in_thread(lambda source=source: read(source))
        rank.feeds.update({f"data-{number}": feed.address for number, feed in enumerate(feeds)})
        if turn % 2:
            until(lambda rank=rank: rank.client.stats().batches)
        closers = [threading.Thread(target=rank.client.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(DEADLINE_S)
        assert isinstance(result(), HeteroError)
        until(lambda: not threads_of_feeds())
