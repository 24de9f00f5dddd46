"""Fixtures for tests with real child processes; every test must leave none behind."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_probe import Lines, MakeSpec, wait_until

from hetero.process import ChildSpec
from hetero.spec import NEVER, RestartPolicy


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def python(tmp_path: Path) -> MakeSpec:
    """Blueprint of a `python -c` child that can import this package."""

    def make(
        code: str, name: str = "child", restarts: RestartPolicy = NEVER, critical: bool = True, **env: str
    ) -> ChildSpec:
        root = str(Path(__file__).parents[3])
        return ChildSpec(
            name=name,
            argv=(sys.executable, "-c", code),
            env={**os.environ, "PYTHONPATH": root, **env},
            log_path=tmp_path / "logs" / f"{name}.log",
            prefix=f"[{name}] ",
            restarts=restarts,
            error_path=tmp_path / f"{name}.error.json",
            critical=critical,
        )

    return make


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    fds, threads = open_files(), set(threading.enumerate())
    yield
    wait_until(
        lambda: not psutil.Process().children(recursive=True),
        f"no child process: {[child.cmdline() for child in psutil.Process().children(recursive=True)]}",
    )
    wait_until(lambda: set(threading.enumerate()) <= threads, f"no thread: {threading.enumerate()}")
    wait_until(lambda: open_files() <= fds, "no file left open")
