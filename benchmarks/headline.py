"""What data hosts bring to a job whose input takes CPU: the headline, measured on one machine.

    python benchmarks/headline.py [--shape A|B] [--engine tf_data|grpc] [--step 0|device] [--runs 3] [--seconds 15]
        [--data FOLDER] [--json FILE] [--picture FILE.png] [-- OPTIONS OF HETEROGENEOUS JOBS]
    python benchmarks/headline.py --table FILE        # the tables of an earlier --json, as Markdown

Virtual hosts in CPU quotas stand for instances (A: trainer 0.4 CPUs, data hosts 0.3 + 0.3; B: 0.3, 1.35), and a
SIMULATED accelerator for GPUs: none in (i), then one that takes 80 % of the rows/s that (i) gave. Each round runs the
trainer host alone, the heterogeneous job and, in (i), one host with all the CPUs and without hetero. docs/headline.md
says what is measured, how and why. Needs root, for control groups.

Exit status 1 if a requirement is not kept: share of control at least 0.95 in (i), stall at most 1 % in (ii), receiving
at most 5 % of what preparing costs; in A a speed-up above 2.2 and price-performance above 46 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from awake import Awake
from headline_cases import BATCH_ROWS, CONTROL, HETEROGENEOUS, HOMOGENEOUS, SHAPES, Setting
from headline_control import run_control
from headline_data import write_records
from headline_figures import (
    DEVICE,
    FREE,
    REQUIREMENTS,
    cost_of,
    doubts_of,
    figures_of,
    of_case,
    problems_of,
    title_of,
)
from headline_runs import run_cluster
from headline_tables import CASES, GAINS, case_rows, gain_row, markdown, terminal_table
from quota_hosts import stopped_in_order
from rich.console import Console
from virtual_hosts import BenchmarkFailed

from hetero.cost.prices import PriceList
from hetero.errors import HeteroError

ENGINES = ("tf_data", "grpc")
DEVICE_LOAD = 0.8
PRICES = Path(__file__).resolve().parent / "prices" / "us-east-1-2022.json"


class Benchmark:
    """Runs the parts that were asked for and keeps what they came to.

    Args:
        options: The command line.
        setting: What all runs share.
        prices: Of the instances that shapes stand for.
        console: Where each run is told of.
    """

    def __init__(self, options: argparse.Namespace, setting: Setting, prices: PriceList, console: Console) -> None:
        self._options, self._setting, self._prices, self._console = options, setting, prices, console
        self.parts: list[dict[str, Any]] = []

    def run(self, engine: str, shape: str) -> None:
        """Run (i) and (ii) of an engine in a shape, or the one of them that was asked for.

        Raises:
            BenchmarkFailed: A run did not end well.
        """
        steps, runs = self._options.step, self._options.runs
        step_ms, control_cost = self._options.device_step_ms, None
        if FREE in steps or step_ms is None:  # (ii) by itself needs to know what (i) gives
            measured = FREE in steps
            cases = (HOMOGENEOUS, HETEROGENEOUS, CONTROL) if measured else (HETEROGENEOUS,)
            free = self._part(engine, shape, cases, runs if measured else 1, 0.0)
            if measured:
                self._keep(free)
                control_cost = statistics.median(cost_of(run) for run in of_case(free["runs"], CONTROL))
            if step_ms is None:
                step_ms = device_step_ms(free["figures"]["rows_per_s"][HETEROGENEOUS]["median"])
        if DEVICE in steps:
            self._keep(self._part(engine, shape, (HOMOGENEOUS, HETEROGENEOUS), runs, step_ms, control_cost))

    def _keep(self, part: dict[str, Any]) -> None:
        self.parts.append(part)
        self._console.print(terminal_table(title_of(part), CASES, case_rows(part)))

    def _part(  # noqa: PLR0917 - what a part is
        self,
        engine: str,
        shape: str,
        cases: tuple[str, ...],
        runs: int,
        step_ms: float,
        control_cost: float | None = None,
    ) -> dict[str, Any]:
        """Run the cases in turn, each round beginning with another one."""
        part: dict[str, Any] = {"engine": engine, "shape": shape, "step": DEVICE if step_ms else FREE}
        part |= {"device_step_ms": step_ms, "runs": []}
        for number in range(runs):
            first = number % len(cases)
            for case in (*cases[first:], *cases[:first]):
                if case == CONTROL:
                    measured = run_control(engine, SHAPES[shape], self._setting)
                else:
                    measured = run_cluster(engine, SHAPES[shape], case, self._setting, step_ms)
                part["runs"].append({"round": number, **asdict(measured)})
                self._console.print(
                    f"{title_of(part)}, round {number + 1}, {case}: {measured.rows_per_s:.0f} rows/s", highlight=False
                )
        return part | {"figures": figures_of(part["runs"], shape, self._prices, control_cost)}


def device_step_ms(rows_per_s: float) -> float:
    """Return what a step takes on an accelerator that takes 80 % of these rows/s, milliseconds."""
    return round(1000 * BATCH_ROWS / (DEVICE_LOAD * rows_per_s), 3)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="one of the two; default: both")
    parser.add_argument("--engine", choices=ENGINES, help="one of the two; default: both")
    parser.add_argument("--step", choices=(FREE, DEVICE), help="(i) or (ii) only; default: both")
    parser.add_argument("--runs", type=int, default=3, help="rounds (3)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run that are measured (15)")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds in the quotas before that (5)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="idx files of Fashion-MNIST; default: digits")
    parser.add_argument("--prices", type=Path, default=PRICES, metavar="FILE", help="price file (public, 2022)")
    parser.add_argument("--workers-per-host", metavar="N", help="of heterogeneous jobs (A 1, B 2)")
    parser.add_argument("--local-workers", default="1", metavar="N|auto", help="of heterogeneous jobs (1)")
    parser.add_argument("--device-step-ms", type=float, help="of the simulated accelerator in (ii); default: 80 %%")
    parser.add_argument("--no-awake", action="store_true", help="let CPUs sleep between the turns of the quotas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it there (needs matplotlib)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of such a result, run nothing")
    parser.add_argument("more", nargs="*", metavar="OPTION", help="after --: further options of heterogeneous jobs")
    options = parser.parse_args(given)
    if options.runs < 1 or options.seconds <= 0 or options.warm_up < 0:
        parser.error("--runs needs 1 or more, --seconds more than 0, --warm-up 0 or more")
    if options.device_step_ms is not None and options.device_step_ms <= 0:
        parser.error(f"--device-step-ms is {options.device_step_ms:g}; it needs more than 0")
    options.step = (FREE, DEVICE) if options.step is None else (options.step,)
    return options


def result_of(options: argparse.Namespace, data: dict[str, Any], prices: PriceList, benchmark: Benchmark) -> Any:
    """Return the result as JSON values."""
    problems = problems_of(benchmark.parts)
    return {
        "benchmark": "headline",
        "simulated_accelerator": True,
        "cpus": len(os.sched_getaffinity(0)),
        "runs": options.runs,
        "seconds": options.seconds,
        "warm_up_s": options.warm_up,
        "awake": not options.no_awake,
        "data": data,
        "batch_rows": BATCH_ROWS,
        "shapes": {name: asdict(shape) for name, shape in SHAPES.items()},
        "options": {"workers_per_host": options.workers_per_host, "local_workers": options.local_workers}
        | {"more": options.more},
        "prices": prices.describe(),
        "parts": benchmark.parts,
        "required": [asdict(required) for required in REQUIREMENTS],
        "doubts": doubts_of(benchmark.parts),
        "problems": problems,
        "passed": not problems,
    }


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run all parts that were asked for; write the result after each, so that a stop loses only one."""
    prices = PriceList.read(options.prices)
    shapes = (options.shape,) if options.shape else tuple(SHAPES)
    for shape in shapes:
        prices.of({**SHAPES[shape].trainer, **SHAPES[shape].data})  # what is missing is said before anything is run
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopped_in_order())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetero-headline-")))
        data = write_records(options.data, folder)
        setting = Setting(
            folder,
            options.seconds,
            options.warm_up,
            workers=options.workers_per_host,
            local_workers=options.local_workers,
            options=tuple(options.more),
        )
        if not options.no_awake:
            stack.enter_context(Awake())
        benchmark = Benchmark(options, setting, prices, console)
        result: dict[str, Any] = {}
        asked = [(engine, shape) for shape in shapes for engine in ((options.engine,) if options.engine else ENGINES)]
        for engine, shape in asked:
            benchmark.run(engine, shape)
            result = result_of(options, data, prices, benchmark) | {"complete": (engine, shape) == asked[-1]}
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result


