"""What local workers on the trainer host bring to a job that waits for input, and cost one that computes.

    python benchmarks/local_workers.py [--engine grpc|tf_data] [--workers 2] [--seconds 45] [--json FILE]

Whole jobs on virtual hosts of this machine, one after the other: one data host with one worker, one trainer host.

Input-bound: a batch takes a worker 50 ms and no CPU, a step takes next to nothing. Rows/s are those of the run's last
10 s, when `auto` has long decided. With N local workers beside the one of the data host they can be 1 + N times as
many. `auto` may rightly find that this machine has no idle CPU; what it said is in the result.

Compute-bound (`grpc` only): as many ranks as CPUs, each of whose steps is a fixed amount of work for one CPU; input
costs the data host next to no CPU, and the local workers a CPU each, all the time. What counts is how much longer the
median step takes with local workers than without them; of three runs in turn the best each, since whatever else runs
on this machine only adds to it. For comparison: with local workers of ordinary priority.

Exit status 1 if rows/s with N workers are less than 0.8 of 1 + N times those without, if those with `auto` are less
than without, or if the median step takes more than 5 % longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from virtual_hosts import REPOSITORY, BenchmarkFailed, VirtualHosts

JOB = Path(__file__).resolve().parent / "jobs" / "short_input.py"
NAME_OF = {"grpc": "plain", "tf_data": "graph"}
BATCH_S, WINDOW_S = 0.05, 10.0
LEAST_PART, LEAST_AUTO, MOST_STALL = 0.8, 0.97, 0.05
WORK, BURN, STEPS, RUNS = 400_000, 400_000, 400, 3
ORDINARY = """
import sys
if any("hetero.children" in word for word in sys.orig_argv):
    import hetero.process.priority
    hetero.process.priority.yield_to_others = lambda: None
"""
"""A sitecustomize module with which local workers keep the ordinary priority."""


@dataclass(frozen=True)
class Rate:
    """One input-bound run.

    Attributes:
        asked: `--local-workers`.
        used: Local workers at the end, and why.
        rows_per_s: In the last seconds.
        ratio: Over that without local workers.
        wait: Part of the run in which the rank waited for input.
    """

    asked: str
    used: int
    why: str
    rows_per_s: float
    ratio: float
    wait: float


def run(job: str, *options: str, environment: dict[str, str] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Run one job; return its summary and the lines of its metrics.

    Raises:
        BenchmarkFailed: It did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="hetero-local-") as folder:
        hosts = VirtualHosts(
            Path(folder),
            f"{JOB}:{job}",
            data_hosts=1,
            trainer_hosts=1,
            options=("--workers-per-host=1", "--lease-s=30", *options),
            environment=environment,
        )
        with hosts:
            hosts.start()
            hosts.wait(300.0)
            metrics = [json.loads(line) for line in (hosts.run_dir / "metrics.jsonl").read_text().splitlines()]
            return hosts.summary(), [line for line in metrics if "step_ms" in line]


def rate(engine: str, asked: str, seconds: float) -> tuple[float, dict[str, Any]]:
    """Return rows/s of an input-bound job at its end, and its summary."""
    summary, metrics = run(
        NAME_OF[engine], f"--local-workers={asked}", f"--seconds={seconds:g}", f"--batch-s={BATCH_S}"
    )
    rows, took_s = 0, 0.0
    for line in reversed(metrics):
        rows += int(line["rows"])
        took_s += float(line["step_ms"]) / 1000
        if took_s >= WINDOW_S:
            return rows / took_s, summary
    raise BenchmarkFailed(f"the run has only {took_s:.1f} s of steps; {WINDOW_S:g} s are needed: raise --seconds")


def step_ms(workers: int, ranks: int, *, yields: bool = True) -> float:
    """Return the median step of a compute-bound job, milliseconds."""
    with tempfile.TemporaryDirectory(prefix="hetero-local-site-") as site:
        environment = None
        if not yields:
            Path(site, "sitecustomize.py").write_text(ORDINARY, encoding="utf-8")
            environment = {"PYTHONPATH": os.pathsep.join([site, str(REPOSITORY)])}
        options = (f"--local-workers={workers}", f"--ranks-per-host={ranks}", f"--steps={STEPS}", f"--work={WORK}")
        _, metrics = run("plain", *options, f"--burn={BURN}", "--batch-s=0.004", environment=environment)
    return statistics.median(float(line["step_ms"]) for line in metrics[STEPS // 5 :])


def rates_of(engine: str, workers: int, seconds: float, console: Console) -> list[Rate]:
    """Run the input-bound jobs."""
    found: list[Rate] = []
    for asked in ("0", str(workers), "auto"):
        rows_per_s, summary = rate(engine, asked, seconds)
        told = summary["local_workers"].get("trainer-1", {"used": 0, "why": ""})
        ratio = rows_per_s / found[0].rows_per_s if found else 1.0
        found.append(Rate(asked, told["used"], told["why"], rows_per_s, ratio, summary["input_wait_fraction"]))
        console.print(f"local workers {asked}: {rows_per_s:.0f} rows/s, {ratio:.2f} times", highlight=False)
    return found


def table_of(rates: list[Rate]) -> Table:
    """Return the input-bound runs as a table."""
    table = Table(title="A job that waits for input")
    for column in ("--local-workers", "used", "rows/s", "times", "why"):
        table.add_column(column, justify="left" if column == "why" else "right")
    for one in rates:
        table.add_row(one.asked, str(one.used), f"{one.rows_per_s:.0f}", f"{one.ratio:.2f}", one.why)
    return table


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=sorted(NAME_OF), default="grpc")
    parser.add_argument("--workers", type=int, default=2, help="N")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of an input-bound run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.workers < 1 or options.seconds < 2 * WINDOW_S:
        parser.error(f"--workers needs 1 or more, --seconds {2 * WINDOW_S:g} or more")
    console = Console()
    steps: dict[str, float] = {}
    try:
        rates = rates_of(options.engine, options.workers, options.seconds, console)
        if options.engine == "grpc":
            ranks = len(os.sched_getaffinity(0))
            for _ in range(RUNS):
                for name, workers, yields in (
                    ("none", 0, True),
                    ("yielding", options.workers, True),
                    ("of ordinary priority", options.workers, False),
                ):
                    steps[name] = min(steps.get(name, math.inf), step_ms(workers, ranks, yields=yields))
    except BenchmarkFailed as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    stalls = {name: ms / steps["none"] - 1 for name, ms in steps.items() if name != "none"}
    passed = (
        rates[1].ratio >= LEAST_PART * (1 + options.workers)
        and rates[2].ratio >= LEAST_AUTO
        and stalls.get("yielding", 0.0) <= MOST_STALL
    )
    result = {
        "benchmark": "local_workers",
        "engine": options.engine,
        "cpus": len(os.sched_getaffinity(0)),
        "input_bound": [asdict(one) for one in rates],
        "compute_bound": {"step_ms": steps, "longer": stalls},
        "required": {"part_of_linear": LEAST_PART, "auto": LEAST_AUTO, "longer": MOST_STALL},
        "passed": passed,
    }
    console.print(table_of(rates))
    for name, ms in steps.items():
        longer = f", {stalls[name]:+.1%}" if name in stalls else ""
        console.print(f"A job that computes, local workers {name}: a step takes {ms:.1f} ms{longer}", highlight=False)
    console.print("kept" if passed else "NOT KEPT")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
