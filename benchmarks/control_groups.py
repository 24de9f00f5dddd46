"""Control groups of this machine for benchmarks: CPU quotas, weights, and what the processes in them have used.

Kernel documentation: sched-bwc.rst and cgroup-v1/cpuacct.rst for version 1, cgroup-v2.rst ("cpu") for version 2. Where
both are mounted, the one that has the CPU controller is taken. Groups lie directly below the mount, since a group of
version 2 that has processes can have no children with controllers, and the root is the exception.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from virtual_hosts import BenchmarkFailed

PERIOD_US = 100_000
LEAST_CPUS = 0.01  # the kernel's bound: a quota of 1 ms a period
_PREFIX = "hetero-benchmark"
_REMOVE_S = 10.0
_ENTER = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 125; shift; n=$((n - 1)); done; exec "$@"'
"""A shell's script: it goes into groups, whose number and files come first, and becomes the command that follows."""


@dataclass(frozen=True)
class GroupUsage:
    """What the processes of a group have used since it was made.

    Attributes:
        cpu_s: CPU seconds.
        periods: Periods of 100 ms in which they wanted to run under a quota.
        throttled: Those of them in which the quota was used up.
        throttled_s: How long they were held up by that.
    """

    cpu_s: float
    periods: int
    throttled: int
    throttled_s: float

    def since(self, before: GroupUsage) -> GroupUsage:
        """Return what was used since an earlier look."""
        return GroupUsage(
            self.cpu_s - before.cpu_s,
            self.periods - before.periods,
            self.throttled - before.throttled,
            self.throttled_s - before.throttled_s,
        )


@dataclass(frozen=True)
class Hierarchy:
    """Where groups with a CPU quota are made.

    Attributes:
        version: 1 or 2.
        cpu: Mount of the controller `cpu`.
        accounting: Mount of the controller that counts CPU seconds; under version 2 the same.
    """

    version: int
    cpu: Path
    accounting: Path

    @classmethod
    def find(cls, mountinfo: str | None = None) -> Hierarchy:
        """Return this machine's.

        Args:
            mountinfo: Content of `/proc/self/mountinfo` (man 5 proc); None reads it.

        Raises:
            BenchmarkFailed: There is none.
        """
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
        found: dict[str, Path] = {}
        for line in text.splitlines():
            before, _, after = line.partition(" - ")
            fields, (kind, *rest) = before.split(), after.split() or [""]
            if kind == "cgroup" and rest:
                found.update({name: Path(fields[4]) for name in rest[-1].split(",") if name in ("cpu", "cpuacct")})
            elif kind == "cgroup2":
                found["unified"] = Path(fields[4])
        if {"cpu", "cpuacct"} <= set(found):
            return cls(1, found["cpu"], found["cpuacct"])
        unified = found.get("unified")
        if unified is not None and "cpu" in _words(unified / "cgroup.controllers"):
            return cls(2, unified, unified)
        raise BenchmarkFailed(
            f"CPU quotas need control groups with the controller cpu; mounted are {sorted(found) or 'none'}. "
            "Run this on a Linux machine with /sys/fs/cgroup, in a container with --privileged --cgroupns=host."
        )


