"""What headline.py compares with: the input pipeline alone, in one host that has all the CPUs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from control_groups import ControlGroup
from headline_cases import BATCH_ROWS, CONTROL, JOBS, START_S, Measured, Setting, Shape, Window, rate_of
from virtual_hosts import BenchmarkFailed, clean_environment


def run_control(engine: str, shape: Shape, setting: Setting) -> Measured:
    """Run the input pipeline alone, in one host that has all the shape's CPUs, and return what it came to.

    Raises:
        BenchmarkFailed: It did not begin in time, or gave too few batches.
    """
    processes = 1 if engine == "tf_data" else math.ceil(shape.budget_cpus)
    with tempfile.TemporaryDirectory(prefix="hetero-headline-") as folder, ControlGroup("control") as group:
        outputs = [Path(folder, f"{number}.jsonl") for number in range(processes)]
        with _pipelines(engine, group, outputs, setting) as pipelines:
            _wait_for_batches(pipelines, outputs, Path(folder, "errors"))
            group.limit(shape.budget_cpus)
            time.sleep(setting.warm_up_s)
            used, began_s = group.usage(), time.monotonic()
            time.sleep(setting.seconds)
            used, ended_s = group.usage().since(used), time.monotonic()
        window = Window(began_s, ended_s, {"trainer": used}, {})
        rate = sum(rate_of(window.lines(_whole_lines(output))) for output in outputs)
        cpu_s, seconds = window.cpu_s("trainer"), ended_s - began_s
        return Measured(
            case=CONTROL,
            rows_per_s=rate,
            step_ms=None,
            step_ms_p95=None,
            input_wait=None,
            cpu_s_per_1000_rows={"trainer": 1000 * cpu_s / (rate * seconds), "data": 0.0},
            cpus=cpu_s / seconds,
            throttled=window.throttled,
        )


@contextlib.contextmanager
def _pipelines(
    engine: str, group: ControlGroup, outputs: Sequence[Path], setting: Setting
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the control's processes in its group; kill them when it is left."""
    script = str(Path(__file__).with_name("bare_pipeline.py"))
    options = [f"--job={JOBS[engine]}", f"--engine={engine}", f"--channel={setting.records}"]
    options += [f"--batch-size={BATCH_ROWS}", f"--of={len(outputs)}", f"--parent={os.getpid()}"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (outputs[0].parent / "errors").open("wb") as errors:
            for number, output in enumerate(outputs):
                command = [sys.executable, script, *options, f"--share={number}", f"--output={output}"]
                started.append(
                    subprocess.Popen(
                        group.command(command),
                        env=clean_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=errors,
                        stderr=errors,
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _wait_for_batches(pipelines: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], errors: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while not all(output.exists() and output.stat().st_size for output in outputs):
        if time.monotonic() > deadline_s or any(process.poll() is not None for process in pipelines):
            raise BenchmarkFailed(f"the control gave no batch\n{errors.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _whole_lines(output: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a process that was killed, which may have been writing one."""
    return [
        json.loads(line) for line in output.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"
    ]
