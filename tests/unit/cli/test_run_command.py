"""`hetero run` up to the point where it starts a cluster; tests/e2e/test_commands.py starts them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole
from typer.testing import CliRunner, Result

from hetero.cli import run_command
from hetero.cli.cluster import ClusterSpec, HostResult, exit_code_of
from hetero.cli.main import app
from hetero.cli.run_command import figure, percent, summary_table
from hetero.errors import EngineError, HeteroError, JobFileError, SettingsError
from hetero.process.console import Console
from hetero.rundir import RunDir, write_json_atomic

SUMMARY: dict[str, Any] = {
    "job": "digits", "engine": "local", "outcome": "succeeded", "hosts": {"data": 0, "trainer": 1}, "ranks": 2,
    "steps": 7, "rows": 56, "step_ms": {"mean": 1.26, "p50": 1.0, "p95": 2.0},
    "input_wait_fraction": 0.256, "rows_per_s": 1234.5, "train_s": 9.04,
    "results": {"accuracy": 0.98765, "note": "fine", "epochs": 3},
}  # fmt: skip


class FakeCluster:
    """Stands in for `run_cluster`: remembers what it was to run, and leaves a summary."""

    def __init__(self) -> None:
        self.spec = ClusterSpec(0, 0)
        self.arguments: list[str] = []
        self.codes = {"trainer-1": 0}
        self.summary: dict[str, Any] | None = SUMMARY
        self.run: RunDir | None = None

    def __call__(self, spec: ClusterSpec, run: RunDir, arguments: Sequence[str], console: Console) -> list[HostResult]:
        self.spec, self.run, self.arguments = spec, run, list(arguments)
        console("a line of a host")
        if self.summary is not None:
            write_json_atomic(run.summary, self.summary)
        return [HostResult(host, code, number) for number, (host, code) in enumerate(self.codes.items())]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(run_command, "run_cluster", fake)
    return fake


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text('import hetero\njob = hetero.Job("digits", batch_size=8, grace_s=3, lease_s=4)\n')
    return f"--job={path}:job"


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["run", *argv], env={"COLUMNS": "120"})


def refused(kind: type[HeteroError], *argv: str) -> str:
    """Run a command that must be refused; return the message."""
    result = run(*argv)
    assert isinstance(result.exception, kind), result.output
    return str(result.exception)


def rendered(summary: dict[str, Any]) -> str:
    stream = StringIO()
    RichConsole(file=stream, width=120).print(summary_table(summary))
    return stream.getvalue()


def test_options_of_the_run_and_of_the_job_reach_the_launchers_on_either_side_of_the_dashes(
    cluster: FakeCluster, job: str, tmp_path: Path
) -> None:
    result = run(job, "--seed", "3", "--data-hosts=2", "--augment", f"--run-dir={tmp_path}/d", "--", "--width", "-3")
    assert result.exit_code == 0, result.output
    assert cluster.arguments == [job, "--seed", "3", "--augment", "--width", "-3"]
    assert cluster.run is not None
    assert cluster.run.path == tmp_path / "d"
    assert "a line of a host\n" in result.output
    assert f"Run folder: {tmp_path}/d\n" in result.output


@pytest.mark.parametrize("words", [["--run-dir", "d"], ["--run_dir=d"], ["--run_dir", "d"]])
def test_every_launcher_gets_one_run_folder_the_absolute_one(
    cluster: FakeCluster, job: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(job, *words, "--seed=1").exit_code == 0
    assert cluster.run is not None
    assert cluster.run.path == tmp_path / "d"
    assert cluster.arguments == [job, "--seed=1"]


def test_the_cluster_is_made_from_the_commands_and_the_jobs_settings(
    cluster: FakeCluster, job: str, tmp_path: Path
) -> None:
    argv = (job, f"--run-dir={tmp_path}/d", "--data-hosts=2", "--trainer-hosts=3", "--trainer-cpus=0,2-3")
    run(*argv, "--trainer-group=gpus", "--control-port=17000")
    assert cluster.spec == ClusterSpec(
        2, 3, None, (0, 2, 3), control_port=17000, trainer_group="gpus", grace_s=3.0, lease_s=4.0
    )


def test_the_commands_own_flags_are_accepted_with_underscores(cluster: FakeCluster, job: str, tmp_path: Path) -> None:
    run(job, f"--run-dir={tmp_path}/d", "--data_hosts", "2", "--trainer_hosts=3", "--data_cpus=0", "--my_own=1")
    assert (cluster.spec.data_hosts, cluster.spec.trainer_hosts, cluster.spec.data_cpus) == (2, 3, (0,))
    assert cluster.arguments == [job, "--my_own=1"]


def test_a_port_that_nobody_named_is_a_free_one(
    cluster: FakeCluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job, f"--run-dir={tmp_path}/a")
    assert cluster.spec.control_port is None
    monkeypatch.setenv("HETERO_CONTROL_PORT", "17001")
    run(job, f"--run-dir={tmp_path}/b")
    assert cluster.spec.control_port == 17001


def test_json_is_the_summary_and_nothing_else(cluster: FakeCluster, job: str, tmp_path: Path) -> None:
    result = run(job, "--json", f"--run-dir={tmp_path}/d")
    assert json.loads(result.output) == {
        "exit_code": 0, "run_dir": f"{tmp_path}/d", "summary": SUMMARY, "failure": None,
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [True, False])
def test_a_failed_run_ends_with_the_trainers_code_and_names_the_cause(
    cluster: FakeCluster, job: str, tmp_path: Path, as_json: bool
) -> None:
    cluster.codes, cluster.summary = {"data-1": 0, "trainer-1": 4}, None
    result = run(job, f"--run-dir={tmp_path}/d", *["--json"] * as_json)
    assert result.exit_code == 4
    if as_json:
        assert json.loads(result.output)["exit_code"] == 4
    else:
        assert f"Exit codes: trainer-1 4. Cause: {tmp_path}/d/failure.json" in result.output


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(cluster: FakeCluster, job: str, tmp_path: Path) -> None:
    assert run(job, f"--run-dir={tmp_path}/d").exit_code == 0
    cluster.run = None
    assert "already holds a run (summary.json)" in refused(SettingsError, job, f"--run-dir={tmp_path}/d")
    assert cluster.run is None


def test_a_run_folder_that_is_a_file_is_refused(cluster: FakeCluster, job: str, tmp_path: Path) -> None:
    (tmp_path / "d").write_text("")
    assert f"cannot make --run-dir {tmp_path}/d" in refused(SettingsError, job, f"--run-dir={tmp_path}/d")


def test_what_cannot_run_is_refused_before_a_folder_is_made(
    cluster: FakeCluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--job is missing" in refused(SettingsError)
    assert "2 wrong settings" in refused(SettingsError, job, "--batch-size=0", "--epochs=x")
    assert "there is no file" in refused(JobFileError, "--job=no.py:job")
    assert "has data hosts" in refused(EngineError, job, "--engine=local")
    assert "has no data hosts" in refused(EngineError, job, "--engine=tf_data", "--data-hosts=0")
    assert "--data-cpus is '1-0'" in refused(SettingsError, job, "--data-cpus=1-0")
    assert "--trainer-cpus is 'x'" in refused(SettingsError, job, "--trainer-cpus=x")
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    assert cluster.run is None


def results(*codes: int) -> list[HostResult]:
    return [HostResult(f"host-{number}", code, ended_s=float(number)) for number, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "trainers", "code"),
    [
        ([0, 0, 0], 2, 0),
        ([143, 0, 0], 2, 0),
        ([0, 0, 4], 2, 4),
        ([0, 3, 4], 2, 3),
        ([0, -9], 1, 1),
        ([2, 143], 1, 2),
        ([5, 1], 1, 1),
    ],
    ids=["well", "a data host", "a trainer", "the first in time", "killed", "wrong settings", "both"],
)
def test_the_exit_code_is_that_of_the_first_trainer_that_failed(codes: list[int], trainers: int, code: int) -> None:
    assert exit_code_of(results(*codes), trainers) == code


def test_first_is_first_in_time_and_not_in_number() -> None:
    assert exit_code_of([HostResult("trainer-1", 143, 2.0), HostResult("trainer-2", 1, 1.0)], 2) == 1


def test_the_table_has_the_figures_and_what_the_job_logged() -> None:
    text = rendered(SUMMARY)
    for part in (
        "digits, engine local: succeeded", "0 data, 1 trainer", "ranks", "7, 56", "1.3 ms", "26 %", "1234", "9.0 s",
        "0.9877", "fine",
    ):  # fmt: skip
        assert part in text, part


def test_figures_that_were_not_measured_are_dashes() -> None:
    none = dict.fromkeys(("input_wait_fraction", "rows_per_s", "train_s", "steps", "rows"))
    text = rendered({**SUMMARY, **none, "step_ms": {"mean": None}, "results": {"loss": None}})
    assert text.count(" - ") == 4
    assert "None" in text  # what a job logged as None is the job's own word


@pytest.mark.parametrize(("stall", "shown"), [(0.0123, "1.23 %"), (None, "-")])
def test_a_simulated_accelerator_is_named_so_and_shown_only_where_there_was_one(
    stall: float | None, shown: str
) -> None:
    text = rendered({**SUMMARY, "simulated_device": {"step_ms": 80.0, "busy_s": 4.0, "idle_s": 0.05, "stall": stall}})
    assert re.search(r"simulated accelerator +│ 80 ms a step", text)
    assert re.search(rf"simulated stall +│ {shown} ", text)
    assert "simulated" not in rendered({**SUMMARY, "simulated_device": None})


def test_figures_are_written_with_unit_and_digits() -> None:
    assert [figure(1.25, "ms", 1), figure(3, "", 0), figure(None, "ms", 1)] == ["1.2 ms", "3", "-"]
    assert [percent(0.256), percent(0), percent(None)] == ["26 %", "0 %", "-"]
