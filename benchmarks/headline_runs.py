"""One run of headline.py: a cluster in CPU quotas that trains for some seconds, and what was seen of it in these.

Three cases. `homogeneous`: the trainer host alone. `heterogeneous`: data hosts beside it, and a local worker on it.
`control`: one host with the CPUs of all of them, which only prepares the same input, without hetero; in as many
processes as it takes to use them, where the pipeline is Python (a TensorFlow graph has threads).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_groups import ControlGroup, GroupUsage
from quota_hosts import QuotaHosts
from virtual_hosts import REPOSITORY, BenchmarkFailed, clean_environment

HOMOGENEOUS, HETEROGENEOUS, CONTROL = "homogeneous", "heterogeneous", "control"
BATCH_ROWS = 128
START_S, END_S = 240.0, 120.0
LEAST_STEPS = 5
_JOBS = {"tf_data": "graph", "grpc": "python"}
_FILE = REPOSITORY / "benchmarks" / "jobs" / "headline_images.py"
_SERVES_INPUT = ("worker", "feed", "dispatcher")


@dataclass(frozen=True)
class Shape:
    """Quotas that stand for instances, in the ratio of their vCPUs.

    Attributes:
        name: `A` or `B`.
        says: The public figures' clusters.
        trainer_cpus: CPUs of the trainer host.
        data_cpus: CPUs of each data host.
        workers: Workers on each data host.
        trainer, data: Instances whose prices count.
    """

    name: str
    says: str
    trainer_cpus: float
    data_cpus: tuple[float, ...]
    workers: int
    trainer: Mapping[str, int]
    data: Mapping[str, int]

    @property
    def budget_cpus(self) -> float:
        """CPUs of all hosts together."""
        return round(self.trainer_cpus + sum(self.data_cpus), 6)


SHAPES = {
    "A": Shape(
        "A",
        "p4d.24xlarge + 2 x c5.18xlarge, 96 + 144 vCPUs",
        0.4,
        (0.3, 0.3),
        1,
        {"ml.p4d.24xlarge": 1},
        {"ml.c5.18xlarge": 2},
    ),
    "B": Shape(
        "B",
        "p3.2xlarge + c5.9xlarge, 8 + 36 vCPUs",
        0.3,
        (1.35,),
        2,
        {"ml.p3.2xlarge": 1},
        {"ml.c5.9xlarge": 1},
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all runs of a benchmark share.

    Attributes:
        records: Folder of the pictures.
        seconds: How long is measured.
        warm_up_s: How long the quotas hold before that.
        workers: `--workers-per-host`, None for the shape's.
        local_workers: `--local-workers` of heterogeneous jobs.
        options: More options of heterogeneous jobs.
    """

    records: Path
    seconds: float
    warm_up_s: float
    workers: str | None = None
    local_workers: str = "1"
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What one run came to, within the seconds that were measured.

    Attributes:
        case: See the module.
        rows_per_s: Rows trained on.
        step_ms: Median step, and `step_ms_p95`; None for the control, which has no steps.
        input_wait: Part of the steps in which the loop waited for input.
        cpu_s_per_1000_rows: CPU seconds by `trainer` and `data` hosts; the control's are its trainer's.
        cpus: CPUs used, of those that the hosts have.
        throttled: Part of the quotas' periods in which they were used up.
        receiving_cpu_s_per_1000_rows: CPU seconds of the trainer host's ranks and launcher, local workers left out.
        stall: Part of the time in which the simulated accelerator was idle; None without one.
        late: The part of that in which it did not wait for input: the loop woke up late, or ran its own code.
        stall_of_summary: `stall` in `simulated_device` of summary.json, over the whole run, start-up included.
        local_workers: What the summary says of them.
    """

    case: str
    rows_per_s: float
    step_ms: float | None
    step_ms_p95: float | None
    input_wait: float | None
    cpu_s_per_1000_rows: Mapping[str, float]
    cpus: float
    throttled: float
    receiving_cpu_s_per_1000_rows: float | None = None
    stall: float | None = None
    late: float | None = None
    stall_of_summary: float | None = None
    local_workers: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Window:
    """The seconds that are measured: what the hosts had used at their begin and what since.

    Attributes:
        began_s, ended_s: Monotonic seconds.
        used: By host, what it used between.
        process_cpu_s: By process of the trainer host, CPU seconds between.
    """

    began_s: float
    ended_s: float
    used: Mapping[str, GroupUsage]
    process_cpu_s: Mapping[str, float]

    def lines(self, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return those of a run's lines whose batch came in these seconds.

        Raises:
            BenchmarkFailed: They are too few.
        """
        found = [line for line in lines if self.began_s <= line.get("at_s", 0.0) < self.ended_s]
        if len(found) < LEAST_STEPS:
            seconds = self.ended_s - self.began_s
            raise BenchmarkFailed(f"only {len(found)} steps in {seconds:.1f} s, {LEAST_STEPS} needed: raise --seconds")
        return found

    def cpu_s(self, kind: str) -> float:
        """Return the CPU seconds of the hosts whose name begins so."""
        return sum(used.cpu_s for host, used in self.used.items() if host.startswith(kind))

    @property
    def throttled(self) -> float:
        """Part of the periods in which a quota was used up."""
        periods = sum(used.periods for used in self.used.values())
        return sum(used.throttled for used in self.used.values()) / periods if periods else 0.0


