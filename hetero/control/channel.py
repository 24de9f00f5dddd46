"""A connection to the coordinator that outlives its restarts, and the door that turns gRPC's errors into ours."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from hetero import tls as transport
from hetero._proto import control_pb2 as pb
from hetero._proto import control_pb2_grpc, splits_pb2_grpc
from hetero.control.config import CONTROL_PORTS
from hetero.door import CLUSTER_KEY, TOKEN_KEY
from hetero.errors import CoordinatorUnreachable, HeteroError, SettingsError, TopologyError, Unauthorised
from hetero.tls import PLAIN, Tls

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_FIRST_S, RETRY_FACTOR, RETRY_MOST_S = 0.05, 1.5, 0.5
NEW_CHANNEL_AFTER_S = 5.0
TELL_AFTER_S = 10.0
"""A host that has looked for the coordinator for this long says so, and why it may not find it."""
FAITHFUL_TRIES = 3
"""How often a coordinator that has answered before is tried again before another port is."""

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # peers are in the same network, whatever the environment says
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.keepalive_time_ms", 5000),  # notices a network that swallows packets
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)


class NotServed(HeteroError):
    """The coordinator does not serve what was asked for: its job has another engine, or it is of another version."""


_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthorised,
    grpc.StatusCode.NOT_FOUND: TopologyError,
    grpc.StatusCode.PERMISSION_DENIED: HeteroError,
    grpc.StatusCode.INVALID_ARGUMENT: HeteroError,
    grpc.StatusCode.UNIMPLEMENTED: NotServed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HeteroError,
}


class Channel:
    """One client's connection; connects when first used. Thread-safe.

    A coordinator whose port was taken serves on one of the next ones. Where the cluster is known, so that another job's
    coordinator on such a port is told from ours, they are tried in turn until one answers.

    Args:
        address: The coordinator's "host:port".
        token: The job's shared secret, None if it has none.
        cluster: What the hosts of the job know themselves by; None asks whoever answers at just this address.
        tls: Whether and with what to encrypt.
        on_found: Called once with where the coordinator has first answered, in whichever thread heard it.

    Raises:
        SettingsError: The token has characters that cannot be sent, or the TLS files cannot be used.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        *,
        cluster: str | None = None,
        tls: Tls = PLAIN,
        on_found: Callable[[str], None] | None = None,
    ) -> None:
        self.address = address
        self._metadata = metadata_of(token, cluster)
        self._tls = tls
        self._addresses = candidates(address) if cluster is not None else (address,)
        self._tries = 0  # without an answer, one after the other
        self._home = 0  # where the coordinator answered last
        self._trouble: str | None = None
        self._worked = False
        self._on_found = on_found
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stream: Any = None
        self._channel, self._stub = self._connect()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def trouble(self) -> str | None:
        """What went wrong since the last answer, in words; None if nothing did."""
        return self._trouble

    def look_at(self, address: str) -> None:
        """Have the next try go to where somebody else has found the coordinator, unless it was found already."""
        with self._lock:
            if self._worked or address == self.address or address not in self._addresses:
                return
            self.address, self._tries = address, self._addresses.index(address)
        self._renew()

    def call_once(self, method: str, request: Any, timeout_s: float) -> Any:
        """Call once; whatever goes wrong is raised as gRPC raises it."""
        stub = self._stub
        try:
            reply = getattr(stub, method)(request, metadata=self._metadata, timeout=timeout_s)
        except (grpc.RpcError, ValueError) as error:
            self._move_on(stub, error)
            raise
        self._found(stub)
        return reply

    def call(
        self,
        method: str,
        request: Any,
        timeout_s: float,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        check: Callable[[], None] | None = None,
    ) -> Any:
        """Call until there is an answer; every method of the service may be repeated safely.

        Args:
            method: Name of the method.
            request: Its request.
            timeout_s: How long to try.
            call_timeout_s: How long one try may take.
            check: Called between tries, then at least about once a second; may raise to give up.

        Raises:
            CoordinatorUnreachable: No answer in time, or this channel was closed.
            HeteroError: The coordinator refused: `Unauthorised`, `TopologyError` for an unknown host, else itself.
        """
        deadline_s = time.monotonic() + timeout_s
        renew_s = time.monotonic() + NEW_CHANNEL_AFTER_S
        tell_s = time.monotonic() + TELL_AFTER_S
        pauses = retry_pauses_s()
        while True:
            left_s = max(0.05, deadline_s - time.monotonic())
            try:
                return self.call_once(method, request, min(left_s, call_timeout_s, 1.0 if check else call_timeout_s))
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed meanwhile
                self._raise_if_final(error)
                trouble = self._note(error)
                if method == "Register" and time.monotonic() > tell_s:
                    tell_s = math.inf
                    why = unresolved(self.address) or trouble
                    logger.warning("no coordinator answers at %s yet (%s), trying on", self.address, why)
                pause_s = self._pause_s(pauses)
                if time.monotonic() + pause_s > deadline_s or self.closed:
                    raise CoordinatorUnreachable(
                        f"The coordinator at {self.address} gave no answer to {method} within {timeout_s:g} s: "
                        f"{trouble}."
                    ) from error
            if check is not None:
                check()
            if self._stream is None and time.monotonic() > renew_s:
                self._renew()
                renew_s = time.monotonic() + NEW_CHANNEL_AFTER_S
            self._closed.wait(pause_s)

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.JobState]:
        """Yield states until `close`; reconnect when the stream breaks.

        Raises:
            HeteroError: The coordinator refused; `Unauthorised` for the token.
        """
        pauses = retry_pauses_s()
        while not self.closed:
            try:
                with self._lock:
                    stub = self._stub
                    stream = self._stream = stub.Watch(request, metadata=self._metadata)
                for message in stream:
                    pauses = retry_pauses_s()
                    self._found(stub)
                    yield message
            except (grpc.RpcError, ValueError) as error:
                self._raise_if_final(error)
                self._note(error)
                self._move_on(stub, error)
            self._closed.wait(self._pause_s(pauses))

    def close(self) -> None:
        """End all calls and the connection; may be repeated."""
        self._closed.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
            self._channel.close()

    def _found(self, stub: Any) -> None:
        """Note that the coordinator has answered."""
        with self._lock:
            first, self._trouble, self._worked = not self._worked, None, True
            if stub is self._stub:
                self._tries, self._home = 0, self._addresses.index(self.address)
        if first and self._on_found is not None:
            self._on_found(self.address)

    def _move_on(self, stub: Any, error: Exception) -> None:
        """Have the next try go to another port, unless the coordinator was found before and may just be coming back."""
        if len(self._addresses) == 1 or (isinstance(error, grpc.Call) and error.code() in _FINAL):
            return
        with self._lock:
            if stub is not self._stub:
                return  # somebody else has
            self._tries += 1
            if self._worked and self._tries % (FAITHFUL_TRIES + 1):
                number = self._home
            else:
                number = self._tries // (FAITHFUL_TRIES + 1) + self._home if self._worked else self._tries
            following = self._addresses[number % len(self._addresses)]
            if following == self.address:
                return
            self.address = following
        self._renew()

    def _pause_s(self, pauses: Iterator[float]) -> float:
        """Return how long to wait before the next try: not at all between the ports of a round of looking for it."""
        return next(pauses) if self._worked or self.address == self._addresses[0] else 0.0

    def _connect(self) -> tuple[Any, Any]:
        channel = transport.channel(*_target(self.address), self._tls)
        stub = control_pb2_grpc.ControlStub(channel)
        stub.GetInput = splits_pb2_grpc.SplitsStub(channel).GetInput
        return channel, stub

    def _renew(self) -> None:
        """Start over with a new connection: an old one may wait minutes before it looks up a name again."""
        with self._lock:
            if self.closed:
                return
            try:
                new = self._connect()
            except SettingsError as error:  # a file that is being replaced must not end a job that runs
                logger.warning("no new connection to the coordinator: %s", error)
                return
            old, (self._channel, self._stub) = self._channel, new
        old.close()

    def _note(self, error: Exception) -> str:
        """Remember what went wrong, in words. A failed handshake outlives the deadline of a later try; logged once."""
        text, before = details(error), self._trouble or ""
        known = transport.is_handshake(before)
        said = transport.explain(text, self._tls, worked=self._worked)
        trouble = before if known and "deadline" in text.lower() else said
        if transport.is_handshake(text) and not known:
            logger.warning("cannot connect to the coordinator at %s, trying on: %s", self.address, trouble)
        self._trouble = trouble
        return trouble

    def _raise_if_final(self, error: Exception) -> None:
        code = error.code() if isinstance(error, grpc.Call) else None
        if code in _FINAL:
            raise _FINAL[code](f"The coordinator at {self.address} refused this host: {details(error)}.") from error


