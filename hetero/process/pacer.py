"""Keeps local workers within what a CPU quota leaves, or a cap: a thread that pauses them and lets them go on.

What they use is read from the kernel's CPU clocks a few times in each period, and decided in `hetero.process.pace`. A
paused worker is stopped (SIGSTOP, with the rest of its group) for less than a period, so that its peers do not notice.
Its `Child` ends the pause when it is told to end; otherwise this thread does, also when it ends itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

from hetero.process.child import Child, clock_of
from hetero.process.cpu import find_descendants
from hetero.process.cpu_quota import CpuQuota, QuotaFigures, QuotaFile
from hetero.process.pace import Look, Pace

_PERIOD_S = 0.1  # without a quota
_IDLE_S = 0.2  # between two looks while there are no workers
_SCAN_S, _SCAN_SHARE = 5.0, 0.001  # descendants are looked for so often, and for so much of a CPU
_NOTHING = QuotaFigures(0, 0, 0.0, None)


class Pacer:
    """Pace workers. `start` starts a daemon thread, `close` ends it and every pause.

    Args:
        children: Returns all children of this launcher; called from the thread.
        is_worker: Says by its name whether a child is a worker to be paced; called from the thread.
        quota: The quota of this host; None: there is none.
        cap_cpus: CPUs that the workers may use together; None: what the quota leaves.
        lanes: CPUs that one worker is likely to use at once.
    """

    def __init__(
        self,
        children: Callable[[], Sequence[Child]],
        is_worker: Callable[[str], bool],
        quota: CpuQuota | None,
        cap_cpus: float | None = None,
        lanes: float = 1.0,
    ) -> None:
        self._children, self._is_worker, self._quota, self._lanes = children, is_worker, quota, lanes
        self._pace = Pace(
            quota_cpus=quota.cpus if quota else math.inf,
            period_s=quota.period_s if quota else _PERIOD_S,
            cap_cpus=math.inf if cap_cpus is None else cap_cpus,
        )
        self._worker_clocks, self._other_clocks = _Clocks(), _Clocks()
        self._below = _Below()
        self._paused: list[Child] = []
        self._end = threading.Event()
        self._started = False
        self._thread = threading.Thread(target=self._run, name="hetero-pacer", daemon=True)

    @property
    def cpus(self) -> float:
        """CPUs that the workers may use now, together."""
        return self._pace.cpus

    @property
    def margin(self) -> float:
        """Part of the quota that is left alone, because the kernel is not exact."""
        return self._pace.margin

    def start(self) -> None:
        """Begin. May be repeated."""
        if not self._started:
            self._started = True
            self._thread.start()

    def close(self) -> None:
        """End. May be repeated."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        again_s, file = 0.0, None
        if self._quota is not None:
            with contextlib.suppress(OSError):  # without its figures the children's clocks have to do
                file = self._quota.open()
        try:
            while not self._end.wait(again_s):
                again_s = self._look(file)
        finally:
            self._resume()
            if file is not None:
                file.close()

    def _look(self, file: QuotaFile | None) -> float:
        """Look once, do what follows, and return when to look again, seconds from now."""
        children = self._children()
        workers = [child for child in children if self._is_worker(child.spec.name)]
        if not workers:
            self._paused.clear()
            return _IDLE_S
        figures = (file.read() if file else None) or _NOTHING
        below = self._below.look(children)
        worker_s = self._worker_clocks.read(workers, below)
        used_s = figures.used_s
        if used_s is None:
            others = [child for child in children if child not in workers]
            used_s = worker_s + self._other_clocks.read(others, below) + time.process_time()
        now = Look(time.monotonic(), used_s, worker_s, figures.periods, figures.throttled_s)
        verdict = self._pace.look(now, burst_cpus=min(len(workers) * self._lanes, os.cpu_count() or 1))
        if verdict.run:
            self._resume()
        else:
            self._pause(workers)
        return verdict.again_in_s

    def _pause(self, workers: Sequence[Child]) -> None:
        # One that was started anew since the last look is another child.
        self._paused = [child for child in workers if child in self._paused or child.pause()]

    def _resume(self) -> None:
        for child in self._paused:
            child.resume()
        self._paused.clear()


class _Below:
    """The descendants of children, looked for now and then."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, int]] = {}
        self._due_s = 0.0

    def look(self, children: Sequence[Child]) -> dict[int, dict[int, int]]:
        """Return for the pid of each child the processes below it: pid -> start_ticks."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._found = find_descendants({child.pid for child in children})
            took_s = time.monotonic() - now_s
            self._due_s = now_s + max(_SCAN_S, took_s / _SCAN_SHARE)
        return self._found


class _Clocks:
    """Adds up the CPU time of children and their descendants. The sum never falls."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._seen_s: dict[object, float] = {}

    def read(self, children: Sequence[Child], below: dict[int, dict[int, int]]) -> float:
        """Return the CPU seconds used since the first look at each process."""
        seen_s: dict[object, float] = {}
        for child in children:
            if (used_s := child.clock_s()) is not None:
                seen_s[child] = used_s
            for below_it in below.get(child.pid, {}).items():
                with contextlib.suppress(OSError):  # it has ended
                    seen_s[below_it] = time.clock_gettime(clock_of(below_it[0]))
        for process, used_s in seen_s.items():
            self._sum_s += max(0.0, used_s - self._seen_s.get(process, used_s))
        self._seen_s = seen_s
        return self._sum_s
