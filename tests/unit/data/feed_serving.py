"""A feed server in a thread, and ranks that read from it with the client that protoc makes."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from feed_parts import Coordinator, FakePort

from hetero._proto import feed_pb2 as pb
from hetero._proto import feed_pb2_grpc, splits_pb2
from hetero.data.feed_server import FeedConfig, FeedServer

DEADLINE_S = 15.0


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.005)


class FeedThread:
    """A feed in an event loop of its own, with workers that are played by the test."""

    def __init__(self, config: FeedConfig) -> None:
        self.coordinator = Coordinator()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-feed", daemon=True)
        self._thread.start()
        self.connected: list[str] = []
        self.feed = self.call(lambda: FeedServer(config, self.coordinator.hear, on_worker=self.connected.append))
        try:
            self.port = asyncio.run_coroutine_threadsafe(self.feed.start(), self.loop).result(DEADLINE_S)
        except BaseException:
            self.stop()
            raise
        self.address = f"127.0.0.1:{self.port}"

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the feed's loop."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE_S)

    def worker(self, name: str = "worker-0") -> FakePort:
        return self.call(FakePort, self.feed._tasks, name)

    def say(self, **reply: Any) -> None:
        """Speak as the coordinator."""
        self.call(self.feed.on_reply, splits_pb2.ServeReply(**reply))

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.feed.stop(), self.loop).result(DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()


class RankCall:
    """One `Read` call of a rank. A thread keeps what has come; with `reads=False` nothing is taken from the network."""

    def __init__(
        self,
        address: str,
        *,
        hello: pb.ReadHello | None = None,
        token: str | None = None,
        reads: bool = True,
        channel: grpc.Channel | None = None,
    ) -> None:
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        self.channel = channel or grpc.insecure_channel(address, options=options)
        self.replies: list[Any] = []
        self.error: grpc.RpcError | None = None
        self.ended = False
        self._requests: queue.Queue[Any] = queue.Queue()
        metadata = (("x-hetero-token", token),) if token is not None else ()
        self.call = feed_pb2_grpc.FeedStub(self.channel).Read(self._ask(), metadata=metadata)
        if hello is not None:
            self.send(hello=hello)
        self._thread = threading.Thread(target=self._read, daemon=True)
        if reads:
            self._thread.start()

    def _ask(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for reply in self.call:
                self.replies.append(reply)
        except grpc.RpcError as error:
            self.error = error
        self.ended = True

    def send(self, **request: Any) -> None:
        self._requests.put(pb.ReadRequest(**request))

    def grant(
        self, *, batches: int = 100, size: int = 1 << 30, consumed: tuple[int, int] = (0, 0), **more: Any
    ) -> None:
        """Let batches come. `consumed`: bytes and batches."""
        received = more.pop("received", 0)
        values = {"epoch": 0, "split": -1, **more}
        grant = pb.Grant(
            window_bytes=size,
            window_batches=batches,
            consumed_bytes=consumed[0],
            consumed_batches=consumed[1],
            **values,
        )
        self.send(grant=grant, received=received)

    def batches(self) -> list[tuple[Any, bytes]]:
        """Return header and bytes of the batches that have arrived complete."""
        found: list[tuple[Any, bytearray]] = []
        for reply in list(self.replies):
            if reply.HasField("batch"):
                found.append((reply.batch, bytearray()))
            if found:
                found[-1][1].extend(reply.data)
        return [(header, bytes(data)) for header, data in found if len(data) == header.bytes]

    def ids(self) -> list[tuple[int, int]]:
        return [(header.split, header.sequence) for header, _ in self.batches()]

    def split_ends(self) -> list[tuple[int, int]]:
        return [(r.split_end.split, r.split_end.batches) for r in list(self.replies) if r.HasField("split_end")]

    def epoch_ends(self) -> list[int]:
        return [reply.epoch_end.epoch for reply in list(self.replies) if reply.HasField("epoch_end")]

    @property
    def feed_id(self) -> str:
        wait_until(lambda: self.replies or self.ended, "welcome")
        return self.replies[0].welcome.feed_id

    def wait_batches(self, count: int) -> None:
        wait_until(lambda: len(self.batches()) >= count or self.ended, f"{count} batches")
        assert len(self.batches()) == count, self.error

    def wait_refused(self, code: grpc.StatusCode) -> str:
        wait_until(lambda: self.ended, "end of the call")
        assert self.error is not None, "the call ended well"
        assert self.error.code() is code, self.error
        return str(self.error.details())

    def close(self) -> None:
        self._requests.put(None)
        self.call.cancel()
        if self._thread.is_alive():
            self._thread.join(DEADLINE_S)
        self.channel.close()


def hello(rank: int = 0, size: int = 1, **more: Any) -> pb.ReadHello:
    return pb.ReadHello(rank=rank, size=size, **{"run_id": "run-1", **more})
