"""Launchers that are started, stopped and treated as they should not be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from local_job import REPOSITORY, LocalJob, wait_until

from hetero.control.config import CoordinatorConfig
from hetero.rundir import RunDir

NUMBERS = f"{REPOSITORY / 'tests' / 'e2e' / 'jobs' / 'numbers.py'}:job"
ROWS = dict.fromkeys(range(400), 1)  # what that job makes


def numbers(folder: Path, *options: str) -> LocalJob:
    return LocalJob(folder, 1, 1, ["--lease-s=3", "--workers-per-host=1", "--remainder=pad", *options], job=NUMBERS)


DEAF = """
import asyncio, sys
from hetero.control.coordinator import Coordinator, CoordinatorConfig

class Deaf(Coordinator):
    async def _register(self, request, context):
        await asyncio.sleep(3600)

async def main():
    coordinator = Deaf(CoordinatorConfig.from_json(sys.argv[1]))
    await coordinator.start()
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
"""A coordinator that answers everybody but a launcher that registers."""


def stop(pid: int) -> psutil.Process:
    """Stop a process by a signal, make sure that it is, and return it."""
    victim = psutil.Process(pid)
    victim.send_signal(signal.SIGSTOP)
    wait_until("the stop", lambda: victim.status() == psutil.STATUS_STOPPED, 10)
    return victim


@pytest.mark.slow
def test_a_second_launcher_of_a_trainer_host_is_refused_and_costs_no_row(tmp_path: Path) -> None:
    with numbers(tmp_path, "--step_s=0.1") as job:
        job.start().wait_for_steps(2)
        (first,) = [launcher for host, launcher in job.launchers.items() if host == "trainer-1"]
        second = job.start("trainer-1", options=(f"--run-dir={tmp_path / 'other'}",)).launchers["trainer-1"]
        assert second.wait(30) == 2
        assert "another launcher plays host 'trainer-1' already" in job.output("trainer-1")
        job.launchers["trainer-1"] = first
        assert job.wait() == {"data-1": 0, "trainer-1": 0}, job.outputs()
        assert job.rows(0, ranks=1) == ROWS
        assert not (tmp_path / "other" / "seen-0.jsonl").exists()


@pytest.mark.slow
def test_a_rank_that_a_signal_has_stopped_for_good_ends_the_job(tmp_path: Path) -> None:
    with numbers(tmp_path, "--step_s=0.1") as job:
        job.start().wait_for_steps(3)
        stop(job.pid("trainer-1", "rank-0"))
        assert job.wait(40) == {"data-1": 0, "trainer-1": 1}, job.outputs()
        assert "rank-0 on trainer-1 was stopped by a signal (SIGSTOP) for 10 s" in job.failure()["message"]


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_a_moment_goes_on(tmp_path: Path) -> None:
    with numbers(tmp_path, "--step_s=0.1") as job:
        job.start().wait_for_steps(3)
        victim = stop(job.pid("trainer-1", "rank-0"))
        stopped_s = time.monotonic()
        wait_until("a lease", lambda: time.monotonic() - stopped_s > 4, 10)
        victim.send_signal(signal.SIGCONT)
        assert job.wait() == {"data-1": 0, "trainer-1": 0}, job.outputs()
        assert job.rows(0, ranks=1) == ROWS


@pytest.mark.slow
def test_a_launcher_that_stood_still_for_longer_than_a_lease_ends_after_all(tmp_path: Path) -> None:
    with numbers(tmp_path, "--step_s=0.1", "--epochs=5") as job:
        job.start().wait_for_steps(3)
        frozen = stop(job.launchers["trainer-1"].pid)
        wait_until("the end of the data host", lambda: job.launchers["data-1"].poll() is not None, 30)
        stopped_s = time.monotonic()
        wait_until("more than a moment", lambda: time.monotonic() - stopped_s > 3, 10)
        frozen.send_signal(signal.SIGCONT)
        codes = job.wait(40)
        assert codes["data-1"] == 5, job.outputs()
        assert codes["trainer-1"] in (4, 5), job.outputs()  # by then there is no coordinator to ask any more


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stdin", "stderr"])
def test_a_job_trains_though_a_standard_stream_is_closed(tmp_path: Path, stream: str) -> None:
    number = {"stdin": 0, "stdout": 1, "stderr": 2}[stream]
    argv = [sys.executable, "-m", "hetero", "run", f"--job={NUMBERS}", f"--run-dir={tmp_path / 'run'}"]
    script = f'exec "$@" {number}>&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *argv, "--workers-per-host=1"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_signal_that_comes_while_a_launcher_is_being_imported_has_its_code(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "launcher.py", tmp_path)
    (tmp_path / "hetero").mkdir()
    (tmp_path / "hetero" / "__init__.py").touch()
    (tmp_path / "hetero" / "launcher.py").write_text("import os, time; os.kill(os.getpid(), 15); time.sleep(60)")
    argv = [sys.executable, "launcher.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["grpc", "tf_data"])
def test_a_host_whose_services_knew_the_coordinator_does_not_wait_for_it_as_if_it_had_yet_to_come(
    tmp_path: Path, engine: str
) -> None:
    """Services can find it before their launcher does; if it is lost in between, so is the host's part."""
    job = LocalJob(tmp_path, 2, 1, ["--lease-s=3", "--workers-per-host=1", f"--engine={engine}"])
    config = CoordinatorConfig(
        port=job.cluster.control_port,
        data=("data-1", "data-2"),
        trainers=("trainer-1",),
        journal=tmp_path / "journal.json",
        run_id="run-1",
        lease_s=3.0,
        start_timeout_s=600.0,
    )
    argv = [sys.executable, "-c", DEAF, config.to_json()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as coordinator, job:
        try:
            assert coordinator.stdout is not None
            assert coordinator.stdout.readline() == "ready\n"
            job.start("data-2")
            met = RunDir(job.run_dir).met("data-2")
            wait_until("that a service has found the coordinator", met.exists)
            assert job.launchers["data-2"].poll() is None
        finally:
            coordinator.kill()
        killed_s = time.monotonic()
        assert job.wait(60) == {"data-2": 4}, job.outputs()
        assert job.ended_s["data-2"] - killed_s < 3 + 10
        assert "has not answered for 3 s: the first data host (data-1) is lost" in job.failure()["message"]
