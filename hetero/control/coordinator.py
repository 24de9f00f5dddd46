"""The coordinator's process: the ledger behind gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import psutil
from google.protobuf.message import DecodeError

from hetero import tls
from hetero._proto import control_pb2 as pb
from hetero.control import split_service
from hetero.control.config import CONTROL_PORTS, CoordinatorConfig
from hetero.control.ledger import Ledger, Refused, UnknownHost
from hetero.control.split_service import SplitService
from hetero.control.splits import Mismatch
from hetero.control.state import (
    cause_from_json,
    outcome_from_proto,
    report_from_proto,
    state_to_proto,
)
from hetero.door import Door
from hetero.errors import HeteroError, PortInUse

__all__ = ["Coordinator", "CoordinatorConfig", "serve"]

logger = logging.getLogger(__name__)

SERVICE = "hetero.v1.Control"
MAX_REQUEST_BYTES = 1024 * 1024
LINGER_S = 1.0
STOP_GRACE_S = 0.3
MOST_DETAILS = 1000
"""Characters of a refusal: headers that are larger are not delivered."""

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second coordinator on the port must fail, not share it
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),  # clients ping every 5 s to notice a dead network
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),  # drops watchers whose machine is gone
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


def serve(config: CoordinatorConfig, *, on_ready: Callable[[int], None] | None = None) -> None:
    """Run the coordinator until SIGTERM or SIGINT; the main of its process.

    After the job's end it goes only when every host that is still there has heard of the end, or `LINGER_S` has passed.

    Args:
        config: The job. A journal of the same run is resumed.
        on_ready: Called with the port once hosts can connect.

    Raises:
        PortInUse: Another process listens on the port.
        HeteroError: The port cannot be bound for another reason.
    """
    asyncio.run(_serve(config, on_ready))


async def _serve(config: CoordinatorConfig, on_ready: Callable[[int], None] | None) -> None:
    asked_to_stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, asked_to_stop.set)
    coordinator = Coordinator(config)
    port = await coordinator.start()
    if on_ready is not None:
        on_ready(port)
    await asked_to_stop.wait()
    await coordinator.stop()


class Coordinator:
    """A running coordinator; `start` and `stop` belong to one event loop.

    Args:
        config: The job.
        ledger: The rules; by default a new ledger, which resumes the journal.
    """

    def __init__(self, config: CoordinatorConfig, ledger: Ledger | None = None) -> None:
        self.config = config
        self.ledger = ledger or Ledger(config)
        self._door = Door(config.token, logger, config.cluster)
        self._changed = asyncio.Event()
        self._stopping = False
        self._told_end: set[str] = set()
        self._pushed_version = 0
        self._snapshot = b""
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.splits = (
            SplitService(config, self.ledger, functools.partial(_answering, door=self._door), self._publish)
            if config.splits
            else None
        )

    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            PortInUse: Other processes listen on the port and on those that hosts would look at instead.
            HeteroError: No such port can be bound for another reason.
            SettingsError: The TLS files cannot be used.
        """
        wanted = _free_port(self.config)
        most_bytes = MAX_REQUEST_BYTES if self.splits is None else split_service.MAX_REQUEST_BYTES
        server = grpc.aio.server(options=(*_SERVER_OPTIONS, ("grpc.max_receive_message_length", most_bytes)))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        if self.splits is not None:
            server.add_generic_rpc_handlers((self.splits.handlers(),))
        host = f"[{self.config.bind}]" if ":" in self.config.bind else self.config.bind
        try:
            port = tls.bind(server, f"{host}:{wanted}", self.config.tls)
        except RuntimeError as error:
            raise _port_in_use(self.config.bind, wanted) from error
        self._publish()
        await server.start()
        self._server = server
        self._ticker = asyncio.create_task(self._tick())
        logger.info("coordinator of run %s listens on %s:%d", self.config.run_id, host, port)
        return int(port)

    async def stop(self) -> None:
        """Close all connections; after the job's end, once everybody there has heard of it or `LINGER_S` has passed."""
        if self.ledger.ended:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._everybody_told(), LINGER_S)
        self._stopping = True
        self._wake()
        if self.splits is not None:
            self.splits.stop()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        self.ledger.save()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _register(self, request: pb.RegisterRequest, _: grpc.aio.ServicerContext) -> pb.RegisterReply:
        self.ledger.register(
            request.host, request.role, request.address, report_from_proto(request.report), request.launcher
        )
        self._publish()
        return pb.RegisterReply(state=state_to_proto(self.ledger.state()), lease_s=self.config.lease_s)

    async def _heartbeat(self, request: pb.HeartbeatRequest, _: grpc.aio.ServicerContext) -> pb.HeartbeatReply:
        known = self.ledger.heartbeat(request.host, report_from_proto(request.report))
        self._publish()
        return pb.HeartbeatReply(known=known, version=self.ledger.version)

    async def _publish_endpoint(self, request: pb.PublishRequest, _: grpc.aio.ServicerContext) -> pb.PublishReply:
        self.ledger.publish(request.host, request.name, request.address)
        self._publish()
        return pb.PublishReply()

    async def _end_training(self, request: pb.EndTrainingRequest, _: grpc.aio.ServicerContext) -> pb.JobState:
        outcome, cause = outcome_from_proto(request.outcome), cause_from_json(request.cause_json)
        self.ledger.end_training(request.host, outcome, cause, request.age_s, request.wait_for_primary_s)
        self._publish()
        while not self.ledger.ended and not self._stopping:
            await self._changed.wait()
        return state_to_proto(self.ledger.state())

    async def _report_failure(self, request: pb.ReportFailureRequest, _: grpc.aio.ServicerContext) -> pb.JobState:
        cause = cause_from_json(request.cause_json)
        if cause is None:
            raise ValueError("a failure without a cause")
        self.ledger.report_failure(request.host, cause, request.age_s, request.wait_for_primary_s)
        self._publish()
        return state_to_proto(self.ledger.state())

    async def _leave(self, request: pb.LeaveRequest, _: grpc.aio.ServicerContext) -> pb.JobState:
        report = report_from_proto(request.report) if request.HasField("report") else None
        self.ledger.leave(request.host, request.reason, report)
        self._publish()
        return state_to_proto(self.ledger.state())

    async def _get_status(self, _: pb.GetStatusRequest, __: grpc.aio.ServicerContext) -> pb.JobState:
        return state_to_proto(self.ledger.state())

    async def _watch(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async with _answering(context, self._door):
            host = pb.WatchRequest.FromString(request).host
            sent_version = 0
            while not (self._stopping and sent_version == self._pushed_version):
                changed = self._changed
                if sent_version == self._pushed_version:
                    await changed.wait()
                    continue
                sent_version, ended = self._pushed_version, self.ledger.ended
                yield self._snapshot
                if ended and host:
                    self._told_end.add(host)
                    self._wake()

    # --- plumbing -----------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        unary: dict[str, tuple[Any, Handler]] = {
            "Register": (pb.RegisterRequest, self._register),
            "Heartbeat": (pb.HeartbeatRequest, self._heartbeat),
            "Publish": (pb.PublishRequest, self._publish_endpoint),
            "EndTraining": (pb.EndTrainingRequest, self._end_training),
            "ReportFailure": (pb.ReportFailureRequest, self._report_failure),
            "Leave": (pb.LeaveRequest, self._leave),
            "GetStatus": (pb.GetStatusRequest, self._get_status),
        }
        # Requests arrive as bytes: they are read only once the token was found right. States leave as bytes: they are
        # encoded once for all watchers, which matters with the pure Python protobuf.
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(functools.partial(self._answer, kind, handler))
            for name, (kind, handler) in unary.items()
        }
        handlers["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        return handlers

    async def _answer(self, kind: Any, handler: Handler, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async with _answering(context, self._door):
            reply = await handler(kind.FromString(request), context)
        return bytes(reply.SerializeToString())

    async def _tick(self) -> None:
        interval_s = min(0.5, self.config.lease_s / 20)
        while True:
            await asyncio.sleep(interval_s)
            self.ledger.tick()
            if self.splits is not None:
                self.splits.tick()
            self._publish()

    def _publish(self) -> None:
        """Write and push the state if it has changed."""
        if self._pushed_version == self.ledger.version:
            return
        self.ledger.save()
        self._pushed_version = self.ledger.version
        self._snapshot = state_to_proto(self.ledger.state()).SerializeToString()
        self._wake()
        if self.splits is not None:
            self.splits.hosts_changed()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _everybody_told(self) -> None:
        def waiting() -> set[str]:
            hosts = self.ledger.state().hosts
            return {h.name for h in hosts if h.registered and not h.left and not h.lost} - self._told_end

        while waiting():
            await self._changed.wait()


@contextlib.asynccontextmanager
async def _answering(context: grpc.aio.ServicerContext, door: Door) -> AsyncIterator[None]:
    """Let in whoever has the token; turn refusals into gRPC's status codes."""
    if door.is_stranger(context):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this is the coordinator of another job")
    refusal = door.why_refused(context)
    if refusal is not None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
    try:
        yield
    except UnknownHost as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error)[:MOST_DETAILS])
    except Mismatch as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:MOST_DETAILS])
    except Refused as error:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error)[:MOST_DETAILS])
    except (ValueError, KeyError, DecodeError) as error:
        text = f"the request cannot be read: {error}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text[:MOST_DETAILS])


