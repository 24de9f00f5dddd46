"""What `hetero demo` makes of its two runs; `.ci/run` runs the demo itself."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetero.cli import demo_command
from hetero.cli.cluster import ClusterSpec, HostResult
from hetero.cli.demo_command import meaning, speed_up, split_cpus
from hetero.cli.main import app
from hetero.errors import ChildFailed, Stopped
from hetero.process.console import Console
from hetero.rundir import RunDir, write_json_atomic


def figures(rows_per_s: float | None, wait: float | None = 0.5) -> dict[str, Any]:
    return {
        "rows_per_s": rows_per_s,
        "input_wait_fraction": wait,
        "step_ms": {"mean": 1000 / rows_per_s if rows_per_s else None},
        "results": {} if rows_per_s is None else {"test_accuracy": 0.9567},
    }


def sentences(text: str) -> int:
    return len(re.findall(r"[.!?](?=\s|$)", text))


@pytest.mark.parametrize(
    ("cpus", "trainer", "data"),
    [
        ([], None, None),
        ([3], (3,), (3,)),
        ([0, 1], (0,), (1,)),
        ([0, 2, 5], (0,), (2, 5)),
        ([0, 1, 2, 3], (0, 1), (2, 3)),
    ],
)
def test_trainer_and_data_hosts_share_no_cpu_where_there_are_two(
    cpus: list[int], trainer: tuple[int, ...] | None, data: tuple[int, ...] | None
) -> None:
    assert split_cpus(cpus) == (trainer, data)


def test_the_speed_up_is_that_of_the_rows_a_second() -> None:
    assert speed_up(figures(100), figures(180)) == 1.8


@pytest.mark.parametrize(("before", "after"), [(None, 100), (100, None), (0.0, 100), (100, 0.0)])
def test_without_figures_of_both_runs_there_is_no_speed_up_and_it_is_said(
    before: float | None, after: float | None
) -> None:
    assert speed_up(figures(before), figures(after)) is None
    text = meaning(figures(before), figures(after), one_cpu=False)
    assert "no speed-up to tell" in text
    assert sentences(text) == 2


def test_the_meaning_is_two_sentences_with_the_price_a_data_host_may_have() -> None:
    text = meaning(figures(100, 0.62), figures(180, 0.08), one_cpu=False)
    assert sentences(text) == 2
    for part in ("1.80 times as many rows", "8 % of the time instead of 62 %", "0.56 times as long", "less than 80 %"):
        assert part in text


@pytest.mark.parametrize("after", [100.3, 100, 73])
def test_no_price_is_named_where_nothing_was_saved(after: float) -> None:
    text = meaning(figures(100), figures(after), one_cpu=False)
    assert sentences(text) == 2
    assert f"{after / 100:.2f} times as many" in text
    assert "No data host is cheap enough" in text
    assert "-" not in re.sub(r"[a-z]-[a-z]", "", text), "a negative price"


def test_one_cpu_cannot_show_a_speed_up_and_that_is_said() -> None:
    text = meaning(figures(100), figures(90), one_cpu=True)
    assert "cannot show a speed-up" in text
    assert sentences(text) == 2


def test_the_job_is_the_example() -> None:
    assert demo_command._job_file() == Path(__file__).resolve().parents[3] / "examples" / "digits" / "job.py"


# The command with a cluster that only leaves figures


class FakeCluster:
    """Stands in for `run_cluster`."""

    def __init__(self) -> None:
        self.specs: list[ClusterSpec] = []
        self.figures = [figures(100, 0.6), figures(180, 0.1)]
        self.error: BaseException | None = None
        self.code = 0

    def __call__(self, spec: ClusterSpec, run: RunDir, _arguments: Sequence[str], console: Console) -> list[HostResult]:
        if self.error is not None:
            raise self.error
        console("a line of a host")
        write_json_atomic(run.summary, self.figures[len(self.specs)])
        self.specs.append(spec)
        hosts = [*range(spec.data_hosts), *range(spec.trainer_hosts)]
        if self.code:
            failure = {
                "host": "trainer-1",
                "process": "rank-0",
                "time_s": 0.0,
                "exception": "ValueError",
                "message": "no",
            }
            write_json_atomic(run.failure, failure)
        return [HostResult(str(host), self.code, 0.0) for host in hosts]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(demo_command, "run_cluster", fake)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return fake


def demo(*argv: str) -> Result:
    return CliRunner().invoke(app, ["demo", *argv], env={"COLUMNS": "200"})


def test_the_same_trainer_host_runs_without_and_with_data_hosts_and_nothing_stays(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    result = demo()
    assert result.exit_code == 0, result.output
    first, second = cluster.specs
    assert (first.data_hosts, first.trainer_hosts) == (0, 1)
    assert (second.data_hosts, second.trainer_hosts) == (2, 1)
    assert first.trainer_cpus == second.trainer_cpus
    for part in ("1 of 2: homogeneous", "2 of 2: heterogeneous", "60 %", "10 %", "180", "0.957", "1.80 x", "a line of"):
        assert part in result.output, part
    assert list(tmp_path.iterdir()) == []


def test_runs_without_figures_are_shown_with_dashes(cluster: FakeCluster) -> None:
    cluster.figures = [figures(None, None), figures(None, None)]
    result = demo()
    assert result.exit_code == 0, result.output
    assert result.output.count(" - ") >= 9


def test_a_simulated_accelerator_is_shown_as_one(cluster: FakeCluster) -> None:
    device = {"step_ms": 40.0, "busy_s": 4.0, "idle_s": 1.0, "stall": 0.2}
    cluster.figures = [figures(100) | {"simulated_device": device}, figures(180) | {"simulated_device": device}]
    output = demo().output
    assert output.count("40 ms a step") == output.count("20.00 %") == 2
    assert "simulated accelerator" in output
    cluster.figures, cluster.specs = [figures(100), figures(180)], []
    assert "simulated" not in demo().output


def test_json_is_both_summaries_and_nothing_else(cluster: FakeCluster) -> None:
    values = json.loads(demo("--json").output)
    assert values["homogeneous"] == figures(100, 0.6)
    assert values["heterogeneous"] == figures(180, 0.1)
    assert values["speed_up"] == 1.8
    assert values["one_cpu"] in (True, False)


def test_kept_folders_are_named(cluster: FakeCluster, tmp_path: Path) -> None:
    output = demo("--keep").output
    (folder,) = tmp_path.iterdir()
    assert f"Run folders: {folder}" in output
    assert {path.name for path in folder.iterdir()} == {"homogeneous", "heterogeneous"}


def test_a_failed_run_names_its_cause_and_the_logs_which_stay(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.code = 1
    error = demo().exception
    assert isinstance(error, ChildFailed)
    (folder,) = tmp_path.iterdir()
    assert "ValueError: no (rank-0 on trainer-1)" in str(error)
    assert str(folder / "homogeneous") in str(error)


def test_a_signal_leaves_nothing(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.error = Stopped(2)
    assert demo().exception is cluster.error
    assert list(tmp_path.iterdir()) == []
