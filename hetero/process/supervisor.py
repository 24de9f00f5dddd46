"""The processes of one host as a group: one state, one loop, one deadline, one root cause.

A supervisor is driven by one thread, the launcher's main thread: it starts children, takes events, stops. That thread
must outlive the children (Linux ties the parent-death signal to the thread that forked). `post`, `hurry`, `cpu_s`,
`living` and `children` may be called from any thread, the first two from signal handlers too.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import deque
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, final

from hetero.errors import ChildFailed
from hetero.process.child import Child, ChildExit, ChildSpec
from hetero.process.cpu import CpuMeter
from hetero.process.failure import Failure, first_failure, read_error
from hetero.process.group import ChildEnded, ChildRestarted, ChildState, ChildStatus, GroupState
from hetero.process.janitor import JanitorHandle, sweep
from hetero.process.output import ConsoleSink, LineSink

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

_KILL_WAIT_S = 10.0  # after SIGKILL only a process stuck in the kernel is still there
_WAKE: Final = object()
_BY_ITSELF = "it ended by itself with exit code 0, though it runs until it is told to end (SIGTERM from elsewhere?)"


@dataclass
class _Slot:
    """A child over all its lives."""

    spec: ChildSpec
    child: Child | None = None  # None once its exit has been dealt with
    state: ChildState = ChildState.RUNNING
    last: ChildExit | None = None
    restarts: int = 0
    recent_s: deque[float] = field(default_factory=deque)  # restarts within the policy's window
    due_s: float | None = None


@final
class Supervisor:
    """Start children, restart them by their policy, tell how they ended, and leave none behind.

    A context manager: leaving it stops everything. Starts one janitor process, and two threads for each child.

    Args:
        grace_s: Time between SIGTERM and SIGKILL, seconds.
        sink: Takes the children's output and the supervisor's own notices, line by line, from several threads.
        janitor: Whether to start the process that cleans up should this one be killed.
        host: Name of this host, for failures.
    """

    def __init__(
        self, grace_s: float = 10.0, sink: LineSink | None = None, janitor: bool = True, host: str = ""
    ) -> None:
        self._grace_s = grace_s
        self._sink: LineSink = ConsoleSink() if sink is None else sink
        self._host = host
        self._token = os.urandom(12).hex()
        self._slots: dict[str, _Slot] = {}
        self._queue: SimpleQueue[object] = SimpleQueue()  # its put is re-entrant, so fit for signal handlers
        self._ready: deque[object] = deque()
        self._failures: list[tuple[bool, Failure]] = []
        self._meter = CpuMeter()
        self._phase: GroupState | None = None  # STOPPING, STOPPED
        self._kill_at_s = math.inf
        self._folders: list[Path] = []
        self._janitor = JanitorHandle(self._token, self._sink) if janitor else None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all children and the janitor, and remove the folders that go with them. May be repeated."""
        try:
            self.stop()
        finally:
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
            if self._janitor is not None:
                self._janitor.close()

    def start(self, spec: ChildSpec) -> int:
        """Start a child and return its pid.

        Raises:
            ChildFailed: It cannot be started, its name is taken by a living child, or the supervisor was stopped.
        """
        if self._phase is not None:
            raise ChildFailed(f"Cannot start {spec.name}: this supervisor is {self._phase.value}. Make another one.")
        old = self._slots.get(spec.name)
        if old is not None and old.state in (ChildState.RUNNING, ChildState.WAITING):
            raise ChildFailed(f"Cannot start {spec.name}: one of that name is {old.state.value}. Stop it first.")
        child = self._launch(spec)
        self._slots[spec.name] = _Slot(spec, child)
        return child.pid

    def own(self, folder: Path) -> None:
        """Have a folder removed after the last child has ended, also where this process is killed."""
        self._folders.append(folder)
        if self._janitor is not None:
            self._janitor.own(str(folder))

    def post(self, event: object) -> None:
        """Have `next_event` return `event`. From any thread or signal handler; never blocks."""
        self._queue.put(event)

    def hurry(self, within_s: float = 0.0) -> None:
        """Have a `stop` that is under way, or the next one, not wait any longer. From any thread or signal handler.

        Args:
            within_s: SIGKILL is sent so many seconds from now at the latest.
        """
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + within_s)
        self._queue.put(_WAKE)

    def next_event(self, timeout_s: float | None = None) -> object | None:
        """Return the next thing that happened: ChildEnded, ChildRestarted, or what was posted.

        Restarts that are due happen in here. Sleeps without polling.

        Args:
            timeout_s: How long to wait at most; None: for ever.

        Returns:
            The event; None if the time ran out.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._collect(self._slots.values())
            if not self._ready:
                self._restart_due()
            if self._ready:
                return self._ready.popleft()
            now_s = time.monotonic()
            waits = [slot.due_s - now_s for slot in self._slots.values() if slot.due_s is not None]
            if deadline_s is not None:
                waits.append(deadline_s - now_s)
            try:
                item = self._queue.get(timeout=max(0.0, min(waits)) if waits else None)
            except Empty:
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return None
                continue
            if item is not _WAKE:
                self._ready.append(item)

    def stop(self, names: Iterable[str] | None = None, grace_s: float | None = None) -> list[ChildEnded]:
        """Stop children: SIGTERM to all groups, one deadline for all, SIGKILL, until all are reaped.

        Restarts that were pending are cancelled. Children that had ended unnoticed are judged as having ended by
        themselves. After a stop of all, nothing that carries this supervisor's mark is alive, and nothing can be
        started any more.

        Args:
            names: Which; one that was never started is none to stop. None: all.
            grace_s: Time between SIGTERM and SIGKILL; None: the supervisor's; 0: SIGKILL at once.

        Returns:
            How each ended that had not ended before, also those that fail now. `next_event` does not tell of these.
        """
        chosen = None if names is None else set(names)
        slots = [slot for name, slot in self._slots.items() if chosen is None or name in chosen]
        if chosen is None and self._phase is None:
            self._phase = GroupState.STOPPING
        try:
            results = self._cancel_restarts(slots) + self._end(slots, self._grace_s if grace_s is None else grace_s)
        except BaseException:
            for slot in slots:
                if slot.child is not None:
                    slot.child.kill()
            for slot in slots:
                if slot.child is not None:
                    slot.child.wait(_KILL_WAIT_S)
            raise
        if chosen is None and self._phase is GroupState.STOPPING:
            sweep(self._token)
            self._phase = GroupState.STOPPED
        return results

    @property
    def state(self) -> GroupState:
        """State of the group."""
        if self._phase is not None:
            return self._phase
        slots = list(self._slots.values())
        states = {slot.state for slot in slots}
        if any(slot.state is ChildState.FAILED and slot.spec.critical for slot in slots):
            return GroupState.FAILED
        if ChildState.WAITING in states:
            return GroupState.DEGRADED
        if ChildState.RUNNING in states:
            return GroupState.RUNNING
        return GroupState.SUCCEEDED if slots else GroupState.IDLE

    @property
    def root_cause(self) -> Failure | None:
        """The first failure in time among those for good.

        Failures of critical children go before others, secondary ones come last. A child that failed and was
        started again is no cause of anything.
        """
        failures = [failure for critical, failure in self._failures if critical]
        failures = failures or [failure for _, failure in self._failures]
        return first_failure(failures) if failures else None

    def children(self) -> tuple[ChildStatus, ...]:
        """Return every child ever started, in order of its first start."""
        now_s = time.monotonic()
        result = []
        for slot in list(self._slots.values()):
            child, last = slot.child, slot.last
            result.append(
                ChildStatus(
                    name=slot.spec.name,
                    pid=None if child is None else child.pid,
                    state=slot.state,
                    restarts=slot.restarts,
                    exit_code=None if child is not None or last is None else last.exit_code,
                    signal=None if child is not None or last is None else last.signal,
                    uptime_s=0.0 if child is None else now_s - child.started_s,
                )
            )
        return tuple(result)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all children so far, living and ended, with their descendants. Never falls."""
        return self._meter.read(self.living())

    def living(self) -> tuple[Child, ...]:
        """Return the children that have not ended, or whose end has not been dealt with. From any thread."""
        return tuple(child for slot in list(self._slots.values()) if (child := slot.child) is not None)

    def _launch(self, spec: ChildSpec) -> Child:
        return Child(spec, self._sink, lambda: self._queue.put(_WAKE), self._janitor, self._token)

    def _collect(self, slots: Iterable[_Slot]) -> None:
        """Turn the exits that have not been dealt with into events, in order of time."""
        ended = [slot for slot in slots if slot.child is not None and slot.child.exit is not None]
        for slot in sorted(ended, key=_exit_time_s):
            self._ready.append(self._judge(slot))

    def _restart_due(self) -> None:
        now_s = time.monotonic()
        for slot in self._slots.values():
            if slot.due_s is None or slot.due_s > now_s:
                continue
            slot.due_s = None
            slot.restarts += 1
            slot.recent_s.append(now_s)
            try:
                slot.child = self._launch(slot.spec)
            except ChildFailed as error:
                failure = Failure(self._host, slot.spec.name, time.time(), message=str(error))
                self._ready.append(self._after_failure(slot, failure, None, None))
            else:
                slot.state = ChildState.RUNNING
                self._ready.append(ChildRestarted(slot.spec.name, slot.child.pid, slot.restarts))

    def _cancel_restarts(self, slots: Iterable[_Slot]) -> list[ChildEnded]:
        results = []
        for slot in slots:
            if slot.state is ChildState.WAITING:
                slot.due_s = None
                slot.state = ChildState.STOPPED
                code, signum = (slot.last.exit_code, slot.last.signal) if slot.last else (None, None)
                results.append(ChildEnded(slot.spec.name, code, signum, None, final=True, stopped=True))
        return results

    def _end(self, slots: list[_Slot], grace_s: float) -> list[ChildEnded]:
        living = [slot for slot in slots if slot.child is not None]
        results: list[ChildEnded] = []
        killed = False
        asked_s = time.monotonic()
        deadline_s = asked_s + grace_s
        if grace_s > 0:
            _signal_all(living, kill=False)
        while living:
            for slot in sorted((slot for slot in living if slot.child and slot.child.exit), key=_exit_time_s):
                results.append(self._judge(slot, restart=False))
                living.remove(slot)
            left_s = (deadline_s if killed else min(deadline_s, self._kill_at_s)) - time.monotonic()
            if not living:
                break
            if not killed and left_s <= 0:
                if grace_s > 0:
                    names = ", ".join(slot.spec.name for slot in living)
                    waited_s = time.monotonic() - asked_s
                    self._sink(f"{names}: not ended {waited_s:.1f} s after SIGTERM, sending SIGKILL")
                _signal_all(living, kill=True)
                killed, left_s = True, _KILL_WAIT_S
                deadline_s = time.monotonic() + left_s
            elif left_s <= 0:
                pids = ", ".join(repr(slot.child) for slot in living)
                self._sink(f"not ended {_KILL_WAIT_S:.0f} s after SIGKILL, given up: {pids}; stuck in the kernel")
                break
            try:
                item = self._queue.get(timeout=left_s)
            except Empty:
                continue
            if item is not _WAKE:
                self._ready.append(item)
        return results

    def _judge(self, slot: _Slot, restart: bool = True) -> ChildEnded:
        """Take the exit of a slot's child: well, stopped, or failed; and if failed, whether it starts again."""
        child = slot.child
        end = None if child is None else child.exit
        if child is None or end is None:
            raise RuntimeError(f"{slot.spec.name} has not ended")
        slot.last, slot.child = end, None
        self._meter.finish(child)
        failure = self._failure_of(child, end)
        if failure is not None:
            return self._after_failure(slot, failure, end.exit_code, end.signal, restart and not end.sent)
        slot.state = ChildState.STOPPED if end.stopped else ChildState.SUCCEEDED
        return ChildEnded(slot.spec.name, end.exit_code, end.signal, None, final=True, stopped=end.stopped)

    def _failure_of(self, child: Child, end: ChildExit) -> Failure | None:
        if end.exit_code == 0 and (end.stopped or end.sent or not child.spec.endless):
            return None
        asked_s = min(end.sent.values(), default=None)
        error = read_error(child.spec.error_path)
        if error is not None and (asked_s is None or error.time_s < asked_s):
            # It raised before anybody asked it to stop.
            return replace(
                error,
                host=error.host or self._host,
                process=child.spec.name,
                exit_code=end.exit_code,
                signal=None if end.signal in end.sent else end.signal,
                last_lines=child.last_lines(),
            )
        if end.stopped:
            return None
        return Failure(
            host=self._host,
            process=child.spec.name,
            time_s=end.time_s,
            exit_code=end.exit_code,
            signal=end.signal,
            message=_BY_ITSELF if end.exit_code == 0 else None,
            last_lines=child.last_lines(),
            # Not able to end well when told to is at most a consequence; a signal from elsewhere is not.
            secondary=asked_s is not None and end.signal is None,
        )

    def _after_failure(
        self, slot: _Slot, failure: Failure, exit_code: int | None, signal: str | None, restart: bool = True
    ) -> ChildEnded:
        policy, name = slot.spec.restarts, slot.spec.name
        now_s = time.monotonic()
        while slot.recent_s and now_s - slot.recent_s[0] > policy.window_s:
            slot.recent_s.popleft()
        left = policy.attempts - len(slot.recent_s)
        if restart and left > 0 and self._phase is None:
            delay_s = policy.delay_s(len(slot.recent_s))
            slot.state, slot.due_s = ChildState.WAITING, now_s + delay_s
            self._sink(
                f"{slot.spec.prefix}{failure.describe()}; starting it again in {delay_s:.1f} s "
                f"({left - 1} of {policy.attempts} restarts left within {policy.window_s:.0f} s)"
            )
            return ChildEnded(
                name, exit_code, signal, failure, final=False, attempts_left=left - 1, restart_in_s=delay_s
            )
        slot.state = ChildState.FAILED
        self._failures.append((slot.spec.critical, failure))
        if restart and policy.attempts and self._phase is None:
            self._sink(f"{slot.spec.prefix}{failure.describe()}; no restart left within {policy.window_s:.0f} s")
        return ChildEnded(name, exit_code, signal, failure, final=True)


def _exit_time_s(slot: _Slot) -> float:
    return slot.child.exit.time_s if slot.child is not None and slot.child.exit is not None else 0.0


def _signal_all(slots: Iterable[_Slot], kill: bool) -> None:
    for slot in slots:
        if slot.child is not None:
            if kill:
                slot.child.kill()
            else:
                slot.child.terminate()
