"""One rank's side of the exchange: tells what it has read, hears of the others, passes batches and small values."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from hetero import tls as transport
from hetero._proto import exchange_pb2 as pb
from hetero.data import wire
from hetero.data.exchange_server import ExchangeServer
from hetero.door import TOKEN_KEY
from hetero.errors import HeteroError, PeerFailed, PeerNeverCame, Unauthorised
from hetero.tls import PLAIN, Tls

__all__ = ["Exchange", "ExchangeLost", "ExchangeServer", "Frontier", "Listener", "PeerInputFailed", "PeerLeft"]

POLL_S = 0.25  # how often whoever waits looks around
_FLUSH_S = 5.0


class ExchangeLost(PeerFailed):
    """The exchange in rank 0's process is gone, which follows from the end of that process."""


class PeerLeft(PeerFailed):
    """Another rank takes no further part in an epoch that this one is in: its code stopped early, or raised."""


class PeerInputFailed(PeerFailed):
    """Another rank cannot go on, so this one cannot either; `exit_code` is the other's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Frontier:
    """What all ranks have read of an epoch.

    Attributes:
        epoch: its number.
        batches: full batches read by each rank.
        leftovers: rows each had left at its end; -1 while it reads.
        left_after: steps each took of the epoch before it left; -1 while it takes part.
    """

    epoch: int
    batches: tuple[int, ...]
    leftovers: tuple[int, ...]
    left_after: tuple[int, ...]


class Listener(Protocol):
    """Hears what comes in; called from the exchange's threads, in order for each kind."""

    def on_frontier(self, frontier: Frontier) -> None:
        """The reports of all ranks decide more than before."""

    def on_parcel(self, epoch: int, step: int, part: int, data: Any) -> None:
        """A part of a batch for this rank has arrived."""

    def on_failure(self, epoch: int, error: HeteroError) -> None:
        """An epoch (-1: any) cannot be finished."""


@dataclass(frozen=True, slots=True)
class _Outgoing:
    epoch: int
    step: int
    to: int
    part: int
    data: Any
    done: Callable[[], None]


