"""What feed and rank of the `grpc` engine hold at most while the consumer does not consume.

    python benchmarks/feed_memory.py [--seconds 20] [--buffer-bytes N] [--prefetch-bytes N] [--json FILE]

A data host prepares batches of 25.7 MB as fast as it can; the rank, a process of its own, takes one and sleeps. By then
every buffer on the way is full. Peak is VmHWM of /proc, set back before the first batch, less what the process had
then: the feed's against --buffer-bytes, the rank's against --prefetch-bytes. A feed's pages of its workers' shared
memory count as the kernel counts them; what each worker holds is shown beside.

Exit status 1 if a peak is more than 1.25 times its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from feed_cluster import FeedCluster, RankInput, temporary_cluster
from rich.console import Console
from rich.table import Table
from virtual_hosts import BenchmarkFailed, clean_environment

from hetero.host import HostConfig
from hetero.options import MIB
from hetero.process.child import die_with_parent

MOST_RATIO = 1.25
FOLDER = Path(__file__).resolve().parent
ROWS, WORKERS = 8192, 2
BATCH_BYTES = ROWS * 28 * 28 * 4
HOST = "data-1"
_RANK = "rank"


def peak_bytes(pid: int | str = "self") -> int:
    """Return VmHWM of a process: the most memory it had at a time."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise BenchmarkFailed(f"/proc/{pid}/status has no VmHWM; this benchmark needs Linux")
    return int(found[1]) * 1024


def base_bytes(pid: int | str = "self") -> int:
    """Set a process's peak back to what it has now, and return that."""
    with contextlib.suppress(PermissionError):  # then the peak of its start counts as its base
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return peak_bytes(pid)


def be_rank(seconds: float) -> None:
    """Be the rank: take one batch, sleep, and tell of the peak on standard output."""
    die_with_parent(os.getppid())
    rank = RankInput(HostConfig.from_json(sys.stdin.readline()), 0, 1)
    base = base_bytes()
    with contextlib.closing(rank), rank.stream() as stream:
        batches = stream.batches(0)
        batch = next(batches)
        time.sleep(seconds)
        print(json.dumps({"base_bytes": base, "peak_bytes": peak_bytes(), "rows": batch.rows}), flush=True)


def sleep_beside(cluster: FeedCluster, seconds: float) -> dict[str, Any]:
    """Run the rank's process and return what it said.

    Raises:
        BenchmarkFailed: It failed.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), _RANK, str(seconds)],
        input=cluster.config.to_json() + "\n",
        env=clean_environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=seconds + 120,
    )
    if done.returncode:
        raise BenchmarkFailed(f"the rank ended with {done.returncode}\n{done.stderr[-3000:]}\n{cluster.outputs()}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def measure(seconds: float, buffer_bytes: int, prefetch_bytes: int) -> dict[str, dict[str, float]]:
    """Return base, peak and bound of each process."""
    enough = 4 * (buffer_bytes + prefetch_bytes) // BATCH_BYTES + 64  # more than can be held anywhere
    settings = {
        "batch_size": ROWS,
        "buffer_bytes": buffer_bytes,
        "prefetch_bytes": prefetch_bytes,
        "params": {"windows": "", "rows": ROWS, "count": enough},
    }
    with temporary_cluster(
        f"{FOLDER / 'jobs' / 'windows.py'}:job", data_hosts=1, workers=WORKERS, options=settings
    ) as cluster:
        cluster.wait_for_workers()
        names = ("feed", *(f"worker-{n}" for n in range(WORKERS)))
        pids = {name: cluster.process(HOST, name).wait_alive() for name in names}
        bases = {name: base_bytes(pid) for name, pid in pids.items()}
        rank = sleep_beside(cluster, seconds)
        peaks = {name: peak_bytes(pid) for name, pid in pids.items()}
        if any(cluster.process(HOST, name).deaths for name in names):
            raise BenchmarkFailed(f"a process of the data host died\n{cluster.outputs()}")
    bounds = {"feed": buffer_bytes} | {f"worker-{n}": buffer_bytes / WORKERS for n in range(WORKERS)}
    found = {name: _figures(bases[name], peaks[name], bounds[name]) for name in names}
    return {"rank": _figures(rank["base_bytes"], rank["peak_bytes"], prefetch_bytes), **found}


def _figures(base: int, peak: int, bound: float) -> dict[str, float]:
    return {"base_bytes": base, "peak_bytes": peak, "bound_bytes": bound, "ratio": (peak - base) / bound}


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the consumer sleeps")
    parser.add_argument("--buffer-bytes", type=int, default=512 * MIB)
    parser.add_argument("--prefetch-bytes", type=int, default=256 * MIB)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    console = Console()
    try:
        found = measure(options.seconds, options.buffer_bytes, options.prefetch_bytes)
    except BenchmarkFailed as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    table = Table(title=f"MB more than before the first batch, after {options.seconds:g} s without consuming")
    for column in ("", "before", "more at peak", "bound", "ratio"):
        table.add_column(column, justify="right")
    for name, values in found.items():
        more = values["peak_bytes"] - values["base_bytes"]
        cells = (f"{size / 1e6:.0f}" for size in (values["base_bytes"], more, values["bound_bytes"]))
        table.add_row(name, *cells, f"{values['ratio']:.2f}")
    worst = max(found[name]["ratio"] for name in ("rank", "feed"))
    result = {
        "benchmark": "feed_memory",
        "batch_bytes": BATCH_BYTES,
        "seconds": options.seconds,
        "workers": WORKERS,
        "processes": found,
        "worst_ratio": worst,
        "required": {"worst_ratio": MOST_RATIO},
        "passed": worst <= MOST_RATIO,
    }
    console.print(table)
    console.print(
        f"Feed and rank: at most {worst:.2f} of their bound; required: at most {MOST_RATIO:g}: "
        f"{'kept' if result['passed'] else 'NOT KEPT'}",
        highlight=False,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK]:
        be_rank(float(sys.argv[2]))
    else:
        sys.exit(main())