class ControlGroup:
    """A group of processes. A context manager: leaving it kills what is still in it, and removes it.

    Args:
        name: Tells it from the other groups of this benchmark.
        hierarchy: Where it is made; None finds it.

    Raises:
        BenchmarkFailed: It cannot be made; the message says what is needed.
    """

    def __init__(self, name: str, hierarchy: Hierarchy | None = None) -> None:
        self._in = hierarchy or Hierarchy.find()
        called = f"{_PREFIX}-{os.getpid()}-{name}"
        self._cpu, self._accounting = self._in.cpu / called, self._in.accounting / called
        self._folders = list(dict.fromkeys([self._cpu, self._accounting]))
        try:
            if self._in.version == 2 and "cpu" not in _words(self._in.cpu / "cgroup.subtree_control"):
                (self._in.cpu / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
            for folder in self._folders:
                folder.mkdir()
        except OSError as error:
            self.remove()
            raise BenchmarkFailed(
                f"Cannot make the control group {self._cpu}: {error.strerror or error}. CPU quotas need root and a "
                "writable /sys/fs/cgroup: run this as root, in a container with --privileged --cgroupns=host."
            ) from error

    def __enter__(self) -> ControlGroup:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that goes into the group, with all that it starts, and then runs another one."""
        files = [str(folder / "cgroup.procs") for folder in self._folders]
        return ["/bin/sh", "-c", _ENTER, "sh", str(len(files)), *files, *arguments]

    def limit(self, cpus: float | None) -> None:
        """Set how many CPUs the group may use in each period of 100 ms; None lifts the quota.

        Raises:
            BenchmarkFailed: It is less than the kernel takes.
        """
        if cpus is not None and cpus < LEAST_CPUS:
            raise BenchmarkFailed(f"a quota of {cpus:g} CPUs is too small; the least is {LEAST_CPUS:g}")
        quota_us = None if cpus is None else round(cpus * PERIOD_US)
        if self._in.version == 2:
            _write(self._cpu / "cpu.max", f"{'max' if quota_us is None else quota_us} {PERIOD_US}")
            return
        _write(self._cpu / "cpu.cfs_period_us", str(PERIOD_US))
        _write(self._cpu / "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))

    def yield_to_others(self) -> None:
        """Give the group the least weight there is, and, where the kernel can, only what others leave idle."""
        name, least = ("cpu.weight", "1") if self._in.version == 2 else ("cpu.shares", "2")
        _write(self._cpu / name, least)
        with contextlib.suppress(OSError):  # Linux 5.15 and later
            (self._cpu / "cpu.idle").write_text("1", encoding="ascii")

    def usage(self) -> GroupUsage:
        """Return what the processes of the group have used so far, those that have ended included."""
        stat = dict(line.split() for line in (self._cpu / "cpu.stat").read_text(encoding="ascii").splitlines())
        if self._in.version == 2:
            cpu_s, held_s = int(stat["usage_usec"]) / 1e6, int(stat["throttled_usec"]) / 1e6
        else:
            cpu_s = int((self._accounting / "cpuacct.usage").read_text(encoding="ascii")) / 1e9
            held_s = int(stat["throttled_time"]) / 1e9
        return GroupUsage(cpu_s, int(stat["nr_periods"]), int(stat["nr_throttled"]), held_s)

    @property
    def pids(self) -> list[int]:
        """The processes that are in it now."""
        return _pids(self._folders)

    def remove(self) -> None:
        """Kill what is in it and remove it. May be repeated.

        Raises:
            BenchmarkFailed: It could not be removed.
        """
        _remove(self._folders)


def remove_stale_groups(hierarchy: Hierarchy) -> list[str]:
    """Remove the groups of benchmarks that were killed, with what is left in them; return their names."""
    names = set()
    for mount in {hierarchy.cpu, hierarchy.accounting}:
        for folder in mount.glob(f"{_PREFIX}-*"):
            found = re.match(rf"{_PREFIX}-(\d+)-", folder.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                names.add(folder.name)
    for name in names:
        _remove(list(dict.fromkeys([hierarchy.cpu / name, hierarchy.accounting / name])))
    return sorted(names)


def _remove(folders: Sequence[Path]) -> None:
    deadline_s = time.monotonic() + _REMOVE_S
    left = [folder for folder in folders if folder.exists()]
    while left:
        for pid in _pids(left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in left:
            with contextlib.suppress(OSError):  # a process that is about to end is still counted
                folder.rmdir()
        left = [folder for folder in left if folder.exists()]
        if left and time.monotonic() > deadline_s:
            raise BenchmarkFailed(f"cannot remove {left[0]} within {_REMOVE_S:g} s; in it are {_pids(left)}")
        time.sleep(0.02 if left else 0)


def _pids(folders: Sequence[Path]) -> list[int]:
    found: set[int] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found.update(map(int, (folder / "cgroup.procs").read_text(encoding="ascii").split()))
    return sorted(found)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value, encoding="ascii")
    except OSError as error:
        raise BenchmarkFailed(f"cannot write {value!r} to {path}: {error.strerror or error}") from error