class Exchange:
    """Connects one rank; ends with `close`, which says goodbye so that the others do not take this rank for dead.

    Args:
        address: host:port of rank 0's ExchangeServer.
        rank: this rank.
        size: number of ranks, the same everywhere.
        token: the job's secret, if it has one.
        connect_timeout_s: how long the server may take to answer.
        check: called while waiting for it; may raise.
        tls: whether and with what to encrypt.

    Raises:
        Unauthorised: the token is refused.
        PeerNeverCame: no answer in time.
        SettingsError: the TLS files cannot be used.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        token: str | None = None,
        *,
        connect_timeout_s: float = 60.0,
        check: Callable[[], None] | None = None,
        tls: Tls = PLAIN,
    ) -> None:
        self._tls = tls
        self.address, self.rank, self.size = address, rank, size
        self._metadata = ((TOKEN_KEY, token),) if token else ()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # guards everything below; never held while a listener is called
        self._request = pb.LinkRequest(hello=pb.Hello(rank=rank, size=size))
        self._reports: dict[int, tuple[int, int]] = {}
        self._dirty = True
        self._closing = False
        self._welcome = False
        self._lost: HeteroError | None = None
        self._values: dict[str, bytes] = {}
        self._listener: Listener | None = None
        self._backlog: list[tuple[str, tuple[Any, ...]]] = []
        self._outgoing: deque[_Outgoing] = deque()
        self._outgoing_ready = threading.Condition(lock)
        self._upload: Any = None
        self._deliver: Any = None
        self._channel = transport.channel(address, wire.OPTIONS, tls)
        self._link = self._channel.stream_stream(
            f"/{wire.SERVICE}/Link", pb.LinkRequest.SerializeToString, pb.LinkReply.FromString
        )(self._requests(), metadata=self._metadata, wait_for_ready=True)
        self._thread = threading.Thread(target=self._listen, name=f"hetero-exchange-{rank}", daemon=True)
        self._thread.start()
        try:
            what = f"No answer from the ranks' exchange in rank 0's process at {address}"
            self._until(lambda: self._welcome, connect_timeout_s, check, what)
        except BaseException:
            self._abandon()
            raise

    def attach(self, listener: Listener) -> None:
        """Hand everything that comes in, and came in before, to a listener."""
        with self._changed:
            self._listener = listener
            backlog, self._backlog = self._backlog, []
        for event, arguments in backlog:
            getattr(listener, event)(*arguments)

    def report(self, epoch: int, batches: int, leftover: int) -> None:
        """Tell how many full batches this rank has read of an epoch, and at the end (leftover >= 0) the rows left over.

        Returns at once; if reports come faster than they can be sent only the newest is.
        """
        with self._changed:
            self._reports[epoch] = (batches, leftover)
            self._notify()

    def leave(self, epoch: int, steps: int) -> None:
        """Tell that this rank takes no further part in an epoch after so many steps."""
        with self._changed:
            self._request.left.append(pb.Left(epoch=epoch, steps=steps))
            self._notify()

    def fail(self, epoch: int, message: str, exit_code: int = 1) -> None:
        """Tell the other ranks that this one cannot finish an epoch (-1: any)."""
        with self._changed:
            self._request.failures.append(pb.Failure(rank=self.rank, epoch=epoch, message=message, exit_code=exit_code))
            self._notify()

    def send(self, epoch: int, step: int, *, to: int, part: int, data: Any, done: Callable[[], None]) -> None:
        """Give a part of a batch to another rank.

        Args:
            epoch: its epoch.
            step: the step in which the other rank takes it.
            to: that rank.
            part: position among the parts that it joins for the step.
            data: nested structure of arrays; must not change until `done`.
            done: called from a thread of the exchange once the part is on its way.
        """
        with self._changed:
            if self._closing or self._lost is not None:
                return  # whoever waits hears of it as a failure
            self._outgoing.append(_Outgoing(epoch, step, to, part, data, done))
            self._outgoing_ready.notify()
            if self._upload is not None:
                return
            call = self._channel.stream_unary(f"/{wire.SERVICE}/Upload", None, pb.UploadReply.FromString)
            upload = self._upload = call.future(self._uploads(), metadata=self._metadata)
        upload.add_done_callback(
            self._upload_ended
        )  # without the lock: a call that has failed already calls back at once

    def expect_parcels(self) -> None:
        """Open the stream on which others' batches come; until then they wait in rank 0's process."""
        with self._changed:
            if self._deliver is not None or self._closing or self._lost is not None:
                return
            self._deliver = self._channel.unary_stream(
                f"/{wire.SERVICE}/Deliver", pb.DeliverRequest.SerializeToString, None
            )(pb.DeliverRequest(rank=self.rank), metadata=self._metadata)
        threading.Thread(target=self._receive, name=f"hetero-exchange-parcels-{self.rank}", daemon=True).start()

    def publish(self, key: str, value: bytes) -> None:
        """Announce a small value to all ranks, those who come later included."""
        with self._changed:
            self._request.values.append(pb.Value(key=key, value=value))
            self._notify()

    def wait(self, key: str, timeout_s: float | None = None, check: Callable[[], None] | None = None) -> bytes:
        """The value announced under a key, by whichever rank.

        Args:
            key: as given to `publish`.
            timeout_s: None waits without limit.
            check: called at least every 0.5 s; may raise.

        Raises:
            PeerNeverCame: not announced in time.
            ExchangeLost: rank 0's process is gone.
        """
        self._until(lambda: key in self._values, timeout_s, check, f"No rank announced {key!r}")
        return self._values[key]

    def close(self) -> None:
        """Finish what is on its way, say goodbye and end all threads; takes at most a few seconds. May be repeated."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._outgoing_ready.notify_all()
            upload, lost = self._upload, self._lost
        if upload is not None and lost is None:
            # Whoever waits for these batches hears of it through its own link.
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                upload.result(timeout=_FLUSH_S)
        with self._changed:
            self._request.goodbye = True
            self._notify()
        self._thread.join(_FLUSH_S if lost is None else 1.0)
        self._abandon()

    def _abandon(self) -> None:
        with self._changed:
            self._closing = self._request.goodbye = True
            self._notify()
            self._outgoing_ready.notify_all()
        self._channel.close()
        self._thread.join(2.0)

    def _notify(self) -> None:
        self._dirty = True
        self._changed.notify_all()

    def _until(
        self, ready: Callable[[], bool], timeout_s: float | None, check: Callable[[], None] | None, what: str
    ) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                if ready():
                    return
                if self._lost is not None:
                    raise self._lost
                remaining = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
                if remaining <= 0:
                    raise PeerNeverCame(
                        f"{what} within {timeout_s:g} s{self._trouble()}. "
                        "See the log of rank 0 and of the ranks before it."
                    )
                self._changed.wait(remaining)
                if ready():
                    return
            if check is not None:
                check()

    def _trouble(self) -> str:
        """Return why there is no connection, in parentheses; calls that wait for one do not tell."""
        try:
            self._channel.unary_unary(f"/{wire.SERVICE}/Probe")(b"", timeout=1.0)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                return f" ({transport.explain(error.details(), self._tls)})"
        return ""

    def _requests(self) -> Iterator[Any]:
        while True:
            with self._changed:
                while not self._dirty:
                    self._changed.wait()
                request, self._request = self._request, pb.LinkRequest()
                for epoch, (batches, leftover) in self._reports.items():
                    request.reports.append(pb.Report(epoch=epoch, batches=batches, leftover=leftover))
                self._reports.clear()
                self._dirty = False
            yield request
            if request.goodbye:
                return

    def _listen(self) -> None:
        error: Exception | None = None
        try:
            for reply in self._link:
                self._handle(reply)
        except Exception as broken:  # nothing may end this thread in silence: the rank would wait for ever
            error = broken
        with self._changed:
            if self._closing:
                self._lost = self._lost or ExchangeLost("The exchange was closed.")
            else:
                self._lost = self._translate(error)
            lost = self._lost
            self._notify()
            self._outgoing_ready.notify_all()
        self._tell("on_failure", -1, lost)

    def _translate(self, error: Exception | None) -> HeteroError:
        if error is not None and not isinstance(error, grpc.RpcError):
            unexpected = HeteroError(f"Rank {self.rank} cannot use what the ranks' exchange sent: {error!r}")
            unexpected.__cause__ = error
            return unexpected
        code, details = (error.code(), error.details()) if error is not None else (None, None)
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return Unauthorised(
                f"The ranks' exchange at {self.address} refused rank {self.rank}: {details}. "
                "Give every host the same --token."
            )
        reason = f"{code.name}: {details}" if code is not None else "it was stopped"
        return ExchangeLost(
            f"Rank {self.rank} lost the ranks' exchange in rank 0's process at {self.address} ({reason}). "
            "Rank 0 has probably ended; see its log."
        )

    def _handle(self, reply: Any) -> None:
        for failure in reply.failures:
            if failure.rank != self.rank:
                error = PeerInputFailed(f"Rank {failure.rank} cannot go on: {failure.message}", failure.exit_code)
                self._tell("on_failure", failure.epoch, error)
        if reply.welcome or reply.values:
            with self._changed:
                self._welcome = self._welcome or reply.welcome
                self._values.update((value.key, value.value) for value in reply.values)
                self._changed.notify_all()
        for told in reply.frontiers:
            frontier = Frontier(told.epoch, tuple(told.batches), tuple(told.leftovers), tuple(told.left_after))
            self._tell("on_frontier", frontier)

    def _tell(self, event: str, *arguments: Any) -> None:
        """Call the listener's method of this name, or keep the call until there is a listener."""
        with self._changed:
            listener = self._listener
            if listener is None:
                self._backlog.append((event, arguments))
                return
        getattr(listener, event)(*arguments)

    def _uploads(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                while not self._outgoing:
                    if self._closing or self._lost is not None:
                        return
                    self._outgoing_ready.wait()
                item = self._outgoing.popleft()
            try:
                yield from wire.parcel_messages(
                    epoch=item.epoch, step=item.step, to=item.to, part=item.part, data=item.data
                )
                self._upload.add_done_callback(self._upload_ended)
            except Exception as error:  # as in _listen
                self.fail(item.epoch, f"{type(error).__name__}: {error}")
                self._tell(
                    "on_failure", item.epoch, error if isinstance(error, HeteroError) else self._translate(error)
                )
            item.done()
            del item

    def _receive(self) -> None:
        try:
            for parcel, data in wire.read_parcels(self._deliver):
                self._tell("on_parcel", parcel.epoch, parcel.step, parcel.part, data)
        except Exception as error:  # as in _listen
            self._stream_broke(error)

    def _upload_ended(self, call: Any) -> None:
        if not call.cancelled() and call.exception() is not None:
            self._stream_broke(call.exception())

    def _stream_broke(self, error: Exception) -> None:
        with self._changed:
            if self._closing or self._lost is not None:
                return
        lost = self._translate(error)
        self.fail(-1, str(lost))
        self._tell("on_failure", -1, lost)