def picture_of() -> Callable[[dict[str, Any], Path], None]:
    """Return what draws the picture; asked before anything is run.

    Raises:
        BenchmarkFailed: matplotlib is not installed.
    """
    try:
        from headline_picture import draw
    except ImportError as error:
        raise BenchmarkFailed(
            f"--picture needs matplotlib ({error}): uv run --group bench python benchmarks/headline.py, or leave it out"
        ) from error
    return draw


def main() -> int:
    """Run the benchmark and return its exit status."""
    options, console = arguments(), Console(width=160 if not sys.stdout.isatty() else None)
    if options.table is not None:
        print(markdown(json.loads(options.table.read_text(encoding="utf-8"))))
        return 0
    try:
        draw = picture_of() if options.picture is not None else None
        result = measure(options, console)
    except (BenchmarkFailed, HeteroError) as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    gains = [gain_row(part) for part in result["parts"]]
    console.print(terminal_table("CPU quotas and a simulated accelerator", GAINS, gains))
    if draw is not None:
        draw(result, options.picture)
    for doubt in result["doubts"]:
        console.print(f"DOUBTFUL: {doubt}: something else ran on this machine", highlight=False)
    for problem in result["problems"]:
        console.print(f"NOT KEPT: {problem}", highlight=False)
    console.print("all requirements kept" if result["passed"] else "", highlight=False)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
