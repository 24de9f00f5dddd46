"""CPU seconds of children and their descendants, cheap enough to be asked once a second.

Each child costs one read of `/proc/<pid>/stat`, which has its own time and that of the descendants it has waited for.
Living descendants are looked up by a walk over /proc, repeated at most every 5 s and less often where it is slow.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCAN_INTERVAL_S = 5.0
_SCAN_SHARE = 0.002  # of a CPU


class Stat(NamedTuple):
    """What we need of `/proc/<pid>/stat` (man 5 proc)."""

    ppid: int
    session: int
    cpu_s: float  # own and that of waited-for children, user and system
    start_ticks: int  # tells a process from a later one with the same pid


class Metered(Protocol):
    """A child as the meter sees it."""

    pid: int

    def reaped_cpu_s(self) -> float | None:
        """Return the final CPU seconds; None as long as the pid is the child's."""
        ...


def read_stat(pid: int) -> Stat | None:
    """Return the figures of a process, None if it is gone."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(fd, 4096)
    except OSError:
        return None
    finally:
        os.close(fd)
    fields = data[data.rfind(b")") + 2 :].split()  # the name before it may have spaces; fields[0] is field 3
    if len(fields) < 20:
        return None
    ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    return Stat(int(fields[1]), int(fields[3]), ticks / _TICKS_PER_S, int(fields[19]))


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def idle_cpu_s(stat: str = "/proc/stat") -> float | None:
    """Return the seconds in which the CPUs that this process may run on had nothing to do, since the machine's start.

    Returns:
        The sum over those CPUs, waiting for disks included; None where the system does not tell.
    """
    try:
        with open(stat, encoding="ascii") as file:  # noqa: PTH123 (read once a second, by its name)
            lines = [line.split() for line in file if line.startswith("cpu")]
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = [list(map(int, fields[1:])) for fields in lines if fields[0] in allowed]
    except (OSError, ValueError, AttributeError):
        return None
    # man 5 proc: user nice system idle iowait ...; all zeros where a sandbox only pretends to have the file
    return sum(one[3] + one[4] for one in ticks) / _TICKS_PER_S if any(map(any, ticks)) else None


class CpuMeter:
    """Add up CPU seconds. Thread-safe; the sum never falls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished_s = 0.0
        self._seen_s: dict[int, float] = {}  # by id of the child object: pids may come again
        self._descendants: dict[int, dict[int, int]] = {}  # pid of a child -> pid -> start_ticks
        self._next_scan_s = 0.0

    def read(self, children: Iterable[Metered]) -> float:
        """Return the CPU seconds of `children` and all finished ones."""
        with self._lock:
            children = list(children)
            self._scan_if_due({child.pid for child in children})
            for child in children:
                self._seen_s[id(child)] = self._of(child)
            return self._finished_s + sum(self._seen_s.values())

    def finish(self, child: Metered) -> None:
        """Keep the sum of a child that has been reaped; it must not be among `read`'s children any more."""
        with self._lock:
            self._finished_s += self._of(child)
            self._seen_s.pop(id(child), None)
            self._descendants.pop(child.pid, None)

    def _of(self, child: Metered) -> float:
        seen_s = self._seen_s.get(id(child), 0.0)
        stat = read_stat(child.pid)
        # Asked after reading: if the child is still not reaped, what was read is its own.
        final_s = child.reaped_cpu_s()
        if final_s is not None:
            # Descendants that died with the child were waited for by nobody: what was seen of them counts.
            return max(seen_s, final_s)
        if stat is None:
            return seen_s
        total_s = stat.cpu_s
        for pid, start_ticks in list(self._descendants.get(child.pid, {}).items()):
            below = read_stat(pid)
            if below is None or below.start_ticks != start_ticks:
                del self._descendants[child.pid][pid]
            else:
                total_s += below.cpu_s
        return max(seen_s, total_s)

    def _scan_if_due(self, leaders: set[int]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_scan_s or not leaders:
            return
        self._descendants = find_descendants(leaders)
        took_s = time.monotonic() - now_s
        self._next_scan_s = now_s + max(_SCAN_INTERVAL_S, took_s / _SCAN_SHARE)


def find_descendants(leaders: set[int]) -> dict[int, dict[int, int]]:
    """Return for each session leader the processes below it or in its session: pid -> start_ticks."""
    try:
        stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (strings are what is wanted)
    except OSError:
        return {}
    found: dict[int, dict[int, int]] = {leader: {} for leader in leaders}
    for pid, stat in stats.items():
        if stat is None or pid in leaders:
            continue
        leader: int | None = stat.session if stat.session in leaders else None
        above, hops = stat.ppid, 0
        while leader is None and above > 1 and hops < 64:
            if above in leaders:
                leader = above
            parent = stats.get(above)
            above, hops = (parent.ppid if parent is not None else 0), hops + 1
        if leader is not None:
            found[leader][pid] = stat.start_ticks
    return found
