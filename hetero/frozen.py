"""Services that are there but do nothing: stopped by a signal, stuck in the kernel, deadlocked.

Their pids live, so the supervisor sees nothing wrong, and their peers would wait for ever. A service touches its pulse
file once a second; one that has not for too long is killed, and then replaced like any other that died. A rank has no
pulse, since a step may take any time; but one that a signal has stopped for so long is killed too, and ends the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from hetero.process.group import ChildStatus

LEAST_SILENCE_S = 10.0
_LONGEST_STEP_S = 2.0


class FrozenServices:
    """Kill services that show no pulse. Driven by the launcher's loop, about once a second.

    Args:
        pulses: The pulse file of each service.
        silence_s: Time without a pulse after which a service is killed, seconds; at least `LEAST_SILENCE_S`.
        note: Called with the name of a process without a pulse, before it is killed because it was stopped, and why.
    """

    def __init__(
        self, pulses: Mapping[str, Path], silence_s: float, note: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self._note = note
        self._pulses, self._silence_s = pulses, max(silence_s, LEAST_SILENCE_S)
        self._last: dict[str, float] = {}
        self._silent_s: dict[str, float] = {}
        self._checked_s = time.monotonic()

    def check(self, children: Iterable[ChildStatus]) -> None:
        """Look at every service that runs and has shown a pulse in its present life."""
        now_s = time.monotonic()
        if now_s - self._checked_s < 1.0:
            return
        # A launcher that was held up itself, like a machine that slept, saw none of the pulses in between.
        step_s = min(now_s - self._checked_s, _LONGEST_STEP_S)
        self._checked_s = now_s
        children = tuple(children)
        for child in children:
            pulse_s = self._pulse_of(child)
            stopped = child.name not in self._pulses and _is_stopped(child.pid)
            if not stopped and (pulse_s is None or pulse_s != self._last.get(child.name)):
                self._silent_s[child.name] = 0.0
            else:
                self._silent_s[child.name] = self._silent_s.get(child.name, 0.0) + step_s
            if pulse_s is not None:
                self._last[child.name] = pulse_s
            if self._silent_s[child.name] > self._silence_s:
                self._silent_s[child.name] = 0.0
                if stopped:
                    self._note(child.name, f"was stopped by a signal (SIGSTOP) for {self._silence_s:g} s, and killed")
                self.kill(child.name, children)

    def kill(self, name: str, children: Iterable[ChildStatus], *, at_least_s: float = 0.0) -> None:
        """SIGKILL a service, which counts as its failure: the restart policy applies.

        Args:
            name: The service.
            children: What the supervisor knows now.
            at_least_s: Spare one that runs for less than this: it may only just be coming up.
        """
        for child in children:
            if child.name == name and child.pid is not None and child.uptime_s >= at_least_s:
                print(f"{name} (pid {child.pid}) is there but does not answer: killing it", flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _pulse_of(self, child: ChildStatus) -> float | None:
        """Return when a child last showed a pulse, None if it did not in its present life."""
        path = self._pulses.get(child.name)
        if path is None or child.pid is None:
            return None
        try:
            pulse_s = path.stat().st_mtime
        except OSError:
            return None
        return pulse_s if pulse_s > time.time() - child.uptime_s else None


def _is_stopped(pid: int | None) -> bool:
    """Return whether a signal has stopped a process; a debugger that looks at it is something else."""
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
