"""mpirun's process on a host, when the launcher that it started has failed: it ends by itself, or is ended."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.process.starter import end_starter

LAUNCHER = "from hetero.process.starter import end_starter; print(end_starter({}), flush=True)"
Start = Callable[[float, str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a shell that is called mpirun, runs a launcher that fails, and then does something else."""
    shell = shutil.copy(Path("/bin/sh").resolve(), tmp_path / "mpirun")
    started = []

    def start_one(within_s: float, then: str) -> subprocess.Popen[str]:
        script = f'"$0" -c "$1"; {then}'
        argv = [str(shell), "-c", script, sys.executable, LAUNCHER.format(within_s)]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_mpirun_that_waits_for_a_host_that_is_gone_is_killed(start: Start) -> None:
    began_s = time.monotonic()
    starter = start(0.5, "while :; do read _ </dev/zero; done")  # no child that would outlive it
    assert starter.stdout.readline() == "True\n"
    assert starter.wait(10) == -signal.SIGKILL
    assert time.monotonic() - began_s >= 0.5


def test_mpirun_that_ends_by_itself_is_left_alone_and_nothing_stays(start: Start) -> None:
    starter = start(60.0, "exit 7")
    assert starter.stdout.readline() == "True\n"
    assert starter.wait(10) == 7  # the fixture for all tests sees that the waiting process has gone too


def test_without_mpirun_nothing_is_started() -> None:
    assert end_starter(0.1) is False
