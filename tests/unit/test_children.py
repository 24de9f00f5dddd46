"""How a child process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetero.children import lost_workers
from hetero.control.state import HostState, JobState, Phase, ProcessReport


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


@pytest.mark.parametrize(
    ("trainer", "lost"),
    [
        ({}, []),
        ({"workers_gone_for_good": True}, ["t1:6000", "t1:6001"]),
        ({"left": True}, ["t1:6000", "t1:6001"]),
        ({"processes": (ProcessReport("worker-0", 0, "failed"), ProcessReport("worker-1", 9, "running"))}, ["t1:6000"]),
        (
            {"processes": (ProcessReport("worker-0", 0, "waiting"), ProcessReport("worker-1", 0, "stopped"))},
            ["t1:6001"],
        ),
    ],
)
def test_workers_that_are_gone_for_good_are_also_those_of_trainer_hosts(
    trainer: dict[str, object], lost: list[str]
) -> None:
    hosts = (HostState("d1", "data"), HostState("t1", "trainer", **trainer), HostState("t2", "trainer", left=True))
    endpoints = {"worker/d1/worker-0": "d1:6001 2", "dispatcher": "d1:6000", "local/t1": "{}"}
    endpoints |= {f"worker/t1/worker-{index}": f"t1:600{index} 1" for index in range(2)}
    assert lost_workers(JobState(1, 0, "run", 1.0, Phase.TRAINING, hosts=hosts, endpoints=endpoints)) == lost
    assert lost_workers(None) == []
