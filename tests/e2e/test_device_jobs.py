"""A job on a simulated accelerator (`--device-step-ms`), as `hetero run` runs it: what it says of the device.

Only what no busy machine can upset is asserted: a batch that takes ten steps of the device to prepare keeps it idle for
most of the time however slow all else is, and no step is shorter than the device's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_job import ROWS_JOB, LocalJob
from test_commands import environment

NUMBERS = f"{ROWS_JOB.parent / 'numbers.py'}:job"
STEPS = 8
INPUT = ["--pieces=2", "--rows=32", "--rows-per-batch=8", "--workers-per-host=1"]
"""8 batches, one after the other."""


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_hetero_run_shows_how_long_slow_input_kept_the_device_idle(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hetero", "run", f"--job={NUMBERS}", f"--run-dir={tmp_path / 'run'}", *INPUT]
    slow = ["--prepare-s=0.5", "--device-step-ms=50"]
    result = subprocess.run([*argv, *slow], capture_output=True, text=True, timeout=90, check=False, env=environment())
    assert result.returncode == 0, result.stdout + result.stderr
    device = json.loads((tmp_path / "run" / "summary.json").read_text())["simulated_device"]
    assert device["step_ms"] == 50
    assert device["busy_s"] == pytest.approx(0.05 * (STEPS - 1))
    assert device["stall"] > 0.5
    assert device["stall"] == pytest.approx(device["idle_s"] / (device["idle_s"] + device["busy_s"]))
    lines = steps_of(tmp_path / "run")
    idle_ms = [line["device_idle_ms"] for line in lines[1:]]
    assert "device_idle_ms" not in lines[0]
    assert sum(idle_ms) == pytest.approx(1000 * device["idle_s"], abs=0.1)
    assert "simulated_device_ms=50 simulated_stall=" in result.stdout
    assert "simulated accelerator" in result.stdout
    assert f"{100 * device['stall']:.2f} %" in result.stdout


@pytest.mark.slow
def test_each_rank_has_a_device_of_its_own_and_no_step_is_shorter_than_its_step(tmp_path: Path) -> None:
    options = [*INPUT, "--epochs=2", "--ranks-per-host=2", "--device-step-ms=400"]
    with LocalJob(tmp_path, 1, 1, options, job=NUMBERS) as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        device = job.summary()["simulated_device"]
        steps = job.summary()["steps"]
        assert steps == STEPS  # 4 an epoch in each rank
        assert device["busy_s"] == pytest.approx(2 * 0.4 * (steps - 1))
        assert device["stall"] < 0.5, "input takes no time here, nor does the loop"
        for line in steps_of(job.run_dir):
            assert line["step_ms"] - line["wait_ms"] >= 399.9  # the figures are rounded


@pytest.mark.slow
def test_without_the_option_nothing_is_said_of_a_device(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 0, 1, INPUT[:3], job=NUMBERS) as job:
        assert job.start().wait() == {"trainer-1": 0}, job.outputs()
        assert job.summary()["simulated_device"] is None
        assert all("device_idle_ms" not in line for line in steps_of(job.run_dir))
        assert "simulated" not in job.outputs()
