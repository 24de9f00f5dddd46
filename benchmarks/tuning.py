"""What `auto` comes to beside the best of the fixed settings, in clusters whose hosts have parts of CPUs.

    python benchmarks/tuning.py [--engine grpc|tf_data] [--shape A B wait] [--workers 1 2 3] [--local-workers 0 1]
                                [--runs 3] [--seconds 20] [--json FILE]

Whole jobs on virtual hosts in CPU quotas (`quota_hosts.py`), one after the other, the settings in turn. The pipeline is
the headline's, in the headline's shapes: A is a trainer host of 0.4 CPUs with two data hosts of 0.3, B one of 0.3 with
a data host of 1.35. In `wait` (`grpc` only) a batch takes a worker 200 ms and no CPU, on the hosts of B.

`auto` is `--workers-per-host auto --local-workers auto`. A launcher sees its quota when it plans; the quota is lifted
while processes start, which is no part of what is compared. A run with `auto` is measured once it has decided. The
figure of a setting is the median of its runs.

Needs root. Exit status 1 if `auto` has less than 0.95 of the rows/s of the best fixed setting.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headline_cases import BATCH_ROWS, JOBS
from headline_data import write_records
from quota_hosts import QuotaHosts, stopped_in_order
from rich.console import Console
from rich.table import Table
from virtual_hosts import REPOSITORY, BenchmarkFailed

SHAPES = {"A": (0.4, (0.3, 0.3)), "B": (0.3, (1.35,)), "wait": (0.3, (1.35,))}
WAITING = f"{REPOSITORY / 'benchmarks' / 'jobs' / 'short_input.py'}:plain"
AUTO = "auto"
LEAST_PART = 0.95
WARM_UP_S, DECIDES_S = 6.0, 150.0
START_S, END_S = 240.0, 120.0
_DECIDED = re.compile(r"workers: (keeping|stopping|none|.*given up)")


@dataclass
class Setting:
    """What one setting came to.

    Attributes:
        workers, local_workers: `--workers-per-host` and `--local-workers`.
        rows_per_s: Of each run.
        tuning: What the summary of the last run says.
    """

    workers: str
    local_workers: str
    rows_per_s: list[float] = field(default_factory=list)
    tuning: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How it is shown."""
        return AUTO if self.workers == AUTO else f"{self.workers} workers, {self.local_workers} local"

    @property
    def median(self) -> float:
        """Rows/s."""
        return statistics.median(self.rows_per_s)


def run(engine: str, shape: str, setting: Setting, seconds: float, records: Path) -> None:
    """Run one job and note its rows/s.

    Raises:
        BenchmarkFailed: It did not end well, or took too few steps.
    """
    trainer_cpus, data_cpus = SHAPES[shape]
    options = [f"--workers-per-host={setting.workers}", f"--local-workers={setting.local_workers}", "--lease-s=60"]
    options += [f"--engine={engine}", "--ranks-per-host=1"]
    if shape == "wait":
        options += ["--batch-s=0.2"]
    else:
        options += [f"--channel=training={records}", f"--batch-size={BATCH_ROWS}"]
    with tempfile.TemporaryDirectory(prefix="hetero-tuning-") as folder:
        hosts = QuotaHosts(
            Path(folder),
            WAITING if shape == "wait" else JOBS[engine],
            trainer_cpus=[trainer_cpus],
            data_cpus=data_cpus,
            options=options,
        )
        with hosts:
            hosts.limit()
            hosts.start()
            _wait_for_plans(hosts)
            hosts.lift()
            hosts.wait_until_training(START_S)
            hosts.limit()
            time.sleep(WARM_UP_S)
            if setting.workers == AUTO:
                _wait_for_decisions(hosts, engine, setting.local_workers == AUTO)
            before = _metrics(hosts)
            time.sleep(seconds)
            lines = _metrics(hosts)[len(before) :]
            setting.rows_per_s.append(_rate(lines, seconds))
            hosts.lift()
            (hosts.run_dir / "enough").touch()
            hosts.wait(END_S)
            setting.tuning = hosts.summary()["tuning"]