def candidates(address: str) -> tuple[str, ...]:
    """Return where a coordinator may be that is to listen at "host:port": there, or at a following port."""
    host, _, port = address.rpartition(":")
    return tuple(f"{host}:{number}" for number in range(int(port), min(int(port) + CONTROL_PORTS, 65536)))


def _target(address: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return where to connect, and gRPC's options.

    A coordinator on this very host is called by loopback: a container that is taken off its network loses its name and
    address, and would take its own coordinator for one that is there but does not answer.
    """
    host, _, port = address.rpartition(":")
    if host != socket.gethostname():
        return address, CHANNEL_OPTIONS
    return f"127.0.0.1:{port}", (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", host))


def unresolved(address: str) -> str:
    """Return a sentence if the name in "host:port" cannot be resolved on this host, else an empty text."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"the name {host} cannot be resolved here ({error.strerror or error}): put it into DNS or /etc/hosts"
    return ""


def metadata_of(token: str | None, cluster: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return what every call carries.

    Raises:
        SettingsError: The token has characters that cannot be sent.
    """
    if token is not None and not (token and all("!" <= character <= "~" for character in token)):
        raise SettingsError(["--token must be visible ASCII characters without spaces, at least one"])
    said = ((CLUSTER_KEY, cluster), (TOKEN_KEY, token))
    return tuple((key, value) for key, value in said if value is not None)


def details(error: BaseException) -> str:
    """Return what gRPC, or else the exception itself, says went wrong; without a full stop."""
    text = error.details() or error.code().name if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)) else str(error)
    return str(text).rstrip(".")


def retry_pauses_s() -> Iterator[float]:
    """Yield how long to wait before each new try, without end."""
    pause_s = RETRY_FIRST_S
    while True:
        yield pause_s
        pause_s = min(RETRY_MOST_S, pause_s * RETRY_FACTOR)
