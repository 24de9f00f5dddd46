"""How many CPUs this process may use: those it may run on, and what its control groups leave it of them.

A container on a machine with 96 CPUs sees all of them; what it may use is a quota of its control group. See the
kernel's documentation, cgroup-v1/cpusets.rst and sched-bwc.rst, and cgroup-v2.rst, "cpu.max".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc/self")


class _Mount(NamedTuple):
    """A mounted hierarchy of control groups: which group is seen as its root, and where."""

    root: PurePosixPath
    point: Path
    version: int


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
    cpus = len(pinned) if pinned else _allowed()
    return float(min([cpus, *_quotas(proc)]))


def is_bounded(cpus: float, pinned: Collection[int] | None = None) -> bool:
    """Return whether so many CPUs are a quota: a host's own part of a machine, whatever others do on it.

    Args:
        cpus: What `cpu_quota` returned.
        pinned: What it was given.
    """
    return cpus < (len(pinned) if pinned else _allowed())


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(proc: Path) -> Iterator[float]:
    """Yield the CPUs that each group above the process may use, where that is bounded."""
    try:
        groups = _groups((proc / "cgroup").read_text(encoding="utf-8", errors="surrogateescape"))
        mounts = _mounts((proc / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:  # no control groups here
        return
    for mount in mounts:
        group = groups.get(mount.version)
        if group is None:
            continue
        # A container without a namespace of its own is told the path on its host, and sees its group as the root.
        below = group.relative_to(mount.root) if group.is_relative_to(mount.root) else PurePosixPath()
        for path in (below, *below.parents):
            quota = _quota(mount.point / path, mount.version)
            if quota is not None:
                yield quota


def _groups(text: str) -> dict[int, PurePosixPath]:
    """Return the process's group by version, from `/proc/<pid>/cgroup`: lines `id:controllers:path`."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[2] = PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            found[1] = PurePosixPath(path)
    return found


def _mounts(text: str) -> list[_Mount]:
    """Return where groups with a CPU quota are mounted, from `/proc/<pid>/mountinfo` (man 5 proc)."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), after.split() or [""]
        if len(fields) < 5:
            continue
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "cpu" in rest[-1].split(",") else 0
        if version:
            found.append(_Mount(PurePosixPath(fields[3]), Path(fields[4]), version))
    return found


def _quota(group: Path, version: int) -> float | None:
    """Return the CPUs that one group may use, None if it is not bounded."""
    try:
        if version == 2:
            quota, _, period = (group / "cpu.max").read_text(encoding="ascii").strip().partition(" ")
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        cpus = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file in the root group; "max"
        return None
    return cpus if cpus > 0 else None
