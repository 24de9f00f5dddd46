"""Lanes: what the feed sends beside a call arrives whole; strangers get nothing and hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from fake_feed import Rank, until
from test_feed_both_ends import BATCHES, finish, make_feed, no_thread_left  # noqa: F401 - fixtures
from test_feed_client import in_thread, read

from hetero._proto import feed_pb2 as pb
from hetero.data import feed_lane, feed_link
from hetero.data.feed_lane import LaneReader, Lanes
from hetero.data.feed_wire import BatchId, encode, header_message, reply

SIZES = (0, 1, 1000, 32 << 10, (32 << 10) + 1, 1 << 20, 9_000_001)


class Door:
    """Lanes in a thread with a loop of its own."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.lanes = Lanes()
        self.do(self.lanes.start("127.0.0.1"))
        self.address = ("127.0.0.1", self.lanes.port)
        return self

    def do(self, work):
        return self.later(work).result(20)

    def later(self, work) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def expect(self) -> bytes:
        async def expect():
            return self.lanes.expect()

        return self.do(expect())

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.lanes.close)
        self.do(asyncio.sleep(0.01))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def send_all(lane, contents):
    async def send():
        for number, content in enumerate(contents):
            encoded = encode({"x": content})
            payload = memoryview(b"".join(encoded.buffers))
            batch = BatchId(0, 0, number, 1)
            await lane.send_batch(header_message(batch, encoded.rows, encoded.layout, payload.nbytes), payload)
            await lane.send(reply(epoch_end=pb.EpochEnd(epoch=7)))

    return send()


def test_batches_of_all_sizes_arrive_as_they_were_sent_and_in_order():
    contents = [np.random.default_rng(size).integers(0, 256, (1, size), dtype=np.uint8) for size in SIZES]
    with Door() as door:
        ticket = door.expect()
        arrival = door.later(door.lanes.arrival(ticket))
        reader = LaneReader(door.address, ticket)
        lane = arrival.result(10)
        sending = [door.later(send_all(lane, [content])) for content in contents]
        for content, done in zip(contents, sending, strict=True):
            arrived = reader.read()
            assert (arrived.data["x"] == content).all()
            assert arrived.data["x"].flags.writeable
            assert reader.read().epoch == 7
            done.result(10)
        lane.close()
        with contextlib.suppress(ConnectionResetError):
            assert reader.read() is None
        reader.close()


def test_a_reader_that_waits_can_be_woken_from_another_thread():
    with Door() as door:
        ticket = door.expect()
        arrival = door.later(door.lanes.arrival(ticket))
        reader = LaneReader(door.address, ticket)
        lane = arrival.result(10)
        result = in_thread(reader.read)
        reader.end()
        assert result() is None
        reader.close()
        door.loop.call_soon_threadsafe(lane.close)


def test_strangers_are_sent_away_and_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(feed_lane, "_TICKET_S", 1.0)
    with Door() as door, contextlib.ExitStack() as stack:
        ticket = door.expect()
        idle = [stack.enter_context(socket.create_connection(door.address)) for _ in range(200)]
        liar = stack.enter_context(socket.create_connection(door.address))
        liar.sendall(os.urandom(32))
        liar.settimeout(5)
        assert liar.recv(1) == b""
        arrival = door.later(door.lanes.arrival(ticket))
        reader = LaneReader(door.address, ticket)
        lane = arrival.result(10)
        second = stack.enter_context(socket.create_connection(door.address))
        second.sendall(ticket)
        second.settimeout(5)
        assert second.recv(1) == b"", "a ticket is good for one connection"
        for connection in idle:
            connection.settimeout(10)
            assert connection.recv(1) == b"", "nobody may wait for ever"
        reader.close()
        door.loop.call_soon_threadsafe(lane.close)


def test_a_rank_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(feed_lane, "_COME_S", 0.2)
    with Door() as door, pytest.raises(ConnectionError, match=r"did not connect to its lane within 0\.2 s"):
        door.do(door.lanes.arrival(door.expect()))


def test_a_rank_that_cannot_reach_the_lanes_port_reads_the_call(make_feed, monkeypatch, capsys):  # noqa: F811
    def unreachable(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(feed_link, "LaneReader", unreachable)
    feed = make_feed()
    finish(feed, [0])
    with Rank({"data-1": feed.address}) as client:
        result = in_thread(lambda: read(client.open(0)))
        until(lambda: feed.coordinator.done_keys())
        feed.say(epochs_ended=[0])
        assert sorted(result()) == [(0, 0, sequence) for sequence in range(BATCHES)]
    assert "is read on its call alone" in capsys.readouterr().out
