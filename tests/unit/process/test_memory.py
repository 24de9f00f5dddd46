"""Memory that is left, from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero.process.memory import available_bytes, resident_bytes

MEMINFO = "MemTotal:       24000 kB\nMemFree:         100 kB\nMemAvailable:   8000 kB\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_a_group_it_is_what_the_machine_has(tmp_path: Path) -> None:
    meminfo = write(tmp_path / "meminfo", MEMINFO)
    assert available_bytes(meminfo, tmp_path / "none") == 8000 * 1024
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
    assert available_bytes(write(tmp_path / "other", "nonsense\n"), tmp_path) is None


@pytest.mark.parametrize(
    ("limit", "use", "statistics", "reclaimable"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
)
def test_a_groups_limit_counts_and_files_that_it_can_let_go(
    tmp_path: Path, limit: str, use: str, statistics: str, reclaimable: str
) -> None:
    meminfo = write(tmp_path / "meminfo", MEMINFO)
    write(tmp_path / limit, "1000000\n")
    write(tmp_path / use, "900000\n")
    write(tmp_path / statistics, f"active_file 5\n{reclaimable} 50000\n")
    assert available_bytes(meminfo, tmp_path) == 150000
    write(tmp_path / limit, "max\n")
    assert available_bytes(meminfo, tmp_path) == 8000 * 1024


def test_a_process_has_memory_as_long_as_it_is_there() -> None:
    assert (resident_bytes(os.getpid()) or 0) > 2**20
    assert resident_bytes(2**30) is None