def _wait_for_plans(hosts: QuotaHosts) -> None:
    """Wait until every launcher has planned, and so read its quota."""
    deadline_s = time.monotonic() + START_S
    while not all((hosts.run_dir / "work" / host).is_dir() for host in hosts.cluster.hosts):
        if time.monotonic() > deadline_s or hosts.over:
            raise BenchmarkFailed(f"the launchers did not begin\n{hosts.outputs()}")
        time.sleep(0.1)


def _wait_for_decisions(hosts: QuotaHosts, engine: str, local: bool) -> None:
    """Wait until every host that tries something has said what it keeps."""
    trying = hosts.cluster.data_hosts if engine == "grpc" else ()
    trying = (*trying, *(hosts.cluster.trainer_hosts if local else ()))
    deadline_s = time.monotonic() + DECIDES_S
    while not all(_DECIDED.search((hosts.folder / f"{host}.out").read_text(errors="replace")) for host in trying):
        if time.monotonic() > deadline_s or hosts.over:
            raise BenchmarkFailed(f"not decided after {DECIDES_S:.0f} s\n{hosts.outputs()}")
        time.sleep(0.5)


def _metrics(hosts: QuotaHosts) -> list[dict[str, Any]]:
    text = (hosts.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [line for line in map(json.loads, whole.splitlines()) if "step_ms" in line]


def _rate(lines: list[dict[str, Any]], seconds: float) -> float:
    """Return rows/s of steps: the file comes about a second late, so that its lines tell how long they took."""
    if len(lines) < 5:
        raise BenchmarkFailed(f"only {len(lines)} steps in {seconds:.0f} s, 5 needed: raise --seconds")
    return float(1000 * sum(line["rows"] for line in lines) / sum(line["step_ms"] for line in lines))


def compare(engine: str, shape: str, options: argparse.Namespace, records: Path, console: Console) -> dict[str, Any]:
    """Run all settings in turn and return what came of it."""
    local = ["0"] if shape == "wait" else options.local_workers
    workers = ["2", "16"] if shape == "wait" else options.workers
    settings = [Setting(AUTO, "0" if shape == "wait" else AUTO)]
    settings += [Setting(number, beside) for beside in local for number in workers]
    for _ in range(options.runs):
        for setting in settings:
            run(engine, shape, setting, options.seconds, records)
            text = f"{engine} {shape}: {setting.name}: {setting.rows_per_s[-1]:.0f} rows/s"
            console.print(text, highlight=False, soft_wrap=True)
            if setting.workers == AUTO:
                console.print_json(json.dumps(setting.tuning))
    auto, best = settings[0], max(settings[1:], key=lambda one: one.median)
    part = auto.median / best.median
    table = Table(title=f"{engine}, shape {shape}")
    for column in ("setting", "rows/s", "of the best fixed"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for one in settings:
        table.add_row(one.name, f"{one.median:.0f}", f"{one.median / best.median:.3f}")
    console.print(table)
    values = [asdict(one) | {"name": one.name, "median": one.median} for one in settings]
    return {"engine": engine, "shape": shape, "part_of_best": part, "best": best.name, "settings": values}


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", nargs="+", choices=sorted(JOBS), default=sorted(JOBS))
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--workers", nargs="+", default=["1", "2", "3"], help="fixed numbers to compare with")
    parser.add_argument("--local-workers", nargs="+", default=["0", "1"], help="fixed numbers to compare with")
    parser.add_argument("--runs", type=int, default=3, help="of each setting")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a run is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    console, found = Console(), []
    try:
        with stopped_in_order(), tempfile.TemporaryDirectory(prefix="hetero-tuning-data-") as folder:
            write_records(None, Path(folder))
            pairs = [(engine, shape) for engine in options.engine for shape in options.shape]
            for engine, shape in pairs:
                if shape != "wait" or engine == "grpc":
                    found.append(compare(engine, shape, options, Path(folder), console))
    except BenchmarkFailed as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    passed = all(one["part_of_best"] >= LEAST_PART for one in found)
    for one in found:
        text = f"{one['engine']} {one['shape']}: auto has {one['part_of_best']:.3f} of {one['best']}"
        console.print(text, highlight=False)
    console.print("kept" if passed else "NOT KEPT")
    if options.json is not None:
        result = {"benchmark": "tuning", "required": LEAST_PART, "passed": passed, "compared": found}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
