"""The commands with real clusters: what they print, what they end with, and that nothing outlives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_job import REPOSITORY, ROWS_JOB, LocalJob, wait_until

from hetero.clusters.local import free_port

JOBS = ROWS_JOB.parent
ROWS = f"--job={ROWS_JOB}:job"
ENDLESS = [ROWS, "--epochs=1000", "--step-s=0.02", "--grace-s=2", "--lease-s=3"]
HETERO = [sys.executable, "-m", "hetero"]


def environment(**values: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", **values}


def hetero(*argv: str, timeout_s: float = 90, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HETERO, *argv], capture_output=True, text=True, timeout=timeout_s, check=False, env=environment(**environ)
    )


class Running:
    """`hetero run` of an endless job in mid-training. A context manager: leaving it kills what still runs."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.run_dir, self.port = folder / "run", free_port()
        self._output = folder / "output"
        argv = [*HETERO, "run", *ENDLESS, f"--run-dir={self.run_dir}", f"--control-port={self.port}", *options]
        with self._output.open("w") as output:
            self.command = psutil.Popen(argv, env=environment(), stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self) -> Running:  # noqa: PYI034 - Self needs Python 3.11
        seen = self.run_dir / "seen-0.jsonl"

        def trains() -> bool:
            assert self.command.poll() is None, self.output()
            return seen.exists() and len(seen.read_text().splitlines()) >= 3

        wait_until("the third step", trains)
        self.processes = self.command.children(recursive=True)
        lines = [" ".join(process.cmdline()) for process in self.processes]
        for part in (
            "hetero.launcher",
            "children coordinator",
            "children dispatcher",
            "children worker",
            "children rank",
        ):
            assert any(part in line for line in lines), f"{part} does not run: {lines}"
        return self

    def __exit__(self, *_: object) -> None:
        if self.command.poll() is None:
            self.command.terminate()
            self.command.wait(30)

    def output(self) -> str:
        return self._output.read_text()

    def alive(self) -> list[psutil.Process]:
        """Return what still runs of all that ran in mid-training."""
        return [one for one in self.processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


# run


def test_run_prints_the_summary_as_json_and_nothing_else(tmp_path: Path) -> None:
    done = hetero("run", ROWS, "--json", f"--run-dir={tmp_path}/run", "--", "--rows=20", "--pieces=4")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert (values["exit_code"], values["failure"], values["run_dir"]) == (0, None, f"{tmp_path}/run")
    summary = values["summary"]
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["engine"], summary["outcome"], summary["rows"]) == ("tf_data", "succeeded", 80)
    assert summary["results"]["steps_seen"] == 10
    again = hetero("run", ROWS, f"--run-dir={tmp_path}/run")
    assert again.returncode == 2
    assert f"{tmp_path}/run already holds a run (summary.json)" in again.stderr
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.slow
def test_an_interrupted_run_tells_its_state_until_then_and_leaves_nothing(tmp_path: Path) -> None:
    with Running(tmp_path, "--token=right") as running:
        done = hetero("status", f"127.0.0.1:{running.port}", "--token=right", "--json")
        assert done.returncode == 0, done.stderr
        state = json.loads(done.stdout)
        assert state["phase"] == "training"
        pids = {process["pid"] for host in state["hosts"] for process in host["processes"]}
        assert pids <= {process.pid for process in running.processes}
        assert len(pids) == 4

        running.command.send_signal(signal.SIGINT)
        assert running.command.wait(20) == 128 + signal.SIGINT, running.output()
        assert running.alive() == []
        assert running.output().endswith("error: stopped by SIGINT\n")
        assert "Traceback" not in running.output()
        assert json.loads((running.run_dir / "summary.json").read_text())["outcome"] == "stopped"


@pytest.mark.slow
def test_of_a_killed_run_no_process_is_left(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        running.command.send_signal(signal.SIGKILL)
        assert running.command.wait(10) == -signal.SIGKILL
        wait_until("the end of all processes", lambda: not running.alive(), 5)


def test_an_input_that_the_engine_cannot_run_is_refused_with_its_name_and_the_engine_that_can(tmp_path: Path) -> None:
    done = hetero("run", f"--job={JOBS}/python_function.py:job", f"--run-dir={tmp_path}/run", "--grace-s=2")
    assert done.returncode == 2, done.stdout + done.stderr
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["exception"], failure["host"], failure["process"]) == ("EngineError", "trainer-1", "rank-0")
    for text in (failure["message"], done.stdout):
        assert "halve_it_in_python" in text
        assert "--engine grpc" in text
    assert "training began" not in done.stdout


