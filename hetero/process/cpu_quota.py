"""How many CPUs this process may use: those it may run on, and what its control groups leave it of them.

A container on a machine with 96 CPUs sees all of them; what it may use is a quota of its control group. See the
kernel's documentation, cgroup-v1/cpusets.rst and sched-bwc.rst, and cgroup-v2.rst, "cpu.max".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc/self")


class QuotaFigures(NamedTuple):
    """What a group with a quota has come to so far.

    Attributes:
        periods: How many of its periods have begun in which it wanted a CPU.
        throttled_periods: In how many of them it was kept from running.
        throttled_s: Seconds in which it was kept from running, summed over CPUs.
        used_s: CPU seconds of all its processes; None where the system does not tell.
    """

    periods: int
    throttled_periods: int
    throttled_s: float
    used_s: float | None


@dataclass(frozen=True)
class CpuQuota:
    """A control group's quota: in each period it gets so much CPU time, and then none until the next one begins.

    Attributes:
        cpus: CPU time in a period, in periods; CPUs that it can keep busy.
        period_s: Length of a period, seconds.
        group: The group's folder.
        version: Of control groups, 1 or 2.
        usage: File with the group's CPU time; None where there is none (version 2 tells it with the rest).
    """

    cpus: float
    period_s: float
    group: Path
    version: int
    usage: Path | None = None

    def open(self) -> QuotaFile:
        """Return what reads the group's figures; to be closed.

        Raises:
            OSError: The group has none that may be read.
        """
        return QuotaFile(self)

    def read(self) -> QuotaFigures | None:
        """Return the group's figures once, None if they cannot be read."""
        try:
            with contextlib.closing(self.open()) as file:
                return file.read()
        except OSError:
            return None


class QuotaFile:
    """Reads a group's figures from files that stay open, since that may be done many times a second."""

    def __init__(self, quota: CpuQuota) -> None:
        self._version = quota.version
        self._fds = [os.open(quota.group / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC)]
        if quota.version == 1 and quota.usage is not None:
            with contextlib.suppress(OSError):
                self._fds.append(os.open(quota.usage, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the files. May be repeated."""
        while self._fds:
            os.close(self._fds.pop())

    def read(self) -> QuotaFigures | None:
        """Return the figures, None if they cannot be read any more."""
        try:
            texts = [os.pread(fd, 4096, 0) for fd in self._fds]
            words = texts[0].split()
            found = dict(zip(words[::2], words[1::2], strict=True))
            throttled_s = (
                int(found[b"throttled_usec"]) / 1e6 if self._version == 2 else int(found[b"throttled_time"]) / 1e9
            )
            used_s = int(found[b"usage_usec"]) / 1e6 if self._version == 2 else None
            if len(texts) > 1:
                used_s = int(texts[1]) / 1e9
            return QuotaFigures(int(found[b"nr_periods"]), int(found[b"nr_throttled"]), throttled_s, used_s)
        except (OSError, ValueError, KeyError, IndexError):
            return None


class _Mount(NamedTuple):
    """A mounted hierarchy of control groups: which group is its root, where it is, and its controllers if version 1."""

    root: PurePosixPath
    point: Path
    version: int
    controllers: frozenset[str]


def available_cpus(pinned: Collection[int] | None = None, *, proc: Path = _PROC) -> int:
    """Return how many CPUs this process and its children can keep busy all the time, at least 1.

    Args:
        pinned: The CPUs that they are going to be kept to; None: those that this process may run on now.
        proc: The process's folder in /proc.

    Returns:
        What `cpu_quota` returns, rounded down.
    """
    return max(1, int(cpu_quota(pinned, proc=proc)))


def cpu_quota(pinned: Collection[int] | None = None, *, proc: Path = _PROC) -> float:
    """Return the CPU seconds that this process and its children can use in a second.

    Args:
        pinned: The CPUs that they are going to be kept to; None: those that this process may run on now.
        proc: The process's folder in /proc.

    Returns:
        The number of CPUs, or the quota of a control group above the process if that is less; above 0, and a fraction
        where a container has a part of a CPU.
    """
    return min([float(_allowed(pinned)), *(quota.cpus for quota in _quotas(proc))])


def tightest_quota(pinned: Collection[int] | None = None, *, proc: Path = _PROC) -> CpuQuota | None:
    """Return the tightest quota of the control groups above this process.

    Args:
        pinned: As in `available_cpus`.
        proc: As in `available_cpus`.

    Returns:
        The quota; None if there is none, or it leaves all the CPUs that the process may run on.
    """
    quota = min(_quotas(proc), key=lambda found: found.cpus, default=None)
    return quota if quota is not None and quota.cpus < _allowed(pinned) else None


def _allowed(pinned: Collection[int] | None) -> int:
    if pinned:
        return len(pinned)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(proc: Path) -> Iterator[CpuQuota]:
    """Yield the quota of each group above the process that has one."""
    try:
        groups = _groups((proc / "cgroup").read_text(encoding="utf-8", errors="surrogateescape"))
        mounts = _mounts((proc / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:  # no control groups here
        return
    for mount in mounts:
        group = groups.get("" if mount.version == 2 else "cpu")
        if group is None or (mount.version == 1 and "cpu" not in mount.controllers):
            continue
        # A container without a namespace of its own is told the path on its host, and sees its group as the root.
        below = group.relative_to(mount.root) if group.is_relative_to(mount.root) else PurePosixPath()
        # CPU time may be counted in a hierarchy of its own; it is the same group's if it has the same place there.
        counts = [one for one in mounts if "cpuacct" in one.controllers and one.root == mount.root]
        usage = counts[0].point if counts and mount.version == 1 and groups.get("cpuacct") == group else None
        for path in (below, *below.parents):
            quota = _quota(mount.point / path, mount.version)
            if quota is not None:
                file = None if usage is None else usage / path / "cpuacct.usage"
                yield CpuQuota(*quota, mount.point / path, mount.version, file if file and file.exists() else None)


def _groups(text: str) -> dict[str, PurePosixPath]:
    """Return the process's group by controller of version 1, and that of version 2 as "".

    From `/proc/<pid>/cgroup`: lines `id:controllers:path`.
    """
    found: dict[str, PurePosixPath] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controllers:
            found |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    return found


def _mounts(text: str) -> list[_Mount]:
    """Return where groups are mounted, from `/proc/<pid>/mountinfo` (man 5 proc)."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), after.split() or [""]
        if len(fields) < 5 or kind not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(rest[-1].split(",")) if kind == "cgroup" else frozenset[str]()
        found.append(_Mount(PurePosixPath(fields[3]), Path(fields[4]), 2 if kind == "cgroup2" else 1, controllers))
    return found


def _quota(group: Path, version: int) -> tuple[float, float] | None:
    """Return the CPUs that one group may use, and its period in seconds; None if it is not bounded."""
    try:
        if version == 2:
            quota, _, period = (group / "cpu.max").read_text(encoding="ascii").strip().partition(" ")
        else:
            quota, period = (
                (group / "cpu.cfs_quota_us").read_text(encoding="ascii"),
                (group / "cpu.cfs_period_us").read_text(encoding="ascii"),
            )
        cpus = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file in the root group; "max"
        return None
    return (cpus, int(period) / 1e6) if cpus > 0 else None
