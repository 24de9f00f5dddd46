"""The exchange's service in rank 0's process: joins the ranks' reports, passes parcels on, keeps announced values."""

from __future__ import annotations

import hmac
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from hetero import tls as transport
from hetero._proto import exchange_pb2 as pb
from hetero.data import wire
from hetero.data.schedule import RUNNING
from hetero.door import TOKEN_KEY
from hetero.errors import PortInUse
from hetero.tls import PLAIN, Tls

_log = logging.getLogger(__name__)
_REFUSAL_LOG_INTERVAL_S = 10.0
_MAX_RANKS = 1 << 16


class _DaemonThreads(futures.ThreadPoolExecutor):
    """One daemon thread a call: all calls are long, and a rank that dies must not wait for them at interpreter exit."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # handed on through the future, as an executor does
                future.set_exception(error)

        threading.Thread(target=run, name="hetero-exchange-call", daemon=True).start()
        return future


class _Member:
    """One rank's place in the hub. All fields are guarded by the hub's lock."""

    def __init__(self, rank: int, lock: threading.Lock) -> None:
        self.rank = rank
        self.gone = False
        # Serialised LinkReply messages; joined they are one with the fields of all. Frontiers replace older ones.
        self.replies: dict[object, bytes] = {}
        self.parcels: deque[list[bytes]] = deque()
        self.reply_ready = threading.Condition(lock)
        self.parcel_ready = threading.Condition(lock)


class _EpochReports:
    def __init__(self, size: int) -> None:
        self.batches = [0] * size
        self.leftovers = [RUNNING] * size
        self.left_after = [-1] * size
        self.told: object = None

    def decides(self) -> object:
        """Changes when the reports decide something that they did not before."""
        running = [count for count, rows in zip(self.batches, self.leftovers, strict=True) if rows == RUNNING]
        return min(running, default=-1), len(running), tuple(self.left_after)


class _Hub:
    """What the ranks have told, and what each has still to be told."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parted = threading.Condition(self.lock)
        self.size = 0
        self.members: dict[int, _Member] = {}
        self._epochs: dict[int, _EpochReports] = {}
        self._values: dict[str, bytes] = {}
        self._failures: list[Any] = []
        self._numbers = itertools.count()

    def join(self, rank: int, size: int) -> _Member:
        """Add a rank. Raises ValueError with the reason if there is no place for it."""
        with self.lock:
            self.size = self.size or min(size, _MAX_RANKS)
            if size != self.size or not 0 <= rank < size <= _MAX_RANKS:
                raise ValueError(f"rank {rank} of {size} does not fit a job of {self.size} ranks")
            if rank in self.members:
                raise ValueError(f"rank {rank} is here already")
            member = self.members[rank] = _Member(rank, self.lock)
            values = [pb.Value(key=key, value=value) for key, value in self._values.items()]
            welcome = pb.LinkReply(welcome=True, values=values, failures=self._failures)
            member.replies["welcome"] = welcome.SerializeToString()
            for epoch, reports in self._epochs.items():
                member.replies[epoch] = self._frontier(epoch, reports)
            return member

    def apply(self, member: _Member, request: Any) -> None:
        """Take one request of a rank in. Failures first: they say why the rest of it happens."""
        with self.lock:
            for failure in request.failures:
                self._fail(failure)
            for report in request.reports:
                reports = self._reports(report.epoch)
                reports.batches[member.rank] = report.batches
                reports.leftovers[member.rank] = report.leftover
                self._tell_frontier(report.epoch, reports)
            for left in request.left:
                self._leave(member, left.epoch, left.steps)
            for value in request.values:
                self._values[value.key] = value.value
                self._tell_all(pb.LinkReply(values=[value]))

    def part(self, member: _Member, goodbye: bool) -> None:
        """Take a rank out whose link has ended."""
        with self.lock:
            member.gone = True
            member.parcels.clear()
            if not goodbye:
                text = f"rank {member.rank} left without a word; its process has probably died"
                self._fail(pb.Failure(rank=member.rank, epoch=-1, message=text, exit_code=1))
            for epoch in list(self._epochs):
                self._leave(member, epoch, 0)
            member.reply_ready.notify_all()
            member.parcel_ready.notify_all()
            self.parted.notify_all()

    def deliver(self, parcel: Any, messages: list[bytes]) -> None:
        """Queue a parcel that has arrived whole."""
        with self.lock:
            member = self.members.get(parcel.to)
            if member is not None and not member.gone:
                member.parcels.append(messages)
                member.parcel_ready.notify()

    def _reports(self, epoch: int) -> _EpochReports:
        if epoch not in self._epochs:
            reports = self._epochs[epoch] = _EpochReports(self.size)
            for rank, member in self.members.items():
                reports.left_after[rank] = 0 if member.gone else -1
        return self._epochs[epoch]

    def _leave(self, member: _Member, epoch: int, steps: int) -> None:
        reports = self._reports(epoch)
        if reports.left_after[member.rank] < 0:
            reports.left_after[member.rank] = steps
            self._tell_frontier(epoch, reports)
        if min(reports.left_after) >= 0:
            del self._epochs[epoch]

    def _fail(self, failure: Any) -> None:
        self._failures.append(failure)
        self._tell_all(pb.LinkReply(failures=[failure]))

    def _tell_frontier(self, epoch: int, reports: _EpochReports) -> None:
        decides = reports.decides()
        if decides == reports.told:
            return
        reports.told = decides
        reply = self._frontier(epoch, reports)
        for member in self.members.values():
            member.replies.pop(epoch, None)  # so that it comes after what was told since
            member.replies[epoch] = reply
            member.reply_ready.notify()

    def _frontier(self, epoch: int, reports: _EpochReports) -> bytes:
        frontier = pb.Frontier(
            epoch=epoch, batches=reports.batches, leftovers=reports.leftovers, left_after=reports.left_after
        )
        encoded: bytes = pb.LinkReply(frontiers=[frontier]).SerializeToString()
        return encoded

    def _tell_all(self, reply: Any) -> None:
        encoded, number = reply.SerializeToString(), next(self._numbers)
        for member in self.members.values():
            member.replies["news", number] = encoded
            member.reply_ready.notify()