@pytest.mark.slow
def test_a_generator_trains_under_the_local_engine_and_reads_the_same_as_a_dataset(tmp_path: Path) -> None:
    argv = (f"--job={JOBS}/generator.py:job", "--data-hosts=0", "--epochs=2", f"--run-dir={tmp_path}/run", "--json")
    done = hetero("run", *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)["summary"]["results"]
    rows = [split * 10 + row for split in range(7) for row in range(5)]
    assert results == {"rows_0": rows[:32], "rows_1": rows[:32]}


def broken_job(folder: Path) -> str:
    """Write a job whose file cannot be imported, so that it fails before anything heavy is loaded."""
    path = folder / "broken.py"
    path.write_text('import hetero\njob = hetero.Job("broken")\nraise ValueError("no such column: " + "x" * 3000)\n')
    return f"--job={path}:job"


def test_a_failed_run_is_written_down_though_nobody_reads_its_output(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [*HETERO, "run", broken_job(tmp_path), "--data-hosts=0", f"--run-dir={tmp_path}/run", "--grace-s=2"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert command.stdout is not None
    command.stdout.close()
    assert command.wait(60) == 1
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["exception"] == "ValueError"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "failed"


def test_on_sagemaker_a_failed_training_is_the_failure_reason(tmp_path: Path) -> None:
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (tmp_path / "ml" / "output").mkdir()
    resources = {"current_host": "localhost", "hosts": ["localhost"], "network_interface_name": "lo"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    argv = [sys.executable, str(REPOSITORY / "launcher.py"), broken_job(tmp_path), f"--control_port={free_port()}"]
    done = subprocess.run(
        [*argv, "--grace_s=2"], env={**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    reason = (tmp_path / "ml" / "output" / "failure").read_text()
    assert reason.startswith("ValueError: no such column: xxx")
    assert len(reason) <= 1024
    run_dir = tmp_path / "ml" / "output" / "data" / "hetero"
    assert json.loads((run_dir / "failure.json").read_text())["exception"] == "ValueError"


# status


def test_status_shows_a_job_to_whoever_has_its_token(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, ["--token=right", "--grace-s=2"]) as job:
        job.start("data-1")
        wait_until("the data host", lambda: (state := job.status("right")) and state.data_hosts[0].processes)
        shown = hetero("status", job.address, HETERO_TOKEN="right")
        assert shown.returncode == 0, shown.stderr
        for part in (
            ": waiting; up",
            "data-1",
            "coordinator",
            "trainer-1",
            "not here yet",
            str(job.cluster.control_port),
        ):
            assert part in shown.stdout
        for token in ("wrong", ""):
            refused = hetero("status", job.address, HETERO_TOKEN=token)
            assert (refused.returncode, refused.stdout) == (2, "")
            assert "token" in refused.stderr
            assert "Traceback" not in refused.stderr
        assert job.status("right") is not None


def test_status_where_nobody_is_says_so_soon() -> None:
    address = f"127.0.0.1:{free_port()}"
    started_s = time.monotonic()
    done = hetero("status", address, "--timeout-s=1")
    assert (done.returncode, done.stdout) == (3, "")
    assert address in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started_s < 10


# plan

WATCHED = """
import sys

FORBIDDEN = ("subprocess.", "os.posix_spawn", "os.fork", "os.exec", "os.mkdir", "socket.bind", "socket.connect")

def watch(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event.startswith(FORBIDDEN):
        print("FORBIDDEN", event, args, file=sys.stderr)

sys.addaudithook(watch)
sys.dont_write_bytecode = True
from hetero.cli.main import main
main()
"""


@pytest.mark.parametrize("as_json", [True, False])
def test_plan_of_a_sagemaker_job_starts_connects_and_writes_nothing(tmp_path: Path, as_json: bool) -> None:
    resources: dict[str, Any] = {
        "current_host": "algo-1",
        "hosts": ["algo-1", "algo-2"],
        "instance_groups": [
            {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
            {"instance_group_name": "dnn_group", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1"]},
        ],
    }
    (tmp_path / "resourceconfig.json").write_text(json.dumps(resources))
    argv = ["plan", "--topology", "resourceconfig.json", ROWS, "--ranks-per-host=2", *["--json"] * as_json]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *argv],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["resourceconfig.json"]
    if as_json:
        hosts = {host["name"]: host["processes"] for host in json.loads(done.stdout)["hosts"]}
        assert [process["name"] for process in hosts["algo-1"]] == ["rank-0", "rank-1"]
        assert [process["name"] for process in hosts["algo-2"]] == ["coordinator", "dispatcher", "worker-0"]
    else:
        for part in ("algo-1", "algo-2", "rank-1 (rank 1 of 2)", "dispatcher", "engine tf_data"):
            assert part in done.stdout
