"""The feed of one data host: gives its workers splits and the ranks their batches. One asyncio process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from hetero._proto import feed_pb2, splits_pb2
from hetero.data.feed_lane import Lanes
from hetero.data.feed_streams import Misfit, RankStream, Streams
from hetero.data.feed_tasks import Tasks
from hetero.data.feed_wire import SERVICE
from hetero.data.feed_wires import CallWire, LaneWire
from hetero.data.worker_link import WorkerServer
from hetero.door import Door
from hetero.errors import PortInUse
from hetero.process.heap import give_back_freed_memory, keep_freed_memory, share_one_heap
from hetero.tls import PLAIN, Tls, bind

_log = logging.getLogger(__name__)

_HELLO_S = 10.0  # a call that has not said who it is by then is ended
_STOP_GRACE_S = 0.3
_TICK_S = 0.5
_MOST_DETAILS = 1000  # characters of a status: headers that are larger are not delivered
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second feed on the port must fail, not share it
    ("grpc.max_receive_message_length", 1 << 20),  # requests are small
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),  # a rank whose machine is gone is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True)
class FeedConfig:
    """What a feed has to know.

    Attributes:
        host: name of its data host.
        run_id: of the job; ranks of another are refused.
        worker_socket: name of the socket that workers connect to, the same for a feed's successor.
        worker_secret: what they have to show.
        bind: address to listen on.
        port: the port wanted; 0 or one that is taken: any free one.
        token: the job's secret, if it has one.
        tls: whether and with what connections are encrypted.
        deterministic: batches have fixed ranks, which read split by split.
        buffer_bytes: of finished batches that all workers together may keep; None: each knows its share.
        workers: among how many these are divided at least.
        no_worker_s: how long unfinished splits are kept while no worker is connected.
    """

    host: str
    run_id: str
    worker_socket: str
    worker_secret: bytes
    bind: str = "0.0.0.0"  # noqa: S104 - ranks are on other hosts
    port: int = 0
    token: str | None = None
    tls: Tls = PLAIN
    deterministic: bool = False
    buffer_bytes: int | None = None
    workers: int = 1
    no_worker_s: float = 5.0


class FeedServer:
    """A running feed; everything happens in one event loop.

    The coordinator's link calls `hello`, `wanted`, `on_reply` and `stats`.

    Memory: what workers have finished lies in their memory, which is mapped; beside it a few pieces of at most 1 MiB
    for each rank. A batch is let go once its rank says that it has arrived.

    Args:
        config: what it has to know.
        send: queues what the coordinator is to hear; what is lost when that connection breaks is said again.
        on_worker: called with the name of each worker that connects.

    Attributes:
        feed_id: another one after each start.
        port: where it listens; 0 before `start`.
    """

    def __init__(
        self,
        config: FeedConfig,
        send: Callable[[splits_pb2.ServeRequest], None],
        *,
        on_worker: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config, self.feed_id, self.port = config, uuid.uuid4().hex, 0
        self._streams = Streams(config.run_id, self.feed_id, deterministic=config.deterministic)
        self._tasks = Tasks(
            config.host,
            send,
            self._streams,
            no_worker_s=config.no_worker_s,
            on_worker=on_worker,
            share_bytes=self._share_bytes,
        )
        self._door = Door(config.token, _log)
        self._lanes = Lanes()
        self._workers = WorkerServer(config.worker_socket, config.worker_secret, self._tasks)
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Let workers and ranks connect; return the port. Sets how the process's C library keeps freed memory.

        Raises:
            PortInUse: no port can be bound, or another feed of this run is on this host.
            SettingsError: the TLS files cannot be used.
        """
        share_one_heap()
        if self.config.tls.enabled:  # batches go in messages
            keep_freed_memory()
        else:
            give_back_freed_memory()
        server = grpc.aio.server(options=_OPTIONS)
        # Requests arrive as bytes, read only once the token was found right; replies are written by hand.
        handlers = {"Read": grpc.stream_stream_rpc_method_handler(self._read)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self._bind(server)
        await self._workers.start()
        if not self.config.tls.enabled:
            await self._lanes.start(self.config.bind)
        await server.start()
        self._server = server
        self._ticker = asyncio.create_task(self._tick())
        _log.info("feed of %s listens on %s:%d", self.config.host, self.config.bind, self.port)
        return self.port

    async def stop(self) -> None:
        """Close all connections. Workers find another feed by themselves. May be repeated."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        self._lanes.close()
        self._workers.close()

    # --- the coordinator's link ---------------------------------------------------------------------------------------

    def hello(self) -> splits_pb2.ServeHello:
        """Return what a new stream to the coordinator begins with."""
        held, done = self._tasks.hello()
        return splits_pb2.ServeHello(host=self.config.host, feed_id=self.feed_id, held=held, done=done)

    def wanted(self) -> int:
        """Return the number of idle workers: so many splits a new stream asks for."""
        return self._tasks.wanted()

    def on_reply(self, reply: splits_pb2.ServeReply) -> None:
        """Do what the coordinator says."""
        self._tasks.on_reply(reply)

    def stats(self) -> splits_pb2.FeedStats:
        """Return how it stands."""
        workers, batches, size = self._tasks.stats()
        return splits_pb2.FeedStats(
            workers=workers, waiting_batches=batches, waiting_bytes=size, ranks=self._streams.stats()
        )

    @property
    def is_short(self) -> bool:
        """Whether a rank would take a batch and none is finished, though all workers are at work."""
        return self._tasks.all_busy and self._streams.is_short

    def arrived(self) -> tuple[int, int]:
        """Return the rows and batches that have arrived at ranks."""
        return self._streams.arrived()

    def _share_bytes(self, workers: int) -> int | None:
        whole = self.config.buffer_bytes
        return None if whole is None else whole // max(workers, self.config.workers)

    # --- ranks --------------------------------------------------------------------------------------------------------

    async def _read(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        refusal = self._door.why_refused(context)
        if refusal is not None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        try:
            stream, ticket = await self._open(context)
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_S:g} s")
        except Misfit as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:_MOST_DETAILS])
        except (ValueError, DecodeError) as error:
            text = f"the request cannot be used: {error}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text[:_MOST_DETAILS])
        if stream is None:
            return
        problem = await self._serve(stream, context, ticket)
        if problem is not None:
            await context.abort(*problem)

    async def _open(self, context: grpc.aio.ServicerContext) -> tuple[RankStream | None, bytes | None]:
        """Return the rank's stream, and the ticket of the lane that it is offered."""
        # Beforehand: if the write that would send it is cancelled, grpc.aio sends it again with the status; that fails.
        await context.send_initial_metadata(())
        message = await asyncio.wait_for(context.read(), _HELLO_S)
        if message is grpc.aio.EOF:
            return None, None
        request = feed_pb2.ReadRequest.FromString(message)
        if not request.HasField("hello"):
            raise ValueError("the first request must be a hello")
        if not request.hello.lane or not self._lanes.port:
            return self._streams.open(request.hello), None
        ticket = self._lanes.expect()
        try:
            return self._streams.open(request.hello, feed_pb2.Lane(port=self._lanes.port, ticket=ticket)), ticket
        except BaseException:
            self._lanes.forget(ticket)
            raise

    async def _serve(
        self, stream: RankStream, context: grpc.aio.ServicerContext, ticket: bytes | None
    ) -> tuple[grpc.StatusCode, str] | None:
        """Read and write until the rank goes, loses count or comes again; return how to end the call."""
        listening = asyncio.ensure_future(self._listen(stream, context))
        wire: CallWire | LaneWire = CallWire(context.write)
        if ticket is not None:
            wire = LaneWire(context.write, lambda: self._lanes.arrival(ticket))
        writing = asyncio.ensure_future(self._streams.write(stream, wire))
        try:
            await asyncio.wait((listening, writing, stream.replaced), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.close(stream)
            for task in (listening, writing):
                task.cancel()
            heard, said = await asyncio.gather(listening, writing, return_exceptions=True)
            if ticket is not None:
                self._lanes.forget(ticket)
            if isinstance(wire, LaneWire) and wire.lane is not None:
                wire.lane.close()
        if stream.replaced.done():
            return grpc.StatusCode.ABORTED, f"rank {stream.rank} has opened a newer stream"
        if isinstance(heard, (ValueError, DecodeError)):
            return grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be used: {heard}"
        if isinstance(said, OSError):
            return grpc.StatusCode.UNAVAILABLE, f"the lane of rank {stream.rank} broke: {said}"
        for error in (heard, said):
            if isinstance(error, Exception):  # the rank comes again, and gets again what had not arrived
                _log.error("feed: the stream of rank %d broke", stream.rank, exc_info=error)
                return grpc.StatusCode.INTERNAL, f"the feed failed: {error!r}"
        return None

    async def _listen(self, stream: RankStream, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if not stream.replaced.done():
                self._streams.take(stream, feed_pb2.ReadRequest.FromString(message))

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(_TICK_S, self.config.no_worker_s / 4))
            self._tasks.tick()

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self.config
        host = f"[{config.bind}]" if ":" in config.bind else config.bind
        port = config.port
        if _is_taken(config.bind, port):
            _log.warning("port %d is taken; the feed of %s takes any free one", port, config.host)
            port = 0
        try:
            return bind(server, f"{host}:{port}", config.tls)
        except RuntimeError as error:
            text = f"Cannot start the feed of {config.host} on {host}:{port}: {error}. Is that an address of this host?"
            raise PortInUse(text) from error


def _is_taken(address: str, port: int) -> bool:
    """Bind and close: gRPC does not tell why it could not, but writes to the console."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
