"""A feed as ranks see it, without workers and coordinator: serves what a test puts in, and can be broken."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np

from hetero._proto import feed_pb2 as pb
from hetero.data import feed_wire
from hetero.data.feed_client import FeedClient
from hetero.data.feed_wire import BatchId
from hetero.door import TOKEN_KEY

DEADLINE_S = 20.0


def until(condition, what="", deadline_s=DEADLINE_S):
    """Wait until a condition holds, and give its value."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain {what}"
        time.sleep(0.002)
    return value


def threads_of_feeds():
    """Threads of feed clients, and those of gRPC in which their requests are made."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("hetero-feed")}


@dataclass(frozen=True)
class Item:
    """A batch (with a payload), or the end of a split."""

    epoch: int
    split: int
    messages: tuple[bytes, ...]
    size: int = 0
    is_batch: bool = True


def item(epoch, split, sequence, attempt=1, *, rows=4, row_bytes=8):
    """A batch with {"id": what it is known by, "x": zeros}."""
    known_by = np.tile(np.array([epoch, split, sequence]), (rows, 1))
    encoded = feed_wire.encode({"id": known_by, "x": np.zeros((rows, row_bytes), dtype=np.uint8)})
    payload = memoryview(b"".join(encoded.buffers))
    batch = BatchId(epoch, split, sequence, attempt)
    return Item(epoch, split, tuple(feed_wire.messages(batch, encoded.rows, encoded.layout, payload)), encoded.size)


def split_end(epoch, split, batches, attempt=1):
    end = pb.SplitEnd(epoch=epoch, split=split, attempt=attempt, batches=batches)
    return Item(epoch, split, (feed_wire.reply(split_end=end),), is_batch=False)


class FakeFeed:
    """Follows feed.proto for any number of ranks; `put` gives a rank something to be sent.

    Attributes:
        hellos: what ranks said first, stream by stream.
        grants: all that ranks granted.
        acked: by rank, how many items it said have arrived, over all streams.
        sent: by rank, items sent and not acknowledged.
        cuts: how many streams were cut.
    """

    def __init__(self, feed_id="feed-1", port=0, token=None, refuse=None, garbage=False):
        self.feed_id, self.token, self.refuse, self.garbage = feed_id, token, refuse, garbage
        self.changed = threading.Condition()
        self.hellos, self.grants = [], []
        self.waiting, self.sent, self.acked = {}, {}, {}
        self.cuts, self._cut_in = 0, None
        self._newest, self._ended, self._stopped = {}, [], False
        self._server = grpc.server(ThreadPoolExecutor(16), options=(("grpc.so_reuseport", 0),))
        handler = grpc.stream_stream_rpc_method_handler(self._read)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(feed_wire.SERVICE, {"Read": handler}),)
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def put(self, *items, rank=0):
        with self.changed:
            self.waiting.setdefault(rank, deque()).extend(items)
            self.changed.notify_all()

    def end_epoch(self, epoch):
        """Send EpochEnd, to streams that come later too."""
        with self.changed:
            self._ended.append(epoch)
            self.changed.notify_all()

    def cut_in(self, messages):
        """Break the stream that is to send the next message but so many."""
        with self.changed:
            self._cut_in = messages

    def kill(self):
        """End all streams at once, and free the port."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self._server.stop(0).wait(DEADLINE_S)

    def _read(self, requests, context):
        metadata = dict(context.invocation_metadata())
        if self.token is not None and metadata.get(TOKEN_KEY) != self.token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        if self.refuse is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
        hello = pb.ReadRequest.FromString(next(requests)).hello
        stream = _FakeStream(hello.rank)
        with self.changed:
            self.hellos.append(hello)
            older, self._newest[hello.rank] = self._newest.get(hello.rank), stream
            sent = self.sent.setdefault(hello.rank, deque())
            waiting = self.waiting.setdefault(hello.rank, deque())
            if hello.feed_id == self.feed_id:
                self._acknowledge(hello.rank, hello.received - (older.received if older is not None else 0))
            waiting.extendleft(reversed(sent))
            sent.clear()
            self.changed.notify_all()
        yield feed_wire.reply(welcome=pb.Welcome(feed_id=self.feed_id))
        if self.garbage:
            yield b"\xff\xff\xff"
        threading.Thread(target=self._hear, args=(stream, requests), daemon=True).start()
        told = 0
        while True:
            with self.changed:
                while not (something := self._next(stream, told)):
                    if self._stopped or self._newest[stream.rank] is not stream or not context.is_active():
                        return
                    self.changed.wait(0.05)
            if isinstance(something, int):
                told += 1
                yield feed_wire.reply(epoch_end=pb.EpochEnd(epoch=something - 1))
                continue
            for message in something.messages:
                if self._is_cut():
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                yield message

    def _next(self, stream, told):
        """An item that the rank has room for, or the number of an epoch that has ended, plus one."""
        waiting, grant, full = self.waiting[stream.rank], stream.grant, False
        for candidate in [] if self._newest[stream.rank] is not stream else list(waiting):
            if candidate.is_batch:
                if full or grant is None or candidate.epoch != grant.epoch or grant.split not in (-1, candidate.split):
                    continue
                batches, size = stream.sent_batches - grant.consumed_batches, stream.sent_bytes - grant.consumed_bytes
                if batches and (batches >= grant.window_batches or size + candidate.size > grant.window_bytes):
                    full = True  # what comes behind must not overtake
                    continue
                stream.sent_batches, stream.sent_bytes = stream.sent_batches + 1, stream.sent_bytes + candidate.size
            waiting.remove(candidate)
            self.sent[stream.rank].append(candidate)
            return candidate
        return self._ended[told] + 1 if told < len(self._ended) else None

    def _hear(self, stream, requests):
        try:
            for raw in requests:
                request = pb.ReadRequest.FromString(raw)
                with self.changed:
                    if self._newest[stream.rank] is not stream:
                        return
                    self._acknowledge(stream.rank, request.received - stream.received)
                    stream.received = max(stream.received, request.received)
                    if request.HasField("grant"):
                        self.grants.append(request.grant)
                        if stream.grant is None or stream.grant.epoch != request.grant.epoch:
                            stream.sent_batches = stream.sent_bytes = 0
                        stream.grant = request.grant
                    self.changed.notify_all()
        except grpc.RpcError:
            pass  # the stream is over

    def _acknowledge(self, rank, items):
        for _ in range(min(items, len(self.sent[rank]))):
            self.sent[rank].popleft()
            self.acked[rank] = self.acked.get(rank, 0) + 1

    def _is_cut(self):
        with self.changed:
            if self._cut_in is None:
                return False
            self._cut_in -= 1
            if self._cut_in >= 0:
                return False
            self._cut_in = None
            self.cuts += 1
            return True


class _FakeStream:
    def __init__(self, rank):
        self.rank, self.grant, self.received = rank, None, 0
        self.sent_batches = self.sent_bytes = 0  # of the grant's epoch


class FakeFollower:
    """Notes what a rank tells the coordinator."""

    def __init__(self):
        self.begun, self.left = [], []

    def begin(self, epoch):
        self.begun.append(epoch)

    def leave(self, epoch):
        self.left.append(epoch)


class Rank:
    """A client with a follower; `feeds` may be changed at any time."""

    def __init__(self, feeds, rank=0, size=1, *, prefetch_bytes=1 << 20, deterministic=False, **more):
        self.feeds = dict(feeds)
        self.follower = FakeFollower()
        self.client = FeedClient(
            rank,
            size,
            "run-1",
            more.pop("token", None),
            feeds=lambda: dict(self.feeds),
            prefetch_bytes=prefetch_bytes,
            deterministic=deterministic,
            **more,
        )
        self.client.attach(self.follower)

    def __enter__(self):
        return self.client

    def __exit__(self, *_):
        self.client.close()
