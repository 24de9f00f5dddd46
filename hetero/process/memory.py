"""How much memory is left, and what a process takes of it; as control groups and the kernel tell."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")  # a container sees its own group here
_FILES = (  # limit, use, statistics, what in these can be had back at once
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_bytes(meminfo: Path = _MEMINFO, groups: Path = _GROUPS) -> int | None:
    """Return how much more this host's processes can take before something has to go; None if nobody tells.

    Args:
        meminfo: What the kernel says of the machine.
        groups: Where the host's control group is mounted.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = meminfo.read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    for limit, use, statistics, reclaimable in _FILES:
        with contextlib.suppress(OSError, ValueError):  # no such group; "max"
            left = int((groups / limit).read_text(encoding="ascii")) - int((groups / use).read_text(encoding="ascii"))
            lines = (groups / statistics).read_text(encoding="ascii").splitlines()
            found.append(left + sum(int(line.split()[1]) for line in lines if line.startswith(f"{reclaimable} ")))
    return min(found, default=None)


def resident_bytes(pid: int) -> int | None:
    """Return the memory that a process has in use, what it shares with others included; None if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
