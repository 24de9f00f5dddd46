"""One run of headline.py: a cluster in CPU quotas that trains for some seconds, and what was seen of it in these."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headline_cases import BATCH_ROWS, END_S, HETEROGENEOUS, JOBS, START_S, Measured, Setting, Shape, Window, rate_of
from quota_hosts import QuotaHosts
from virtual_hosts import BenchmarkFailed

_SERVES_INPUT = ("worker", "feed", "dispatcher")


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
            JOBS[engine],
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
