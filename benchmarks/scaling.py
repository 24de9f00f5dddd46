"""How rows/s of the `grpc` engine grow with the number of workers.

    python benchmarks/scaling.py [--workers 1 2 4 8 16] [--seconds 6] [--json FILE]

The job waits 20 ms for each batch (as one does that reads from S3), so a worker gives at most 50 batches/s whatever the
machine has of CPUs, and what is measured is the engine. One worker is alone on the first data host; more are shared out
over two. Splits are of 4 batches: what an epoch's beginning and end cost does not hide what a split costs. Rows/s count
from the first batch of an epoch to its last, when every worker was connected before. Linear is the rate of one worker
times their number.

Exit status 1 if rows/s are less than 0.9 of linear anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from feed_cluster import RankInput, temporary_cluster
from rich.console import Console
from rich.table import Table
from virtual_hosts import BenchmarkFailed

LEAST_RATIO = 0.9
JOB = f"{Path(__file__).resolve().parent / 'jobs' / 'waiting.py'}:job"
BATCH_S, SPLIT_BATCHES, ROWS = 0.02, 4, 64


@dataclass(frozen=True)
class Scale:
    """What a number of workers came to.

    Attributes:
        workers: Over all data hosts.
        rows: Rows between the first batch and the last.
        took_s: Time between them.
        ratio: Rows/s over those of one worker times the number of workers.
    """

    workers: int
    rows: int
    took_s: float
    rows_per_s: float
    ratio: float


def measure(workers: int, seconds: float) -> tuple[int, float]:
    """Return (rows, seconds) from the first batch to the last.

    Raises:
        BenchmarkFailed: Rows were lost or came twice, or nothing came.
    """
    shared_out = (workers,) if workers == 1 else (workers - workers // 2, workers // 2)
    pieces = max(1, round(workers * seconds / (BATCH_S * SPLIT_BATCHES)))
    expected = pieces * SPLIT_BATCHES * ROWS
    params = {"pieces": pieces, "batches": SPLIT_BATCHES, "batch_s": BATCH_S}
    options = {"batch_size": ROWS, "params": params, "lease_s": 30.0}  # many processes start at once

    def work(rank: RankInput) -> tuple[int, float]:
        seen, began_s = 0, 0.0
        with rank.stream() as stream:
            for batch in stream.batches(0):
                began_s = began_s or time.monotonic()
                seen += int(batch.data["row"].sum())
        took_s = time.monotonic() - began_s
        if seen != expected * (expected - 1) // 2:
            raise BenchmarkFailed(f"the rows' numbers add up to {seen}, not to {expected * (expected - 1) // 2}")
        return expected - ROWS, took_s

    with temporary_cluster(JOB, data_hosts=len(shared_out), workers=shared_out, options=options) as cluster:
        cluster.wait_for_workers()
        (result,) = cluster.run(work, timeout_s=60 + 5 * seconds)
        if isinstance(result, BaseException):
            raise BenchmarkFailed(f"{result!r}\n{cluster.outputs()}") from result
        return result


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=6.0, help="length of an epoch if growth is linear")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.workers[0] != 1 or min(options.workers) < 1:
        parser.error(f"--workers is {options.workers}; it needs 1 first, which the others are compared with")
    console = Console()
    table = Table(title=f"Batches of {ROWS} rows that take {BATCH_S * 1000:g} ms each")
    for column in ("workers", "rows/s", "of linear"):
        table.add_column(column, justify="right")
    scales: list[Scale] = []
    for workers in options.workers:
        try:
            rows, took_s = measure(workers, options.seconds)
        except BenchmarkFailed as error:
            console.print(f"{workers} workers: {error}", markup=False, highlight=False)
            return 1
        rate = rows / took_s
        ratio = rate / (workers * (scales[0].rows_per_s if scales else rate))
        scales.append(Scale(workers, rows, took_s, rate, ratio))
        table.add_row(str(workers), f"{rate:.0f}", f"{ratio:.3f}")
    worst = min(scale.ratio for scale in scales)
    result = {
        "benchmark": "scaling",
        "cpus": len(os.sched_getaffinity(0)),
        "batch_s": BATCH_S,
        "split_batches": SPLIT_BATCHES,
        "batch_rows": ROWS,
        "scales": [asdict(scale) for scale in scales],
        "one_worker_of_ideal": scales[0].rows_per_s * BATCH_S / ROWS,
        "worst_ratio": worst,
        "required": {"worst_ratio": LEAST_RATIO},
        "passed": worst >= LEAST_RATIO,
    }
    console.print(table)
    console.print(
        f"One worker gave {result['one_worker_of_ideal']:.3f} of what it waits for. Least of linear: {worst:.3f}; "
        f"required: at least {LEAST_RATIO:g}: {'kept' if result['passed'] else 'NOT KEPT'}",
        highlight=False,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