class ExchangeServer:
    """Serves the exchange until `stop`, from threads of its own.

    Args:
        token: shared secret that every call must carry; None: none needed.
        host: address to bind, "0.0.0.0" for all.
        port: 0 takes any free one.
        tls: whether and with what to encrypt.

    Attributes:
        port: the port it listens on.

    Raises:
        PortInUse: the port is taken.
        SettingsError: the TLS files cannot be used.
    """

    def __init__(
        self,
        token: str | None,
        host: str = "0.0.0.0",  # noqa: S104 - peers are on other hosts
        port: int = 0,
        *,
        tls: Tls = PLAIN,
    ) -> None:
        self._token = (token or "").encode()
        self._hub = _Hub()
        self._last_refusal_s = -_REFUSAL_LOG_INTERVAL_S
        self._server = grpc.server(_DaemonThreads(), options=(*wire.OPTIONS, ("grpc.so_reuseport", 0)))
        handlers = {
            "Link": grpc.stream_stream_rpc_method_handler(self._link, pb.LinkRequest.FromString),
            "Upload": grpc.stream_unary_rpc_method_handler(self._upload, None, pb.UploadReply.SerializeToString),
            "Deliver": grpc.unary_stream_rpc_method_handler(self._deliver, pb.DeliverRequest.FromString),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = transport.bind(self._server, address, tls)
        except RuntimeError as error:
            raise PortInUse(
                f"Cannot start the ranks' exchange on {address}: {error}. Use port 0 for any free one."
            ) from error
        self._server.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """End the service once every rank has said goodbye, at the latest after `grace_s` seconds. May be repeated."""
        deadline = time.monotonic() + grace_s
        hub = self._hub
        with hub.lock:
            while any(not member.gone for member in hub.members.values()):
                if not hub.parted.wait(max(0.0, deadline - time.monotonic())):
                    break
        self._server.stop(grace=None).wait(2.0)

    def _link(self, requests: Iterator[Any], context: Any) -> Iterator[bytes]:
        self._authorise(context)
        hello = next(requests).hello
        try:
            member = self._hub.join(hello.rank, hello.size)
        except ValueError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        threading.Thread(target=self._listen, args=(member, requests), name="hetero-exchange-link", daemon=True).start()
        while True:
            with self._hub.lock:
                while not member.replies and not member.gone:
                    member.reply_ready.wait()
                if not member.replies:
                    return
                reply = b"".join(member.replies.values())
                member.replies.clear()
            yield reply

    def _listen(self, member: _Member, requests: Iterator[Any]) -> None:
        goodbye = False
        try:
            for request in requests:
                self._hub.apply(member, request)
                goodbye = goodbye or request.goodbye
        except Exception as error:  # how grpc says that the peer's connection broke
            _log.debug("link of rank %d broke: %r", member.rank, error)
        finally:
            self._hub.part(member, goodbye)

    def _upload(self, requests: Iterator[bytes], context: Any) -> Any:
        self._authorise(context)
        parcel: Any = None
        missing = 0
        messages: list[bytes] = []
        for message in requests:
            content = wire.read_message(message)
            if isinstance(content, memoryview):
                missing -= content.nbytes
            else:
                parcel, missing, messages = content, content.size, []
            messages.append(message)
            if missing == 0:
                self._hub.deliver(parcel, messages)
                messages = []
        return pb.UploadReply()

    def _deliver(self, request: Any, context: Any) -> Iterator[bytes]:
        self._authorise(context)
        with self._hub.lock:
            member = self._hub.members.get(request.rank)
        if member is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"rank {request.rank} has no link")
            return
        while True:
            with self._hub.lock:
                while not member.parcels and not member.gone:
                    member.parcel_ready.wait()
                if not member.parcels:
                    return
                messages = member.parcels.popleft()
            yield from messages

    def _authorise(self, context: Any) -> None:
        if not self._token:
            return
        given = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if hmac.compare_digest(str(given).encode(), self._token):
            return
        now = time.monotonic()
        if now - self._last_refusal_s >= _REFUSAL_LOG_INTERVAL_S:
            self._last_refusal_s = now
            _log.warning("exchange: refused %s: %s token", context.peer(), "wrong" if given else "no")
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's token is missing or wrong")