def _free_port(config: CoordinatorConfig) -> int:
    """Return the first port that can be bound of those that hosts look for the coordinator at."""
    last = min(config.port + (CONTROL_PORTS if config.cluster is not None and config.port else 1), 65536)
    problem: HeteroError | None = None
    for port in range(config.port, last):
        try:
            _check_bindable(config.bind, port)
        except HeteroError as error:
            problem = problem or error
            continue
        if problem is not None:
            logger.warning("%s Taking port %d, where the other hosts look too.", problem, port)
        return port
    assert problem is not None  # noqa: S101  there is a first port
    if last - config.port > 1 and isinstance(problem, PortInUse):
        raise PortInUse(f"{problem} The next ports, up to {last - 1}, cannot be had either.") from problem
    raise problem


def _check_bindable(bind: str, port: int) -> None:
    """Bind and close: gRPC's own message does not tell why it could not."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _port_in_use(bind, port) from error
            text = f"Cannot start the coordinator on {bind}:{port}: {error.strerror}. Set another --control-port."
            raise HeteroError(text) from error


def _port_in_use(bind: str, port: int) -> PortInUse:
    pid = None
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:] == (port,):
                pid = connection.pid or pid
    owner = f"pid {pid}" if pid else "another process"
    return PortInUse(
        f"Cannot start the coordinator on {bind}:{port}: port in use by {owner}. Free it or set --control-port."
    )
