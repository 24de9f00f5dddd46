"""benchmarks/headline.py in its smallest form: what it writes, and that it leaves nothing, also when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_groups import Hierarchy
from headline_cases import CONTROL, HETEROGENEOUS, HOMOGENEOUS
from headline_example import result as example
from virtual_hosts import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.quiet, pytest.mark.timeout(300)]
SMALLEST = ["--shape=A", "--engine=grpc", "--runs=1", "--seconds=3", "--warm-up=1"]


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start the benchmark with its scratch folder in `folder`."""
    (folder / "scratch").mkdir()
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "benchmarks" / "headline.py"), *SMALLEST, *options],
        env={**os.environ, "TMPDIR": str(folder / "scratch")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_by(pid: int, folder: Path) -> list[Path]:
    """Return what a benchmark has left of control groups and scratch folders."""
    hierarchy = Hierarchy.find()
    groups = [path for mount in (hierarchy.cpu, hierarchy.accounting) for path in mount.glob(f"hetero-*-{pid}-*")]
    return groups + list((folder / "scratch").glob("hetero-headline-*"))


def test_the_smallest_form_writes_a_whole_result_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    benchmark = started(tmp_path, "--step=0", f"--json={path}")
    output, _ = benchmark.communicate(timeout=250)
    assert path.exists(), output
    result = json.loads(path.read_text(encoding="utf-8"))
    assert benchmark.returncode == (0 if result["passed"] else 1), output
    assert result["complete"]
    assert result["simulated_accelerator"] is True
    assert result["data"]["rows"] == 1797
    (part,) = result["parts"]
    assert sorted(run["case"] for run in part["runs"]) == [CONTROL, HETEROGENEOUS, HOMOGENEOUS]
    modelled = example()["parts"][0]
    assert part.keys() == modelled.keys()
    assert part["figures"].keys() == modelled["figures"].keys()
    assert all(run.keys() == modelled["runs"][0].keys() for run in part["runs"])
    for run in part["runs"]:
        assert run["rows_per_s"] > 0
        assert 0 < run["cpus"] < 1.2
    (heterogeneous,) = (run for run in part["runs"] if run["case"] == HETEROGENEOUS)
    assert heterogeneous["local_workers"]["used"] == 1
    assert 0 < heterogeneous["receiving_cpu_s_per_1000_rows"] < heterogeneous["cpu_s_per_1000_rows"]["trainer"]
    assert "grpc, shape A, step 0" in output
    assert left_by(benchmark.pid, tmp_path) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_in_mid_run_leaves_nothing(tmp_path: Path, signum: signal.Signals) -> None:
    benchmark = started(tmp_path, "--step=device", "--device-step-ms=200", "--seconds=200")
    try:
        accounting = Hierarchy.find().accounting
        chief = accounting / f"hetero-benchmark-{benchmark.pid}-trainer-1"
        deadline_s = time.monotonic() + 120
        while not (any(tmp_path.glob("scratch/*/run/metrics.jsonl")) and chief.exists()):
            assert benchmark.poll() is None, benchmark.communicate()[0]
            assert time.monotonic() < deadline_s, "no rank has begun to train"
            time.sleep(0.1)
        benchmark.send_signal(signum)
        benchmark.communicate(timeout=60)
    finally:
        benchmark.kill()
    assert benchmark.returncode == 128 + signum
    assert left_by(benchmark.pid, tmp_path) == []
