"""A host's side of the control service: register, keep the lease, watch the job, say how it ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import grpc

from hetero._proto import control_pb2 as pb
from hetero._proto import splits_pb2
from hetero.control.channel import CALL_TIMEOUT_S, Channel, NotServed, details
from hetero.control.lease import Lease, heartbeat_interval_s
from hetero.control.state import (
    HostReport,
    JobState,
    Outcome,
    Phase,
    cause_to_json,
    outcome_to_proto,
    report_to_proto,
    state_from_proto,
)
from hetero.errors import CoordinatorUnreachable, HeteroError, PeerNeverCame
from hetero.tls import PLAIN, Tls

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.25


class ControlClient(contextlib.AbstractContextManager["ControlClient"]):
    """Talks to the coordinator for one host, or for nobody in particular (`status`, `watch`).

    Nothing connects before the first call. Any thread may call any method; `close` ends every thread that was started.

    Args:
        address: The coordinator's "host:port".
        token: The job's shared secret, None if it has none.
        host: Name of this host in the topology.
        role: "data" or "trainer".
        host_address: Where peers reach this host; its name by default.
        cluster: What the hosts of the job know themselves by: then the coordinator is looked for at the next ports too.
        tls: Whether and with what to encrypt.
        on_found: Called once with where the coordinator has first answered, in whichever thread heard it.

    Raises:
        SettingsError: The token has characters that cannot be sent, or the TLS files cannot be used.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        host: str = "",
        role: str = "",
        *,
        host_address: str | None = None,
        cluster: str | None = None,
        tls: Tls = PLAIN,
        on_found: Callable[[str], None] | None = None,
    ) -> None:
        self.host = host
        self.role = str(getattr(role, "value", role))
        self.lease_s: float | None = None
        self._host_address = host if host_address is None else host_address
        self._channel = Channel(address, token, cluster=cluster, tls=tls, on_found=on_found)
        self._lock = threading.Condition()
        self._state: JobState | None = None
        self._refused: HeteroError | None = None
        self._published: dict[str, pb.PublishRequest] = {}
        self._callbacks: list[Callable[[JobState], None]] = []
        self._watcher: threading.Thread | None = None
        self._lease: Lease | None = None
        self._id = uuid.uuid4().hex

    @property
    def address(self) -> str:
        """Where the coordinator answered last, or is looked for."""
        return self._channel.address

    def look_at(self, address: str) -> None:
        """Look for the coordinator where another process has found it, unless it was found already."""
        self._channel.look_at(address)

    # --- finding each other -------------------------------------------------------------------------------------------

    def register(self, report: HostReport, timeout_s: float, *, check: Callable[[], None] | None = None) -> JobState:
        """Announce this host; wait for the coordinator to come up if need be.

        Args:
            report: What the host runs so far.
            timeout_s: How long the coordinator may take to answer.
            check: Called several times a second while waiting; may raise to give up.

        Returns:
            The state after the registration.

        Raises:
            PeerNeverCame: The coordinator did not answer in time.
            Unauthorised: It refused the token.
            TopologyError: The job does not expect this host in this role.
        """
        try:
            reply = self._channel.call("Register", self._registration(report), timeout_s, check=check)
        except CoordinatorUnreachable as error:
            raise PeerNeverCame(
                f"The coordinator at {self.address} did not answer within {timeout_s:g} s "
                f"({self._channel.trouble or details(error)}). "
                "Look at the log of the host that runs it, or raise --start-timeout-s."
            ) from error
        self.lease_s = reply.lease_s
        return state_from_proto(reply.state)

    def publish(self, name: str, address: str, timeout_s: float = 15.0) -> None:
        """Announce where something listens; while this client watches, once more should the coordinator forget it.

        Raises:
            CoordinatorUnreachable: No answer in time.
            HeteroError: The coordinator refused; `Unauthorised` for the token.
        """
        request = pb.PublishRequest(host=self.host, name=name, address=address)
        self._channel.call("Publish", request, timeout_s)
        self._published[name] = request

    def watch(self, callback: Callable[[JobState], None] | None = None) -> None:
        """Call `callback` in a background thread with the state now and after each change, until `close`.

        The thread reconnects by itself. Callbacks must be short; what they raise is logged.
        """
        with self._lock:
            if callback is not None:
                self._callbacks.append(callback)
                if self._state is not None:
                    self._tell(callback, self._state)
            if self._watcher is None and not self._channel.closed:
                self._watcher = threading.Thread(target=self._watch, name="hetero-watch", daemon=True)
                self._watcher.start()

    @property
    def state(self) -> JobState | None:
        """The latest state that was watched; None before the first."""
        return self._state

    def wait_for(
        self,
        predicate: Callable[[JobState], bool],
        timeout_s: float,
        what: str,
        *,
        check: Callable[[], None] | None = None,
    ) -> JobState:
        """Wait until the job is in a certain state, or over.

        Args:
            predicate: Says whether a state is the one waited for.
            timeout_s: How long to wait; twice as long where the job still waits for hosts then.
            what: What is waited for, for the message: "the dispatcher".
            check: Called several times a second while waiting; may raise to give up.

        Returns:
            The first state that `predicate` accepts, or the state in which the job ended first: look at `.ended`.

        Raises:
            PeerNeverCame: Neither happened in time.
            Unauthorised: The coordinator refused the token.
        """
        self.watch()
        began_s = time.monotonic()
        while True:
            with self._lock:
                if self._state is not None and (predicate(self._state) or self._state.ended):
                    return self._state
                if self._refused is not None:
                    raise self._refused
                # As long as hosts are missing it is the coordinator that gives up in time, and knows which ones.
                waits_for_hosts = self._state is not None and self._state.phase is Phase.WAITING
                limit_s = 2 * timeout_s if waits_for_hosts else timeout_s
                left_s = began_s + limit_s - time.monotonic()
                if left_s <= 0:
                    break
                self._lock.wait(min(left_s, CHECK_INTERVAL_S))
            if check is not None:
                check()
        trouble = f" ({self._channel.trouble})" if self._channel.trouble else ""
        seen = f"the job is {self._state.phase.value}" if self._state else f"the coordinator did not answer{trouble}"
        raise PeerNeverCame(
            f"{what} did not come within {limit_s:g} s; {seen}. Look at the logs of the other hosts, "
            f"`hetero status {self.address}` lists them."
        )

    # --- signs of life ------------------------------------------------------------------------------------------------

    def start_lease(
        self,
        report: Callable[[], HostReport],
        on_unreachable: Callable[[float], None],
        interval_s: float | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Give a sign of life in a background thread until `close`; register again where the coordinator forgot us.

        Args:
            report: Called in the thread before each heartbeat; while it raises, the last report is sent.
            if not self._channel.call_once("Heartbeat", request, timeout_s).known:
        """
        lease_s = self.lease_s or 30.0
        interval_s = interval_s or heartbeat_interval_s(lease_s)
        timeout_s, last = min(2.0, max(2 * interval_s, lease_s / 6)), HostReport()

        def beat() -> None:
            nonlocal last
            try:
                last = report()
            except Exception:  # a host that cannot count its workers is alive all the same
                logger.exception("cannot make a report; the last one is sent again")
            request = pb.HeartbeatRequest(host=self.host, report=report_to_proto(last))
            if not self._channel.call_once("Heartbeat", request, timeout_s).known:
                self._channel.call_once("Register", self._registration(last), timeout_s)
            on_answer()

        def unreachable(silent_s: float) -> None:
            if not self._channel.closed and not (self._state is not None and self._state.ended):
                on_unreachable(silent_s)

        with self._lock:
            if self._lease is not None or self._channel.closed:
                return
            self._lease = Lease(interval_s, beat, unreachable)
            self._lease.start()

    def report_now(self) -> None:
        """Send the next heartbeat at once, because something worth knowing has changed."""
        if self._lease is not None:
            self._lease.beat_now()

    # --- the end ------------------------------------------------------------------------------------------------------

    def end_training(
        self,
        outcome: Outcome,
        cause: Mapping[str, object] | None = None,
        *,
        age_s: float = 0.0,
        wait_for_primary_s: float = 0.0,
        timeout_s: float = 15.0,
    ) -> JobState:
        """End the job; the first end that the coordinator hears of counts.

        Args:
            outcome: SUCCEEDED (the chief only), FAILED, DATA_LOST or STOPPED.
            cause: The failure behind it, as `Failure.to_dict()`.
            age_s: How long ago the failure happened.
            wait_for_primary_s: With a secondary cause: how long to wait for a primary one.
            timeout_s: How long to try beyond that.

        Returns:
            The final state, with the cause that counts.

        Raises:
            CoordinatorUnreachable: No answer in time.
            HeteroError: The coordinator refused; `Unauthorised` for the token.
        """
        request = pb.EndTrainingRequest(
            host=self.host,
            outcome=outcome_to_proto(outcome),
            cause_json=cause_to_json(cause),
            age_s=age_s,
            wait_for_primary_s=wait_for_primary_s,
        )
        patience_s = wait_for_primary_s + CALL_TIMEOUT_S
        reply = self._channel.call("EndTraining", request, timeout_s + wait_for_primary_s, call_timeout_s=patience_s)
        return state_from_proto(reply)

    def report_failure(
        self,
        cause: Mapping[str, object],
        age_s: float = 0.0,
        *,
        wait_for_primary_s: float = 5.0,
        timeout_s: float = 15.0,
    ) -> JobState:
        """Tell of a process that failed for good. A trainer's ends the job; a data host's explains a later loss.

        Raises:
            CoordinatorUnreachable: No answer in time.
            HeteroError: The coordinator refused; `Unauthorised` for the token.
        """
        request = pb.ReportFailureRequest(
            host=self.host, cause_json=cause_to_json(cause), age_s=age_s, wait_for_primary_s=wait_for_primary_s
        )
        return state_from_proto(self._channel.call("ReportFailure", request, timeout_s))

    def leave(self, reason: str = "", report: HostReport | None = None, timeout_s: float = 2.0) -> JobState | None:
        """Say that this host goes; heartbeats stop. Never raises: whoever leaves cannot wait for an answer.

        Args:
            reason: Empty if the host's part went well; else why it leaves before the end.
            report: Its last numbers.

        Returns:
            The state after it, None if there was no answer.
        """
        if self._lease is not None:
            self._lease.stop()
        sayable = reason.encode("utf-8", "replace").decode("utf-8")  # an exception's text can be no Unicode
        request = pb.LeaveRequest(host=self.host, reason=sayable)
        if report is not None:
            request.report.CopyFrom(report_to_proto(report))
        try:
            return state_from_proto(self._channel.call("Leave", request, timeout_s))
        except HeteroError as error:
            logger.info("could not say goodbye to the coordinator: %s", error)
            return None

    def status(self, timeout_s: float = 5.0) -> JobState:
        """Ask for the state now.

        Raises:
            CoordinatorUnreachable: No answer in time.
            Unauthorised: The coordinator refused the token.
        """
        return state_from_proto(self._channel.call("GetStatus", pb.GetStatusRequest(), timeout_s))

    def input_state(self, timeout_s: float = 5.0) -> splits_pb2.InputState | None:
        """Ask how the input of a `grpc` job stands now; None if the job has another engine.

        Raises:
            CoordinatorUnreachable: No answer in time.
            Unauthorised: The coordinator refused the token.
        """
        with contextlib.suppress(NotServed):
            reply: splits_pb2.InputState = self._channel.call("GetInput", splits_pb2.GetInputRequest(), timeout_s)
            return reply
        return None

    def close(self) -> None:
        """End all threads and the connection; says nothing to the coordinator. Never raises, may be repeated."""
        self._channel.close()  # calls under way end at once
        with self._lock:
            self._lock.notify_all()
        if self._lease is not None:
            self._lease.stop()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2.0)

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- plumbing -----------------------------------------------------------------------------------------------------

    def _registration(self, report: HostReport) -> pb.RegisterRequest:
        who = {"host": self.host, "role": self.role, "address": self._host_address, "launcher": self._id}
        return pb.RegisterRequest(**who, report=report_to_proto(report))

    def _watch(self) -> None:
        try:
            for message in self._channel.watch(pb.WatchRequest(host=self.host)):
                state = state_from_proto(message)
                self._accept(state)
                self._publish_again(state)
        except HeteroError as refusal:
            with self._lock:
                self._refused = refusal
                self._lock.notify_all()

    def _publish_again(self, state: JobState) -> None:
        """Announce what a coordinator with an old journal, or none, does not know; tried again with the next state."""
        for name, request in tuple(self._published.items()) if not state.ended else ():
            if state.endpoints.get(name) == request.address:
                continue
            try:
                self._channel.call_once("Publish", request, CHECK_INTERVAL_S * 4)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed meanwhile
                logger.info("cannot announce %s again: %s", name, details(error))

    def _accept(self, state: JobState) -> None:
        with self._lock:
            known = self._state
            if known is not None and (known.restarts, known.version) == (state.restarts, state.version):
                return
            self._state = state
            self._lock.notify_all()
            for callback in tuple(self._callbacks):
                self._tell(callback, state)

    def _tell(self, callback: Callable[[JobState], None], state: JobState) -> None:
        if self._channel.closed:
            return
        try:
            callback(state)
        except Exception:  # one reader's mistake must not end the watch for the others
            logger.exception("a callback for the job's state failed")
