"""Processes end with their exit code, whatever waits at the end of an interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# As a call of gRPC at the end of an interpreter: its destructor waits for a lock that a stopped thread has.
NEVER_ENDS = """
import threading
class Call:
    def __init__(self): self.lock = threading.Lock(); self.lock.acquire()
    def __del__(self): self.lock.acquire()
call = Call()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    head = "import atexit, sys, time; from hetero.process.leaving import leave; "
    argv = [sys.executable, "-c", head + code]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("code", [0, 3])
def test_exit_handlers_run_and_what_was_printed_arrives(tmp_path: Path, code: int) -> None:
    done = run(
        f"import pathlib; atexit.register(pathlib.Path({str(tmp_path / 'here')!r}).touch); print('last'); leave({code})"
    )
    assert (done.returncode, done.stdout) == (code, "last\n")
    assert (tmp_path / "here").exists()


def test_an_exit_handler_that_hangs_does_not_hold_the_process_and_keeps_its_code() -> None:
    done = run("atexit.register(time.sleep, 1000); print('last'); leave(1)")
    assert (done.returncode, done.stdout) == (1, "last\n")


def test_a_closed_output_does_not_change_the_code() -> None:
    assert run("sys.stdout.close(); leave(4)").returncode == 4


def test_an_object_whose_destructor_waits_does_not_hold_the_process() -> None:
    assert run(f"exec({NEVER_ENDS!r}); leave(3)").returncode == 3


@pytest.mark.parametrize(
    ("module", "function", "arguments", "code"),
    [
        ("hetero.launcher", "launch", ["--job=none.py:job"], 2),
        ("hetero.cli.main", "main", ["--version"], 0),
        ("hetero.cli.main", "main", ["status", "127.0.0.1:1", "--timeout-s=0.2"], 3),
    ],
)
def test_launchers_and_commands_end_that_way(module: str, function: str, arguments: list[str], code: int) -> None:
    done = run(f"exec({NEVER_ENDS!r}); import {module}; sys.argv[1:] = {arguments}; {module}.{function}()")
    assert done.returncode == code, done.stderr
