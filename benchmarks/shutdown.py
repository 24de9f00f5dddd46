"""How long data hosts outlive training: from the end of the chief's training process to the last data host's exit.

    python benchmarks/shutdown.py [--runs 10] [--trainer-hosts 1] [--json FILE]

Each run is a whole job on virtual hosts under `tf_data`: two data hosts, and a chief whose rank 0 ends by itself. Time
starts when the kernel reports the end of rank 0's process (pidfd) and stops when the last data host's launcher, a child
of this process, has been waited for. In between lie: the chief's launcher reaps its rank, tells the coordinator; the
data hosts' launchers hear of it, end their workers, dispatcher and coordinator, and exit.

Exit status 1 if the median is over 1 s or the worst over 2 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from virtual_hosts import BenchmarkFailed, ProcessEnd, VirtualHosts

MEDIAN_S = 1.0
WORST_S = 2.0
DATA_HOSTS = 2
JOB = Path(__file__).parent / "jobs" / "light.py"
_START_S = 120.0
_TRAIN_S = 120.0


@dataclass(frozen=True)
class Run:
    """One run; times are seconds after the end of rank 0's process.

    Attributes:
        last_data_host_s: The last data host's launcher had exited.
        hosts_s: Each host's launcher had exited.
    """

    last_data_host_s: float
    hosts_s: dict[str, float]


def measure(folder: Path, trainer_hosts: int) -> Run:
    """Run one job and return how long its hosts outlived rank 0.

    Raises:
        BenchmarkFailed: The job did not end well.
    """
    with VirtualHosts(folder, f"{JOB}:job", data_hosts=DATA_HOSTS, trainer_hosts=trainer_hosts) as hosts:
        hosts.start()
        rank = ProcessEnd(hosts.pid(hosts.cluster.trainer_hosts[0], "rank-0", _START_S), "hetero.children", "rank")
        rank_ended_s = rank.wait(_TRAIN_S)
        exits = hosts.wait(30.0)
        if hosts.summary()["outcome"] != "succeeded":
            raise BenchmarkFailed(f"the job did not succeed\n{hosts.outputs()}")
    after_s = {host: end.ended_s - rank_ended_s for host, end in exits.items()}
    return Run(max(after_s[host] for host in hosts.cluster.data_hosts), after_s)


def table_of(runs: list[Run]) -> Table:
    """Return the runs as a table, in seconds."""
    table = Table(title="Seconds from the end of rank 0's process to the exit of each host's launcher")
    hosts = list(runs[0].hosts_s)
    for column in ("run", *hosts, "last data host"):
        table.add_column(column, justify="right")
    for number, run in enumerate(runs, 1):
        table.add_row(str(number), *(f"{run.hosts_s[host]:.3f}" for host in hosts), f"{run.last_data_host_s:.3f}")
    return table


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--trainer-hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}; it needs 1 or more")
    console = Console()
    runs: list[Run] = []
    for number in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="hetero-shutdown-") as folder:
            try:
                runs.append(measure(Path(folder), options.trainer_hosts))
            except BenchmarkFailed as error:
                console.print(f"run {number + 1}: {error}", markup=False, highlight=False)
                return 1
        console.print(f"run {number + 1} of {options.runs}: {runs[-1].last_data_host_s:.3f} s", highlight=False)
    times_s = [run.last_data_host_s for run in runs]
    median_s, worst_s = statistics.median(times_s), max(times_s)
    passed = median_s <= MEDIAN_S and worst_s <= WORST_S
    result = {
        "benchmark": "shutdown",
        "data_hosts": DATA_HOSTS,
        "trainer_hosts": options.trainer_hosts,
        "runs": [asdict(run) for run in runs],
        "median_s": median_s,
        "worst_s": worst_s,
        "required": {"median_s": MEDIAN_S, "worst_s": WORST_S},
        "passed": passed,
    }
    console.print(table_of(runs))
    console.print(
        f"Last data host after {median_s:.3f} s (median), {worst_s:.3f} s (worst) of {len(runs)} runs; required: "
        f"at most {MEDIAN_S:g} s and {WORST_S:g} s: {'kept' if passed else 'NOT KEPT'}",
        highlight=False,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