def rate_of(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return rows/s from the first line's batch to the last's: what came after the first, over the time between."""
    rows = sum(int(line["rows"]) for line in lines[1:])
    return float(rows / (lines[-1]["at_s"] - lines[0]["at_s"]))


def run_cluster(engine: str, shape: Shape, case: str, setting: Setting, device_step_ms: float = 0.0) -> Measured:
    """Run a job, homogeneous or heterogeneous, and return what it came to.

    Args:
        device_step_ms: What a step takes on the simulated accelerator; 0: there is none.

    Raises:
        BenchmarkFailed: It did not end well, or took too few steps.
    """
    heterogeneous = case == HETEROGENEOUS
    options = [
        f"--channel=training={setting.records}",
        f"--batch-size={BATCH_ROWS}",
        "--ranks-per-host=1",
        f"--device-step-ms={device_step_ms:g}",
    ]
    if heterogeneous:
        workers = setting.workers or str(shape.workers)
        given = (f"--workers-per-host={workers}", f"--local-workers={setting.local_workers}")
        options += [f"--engine={engine}", *given, *setting.options]
    with tempfile.TemporaryDirectory(prefix="hetero-headline-") as folder:
        hosts = QuotaHosts(
            Path(folder),
            f"{_FILE}:{_JOBS[engine]}",
            trainer_cpus=[shape.trainer_cpus],
            data_cpus=shape.data_cpus if heterogeneous else (),
            options=options,
        )
        with hosts:
            hosts.start()
            hosts.wait_until_training(START_S)
            hosts.limit()
            window = _watch(hosts, setting)
            (hosts.run_dir / "enough").touch()
            hosts.lift()
            hosts.wait(END_S)
            metrics = (hosts.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
            return _measured(case, [json.loads(line) for line in metrics.splitlines()], window, hosts.summary())


def _watch(hosts: QuotaHosts, setting: Setting) -> Window:
    """Let a job train for as long as is measured."""
    chief = hosts.cluster.trainer_hosts[0]
    _sleep(hosts, setting.warm_up_s)
    used, processes, began_s = hosts.usage(), hosts.process_cpu_s(chief), time.monotonic()
    _sleep(hosts, setting.seconds)
    used_later, processes_later, ended_s = hosts.usage(), hosts.process_cpu_s(chief), time.monotonic()
    if hosts.over:
        raise BenchmarkFailed(f"the job has ended while it was measured\n{hosts.outputs()}")
    return Window(
        began_s,
        ended_s,
        {host: later.since(used[host]) for host, later in used_later.items()},
        {name: later - processes.get(name, 0.0) for name, later in processes_later.items()},
    )


def _sleep(hosts: QuotaHosts, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0 and not hosts.over:
        time.sleep(min(1.0, left_s))


def _measured(case: str, metrics: Sequence[Mapping[str, Any]], window: Window, summary: Mapping[str, Any]) -> Measured:
    lines = window.lines(metrics)
    rows_per_s, seconds = rate_of(lines), window.ended_s - window.began_s
    thousands = rows_per_s * seconds / 1000
    steps = sorted(float(line["step_ms"]) for line in lines)
    step_ms, wait_ms = sum(steps), sum(float(line["wait_ms"]) for line in lines)
    receiving_s = sum(cpu for name, cpu in window.process_cpu_s.items() if not name.startswith(_SERVES_INPUT))
    device = summary["simulated_device"]
    idle_ms = sum(float(line.get("device_idle_ms", 0.0)) for line in lines)
    time_ms = idle_ms + len(lines) * device["step_ms"] if device else 0.0
    return Measured(
        case=case,
        rows_per_s=rows_per_s,
        step_ms=statistics.median(steps),
        step_ms_p95=steps[math.ceil(0.95 * len(steps)) - 1],
        input_wait=wait_ms / step_ms,
        cpu_s_per_1000_rows={kind: window.cpu_s(kind) / thousands for kind in ("trainer", "data")},
        cpus=(window.cpu_s("trainer") + window.cpu_s("data")) / seconds,
        throttled=window.throttled,
        receiving_cpu_s_per_1000_rows=receiving_s / thousands if case == HETEROGENEOUS else None,
        stall=idle_ms / time_ms if device else None,
        late=max(0.0, idle_ms - wait_ms) / time_ms if device else None,
        stall_of_summary=device["stall"] if device else None,
        local_workers=next(iter(summary["local_workers"].values()), None),
    )


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
    options = [f"--job={_FILE}:{_JOBS[engine]}", f"--engine={engine}", f"--channel={setting.records}"]
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
