"""How a child process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    head = "import atexit, sys, time; from hetero.children import leave; "
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
