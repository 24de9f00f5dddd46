"""What hetero costs beside the training itself: the time until the first step, and the CPU of supervision.

    python benchmarks/startup.py [--rounds 3] [--timeline] [--json FILE]

Three things are measured in one run, on the same machine in the same state:

alone        A plain process (model_alone.py) imports TensorFlow and builds the demo's model: from the start of the
             process until the model is built.
first step   examples/digits/job.py on virtual hosts, heterogeneous (one data host, one trainer host with one rank) and
             homogeneous (the trainer host alone): from the start of the first launcher.py until rank 0 is handed its
             first batch, which is when its first step begins. Interpreter and imports of the launcher are in it, as are
             the import of TensorFlow and the building of the model; the tracing of the step, which the same loop would
             need without hetero, is not. Each job is paired with a run alone just before it; what counts is the median
             of the differences, at most 3 s. (`first_batch_s` of summary.json is less: it counts from the launcher's
             main().)
supervision  CPU time of launcher and janitor of each host, over at least 20 s in which the heterogeneous job trains and
             nothing else happens, as /proc has it: under 1 % of a CPU on each host. The coordinator is shown beside.

Exit status 1 if a requirement does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from timeline import MOMENTS_VARIABLE, Observer, as_json, cpu_count, read_moments, timeline_table
from virtual_hosts import BenchmarkFailed, VirtualHosts, clean_environment

from hetero.job_file import read_declaration

MOST_EXTRA_S = 3.0
MOST_CPU_SHARE = 0.01
FOLDER = Path(__file__).resolve().parent
JOB = f"{FOLDER / 'jobs' / 'digits_timed.py'}:job"
BATCH_SIZE = read_declaration(f"{FOLDER.parent / 'examples' / 'digits' / 'job.py'}:job").defaults["batch_size"]
OPTIONS = ("--ranks-per-host=1", f"--batch-size={BATCH_SIZE}")
KINDS = {"heterogeneous": 1, "homogeneous": 0}  # data hosts
_SETTLE_S = 5.0
_JOB_S = 300.0


@dataclass(frozen=True)
class Alone:
    """A plain process: seconds from its start until TensorFlow is imported, and until the model is built."""

    import_s: float
    model_s: float


@dataclass(frozen=True)
class Start:
    """A job's start, in seconds from the start of the first launcher.py.

    Attributes:
        first_batch_s: Rank 0 was handed its first batch.
        first_step_s: Its first step was done, tracing included.
        summary_first_batch_s: What summary.json says, counted from the chief's launcher's main().
        extra_s: `first_batch_s` less what the plain process before it took.
    """

    first_batch_s: float
    first_step_s: float
    summary_first_batch_s: float
    extra_s: float


@dataclass(frozen=True)
class Supervision:
    """CPU shares in steady state, 1.0 is one CPU: launcher with janitor by host, and the coordinator's process."""

    window_s: float
    steps: int
    hosts: dict[str, float]
    coordinator: float

    @property
    def together(self) -> float:
        """All of it, over all hosts."""
        return sum(self.hosts.values()) + self.coordinator


def start_alone() -> Alone:
    """Return what a plain process takes."""
    started_s = time.time()
    done = subprocess.run(
        [sys.executable, str(FOLDER / "model_alone.py")],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode:
        raise BenchmarkFailed(f"model_alone.py failed with exit code {done.returncode}\n{done.stderr[-2000:]}")
    moments = json.loads(done.stdout.splitlines()[-1])
    return Alone(moments["tensorflow"] - started_s, moments["model"] - started_s)


def start_job(folder: Path, data_hosts: int, alone: Alone) -> Start:
    """Return how long the demo's job takes to its first step."""
    notes = folder / "moments.jsonl"
    with VirtualHosts(
        folder,
        JOB,
        data_hosts=data_hosts,
        trainer_hosts=1,
        options=OPTIONS,
        environment={MOMENTS_VARIABLE: str(notes)},
    ) as hosts:
        started_s = hosts.start()
        hosts.wait(_JOB_S)
        summary = hosts.summary()
    moments = read_moments(notes)
    first_batch_s = moments["rank: first batch"] - started_s
    first_step_s = moments["rank: first step done"] - started_s
    return Start(first_batch_s, first_step_s, summary["first_batch_s"], first_batch_s - alone.model_s)


def observe_start(folder: Path, data_hosts: int) -> tuple[float, dict[str, float]]:
    """Run the job until its first step is done; return when it was started and what happened when."""
    notes = folder / "moments.jsonl"
    with VirtualHosts(
        folder,
        JOB,
        data_hosts=data_hosts,
        trainer_hosts=1,
        options=OPTIONS,
        environment={MOMENTS_VARIABLE: str(notes)},
    ) as hosts:
        observer = Observer(hosts)
        try:
            started_s = hosts.start()
            wait_for_first_step(hosts, notes)
        finally:
            observer.close()
    return started_s, observer.moments | read_moments(notes)


def wait_for_first_step(hosts: VirtualHosts, notes: Path) -> None:
    """Wait until rank 0 has done its first step."""
    deadline_s = time.monotonic() + _JOB_S
    while "rank: first step done" not in read_moments(notes):
        if hosts.over or time.monotonic() > deadline_s:
            raise BenchmarkFailed(f"the first step did not come\n{hosts.outputs()}")
        time.sleep(0.2)


def supervise(folder: Path, window_s: float) -> Supervision:
    """Return what supervision costs while the heterogeneous job trains."""
    notes = folder / "moments.jsonl"
    with VirtualHosts(
        folder,
        JOB,
        data_hosts=1,
        trainer_hosts=1,
        options=(*OPTIONS, "--epochs=100000"),
        environment={MOMENTS_VARIABLE: str(notes)},
    ) as hosts:
        hosts.start()
        wait_for_first_step(hosts, notes)
        coordinator = psutil.Process(hosts.pid(hosts.cluster.data_hosts[0], "coordinator", 10.0))
        watched = {host: supervisors_of(pid) for host, pid in hosts.pids.items()}
        time.sleep(_SETTLE_S)
        began_s, steps, before = time.monotonic(), steps_of(hosts), {h: cpu_s(*p) for h, p in watched.items()}
        coordinator_s = cpu_s(coordinator)
        time.sleep(window_s)
        took_s = time.monotonic() - began_s
        hosts_s = {host: cpu_s(*processes) - before[host] for host, processes in watched.items()}
        coordinator_s = cpu_s(coordinator) - coordinator_s
        if hosts.over:
            raise BenchmarkFailed(f"the job ended while it was watched\n{hosts.outputs()}")
        return Supervision(
            window_s=took_s,
            steps=steps_of(hosts) - steps,
            hosts={host: used_s / took_s for host, used_s in hosts_s.items()},
            coordinator=coordinator_s / took_s,
        )


def supervisors_of(launcher: int) -> list[psutil.Process]:
    """Return a launcher and its janitor."""
    process = psutil.Process(launcher)
    janitors = [child for child in process.children() if any("janitor" in word for word in child.cmdline())]
    if len(janitors) != 1:
        raise BenchmarkFailed(f"launcher {launcher} has {len(janitors)} janitors, not one")
    return [process, *janitors]


def cpu_s(*processes: psutil.Process) -> float:
    """Return the CPU seconds of processes so far, to 10 ms each, without those of their children."""
    times = [process.cpu_times() for process in processes]
    return sum(time.user + time.system for time in times)


def steps_of(hosts: VirtualHosts) -> int:
    """Return how many steps rank 0 has written down so far."""
    path = hosts.run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def starts_table(alone: dict[str, list[Alone]], starts: dict[str, list[Start]]) -> Table:
    """Return all starts as a table, in seconds."""
    table = Table(title="Seconds until the first step")
    for column in ("", "round", "alone", "first batch", "extra", "summary's", "first step done"):
        table.add_column(column, justify="right" if column else "left")
    for kind, found in starts.items():
        for number, (plain, start) in enumerate(zip(alone[kind], found, strict=True), 1):
            table.add_row(
                kind if number == 1 else "",
                str(number),
                f"{plain.model_s:.2f}",
                f"{start.first_batch_s:.2f}",
                f"{start.extra_s:+.2f}",
                f"{start.summary_first_batch_s:.2f}",
                f"{start.first_step_s:.2f}",
            )
    return table


def supervision_table(supervision: Supervision) -> Table:
    """Return the CPU shares as a table."""
    table = Table(title=f"CPU of supervision over {supervision.window_s:.0f} s, {supervision.steps} steps of training")
    table.add_column("what")
    table.add_column("% of a CPU", justify="right")
    for host, share in supervision.hosts.items():
        table.add_row(f"{host}: launcher and janitor", f"{100 * share:.2f}")
    table.add_row("coordinator", f"{100 * supervision.coordinator:.2f}")
    table.add_row("all together", f"{100 * supervision.together:.2f}")
    return table


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for one run."""
    return tempfile.TemporaryDirectory(prefix="hetero-startup-")


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--window-s", type=float, default=20.0, help="how long supervision is watched")
    parser.add_argument(
        "--timeline", action="store_true", help="show what happens when, in one more start of each kind"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.rounds < 1 or options.window_s < 1:
        parser.error("--rounds and --window-s need 1 or more")
    console = Console()
    try:
        result = run(console, options.rounds, options.window_s, timeline=options.timeline)
    except BenchmarkFailed as error:
        console.print(f"{error}", markup=False, highlight=False)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


def run(console: Console, rounds: int, window_s: float, *, timeline: bool) -> dict[str, Any]:
    """Measure everything, show it, and return it as JSON values."""
    alone: dict[str, list[Alone]] = {kind: [] for kind in KINDS}
    starts: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    if sys.dont_write_bytecode:
        console.print(
            "PYTHONDONTWRITEBYTECODE is set: every process may have to compile all that it imports", style="bold"
        )
    start_alone()  # fills the page cache and, where it may, the bytecode cache, for both sides
    for number in range(rounds):
        for kind, data_hosts in KINDS.items():
            plain = start_alone()
            with scratch() as folder:
                start = start_job(Path(folder), data_hosts, plain)
            alone[kind].append(plain)
            starts[kind].append(start)
            console.print(f"round {number + 1} of {rounds}, {kind}: {start.extra_s:+.2f} s", highlight=False)
    with scratch() as folder:
        supervision = supervise(Path(folder), window_s)
    console.print(starts_table(alone, starts))
    console.print(supervision_table(supervision))
    timelines = {}
    for kind, data_hosts in KINDS.items() if timeline else ():
        with scratch() as folder:
            started_s, moments = observe_start(Path(folder), data_hosts)
        console.print(timeline_table(f"{kind}: seconds since the first launcher's start", started_s, moments))
        timelines[kind] = as_json(started_s, moments)
    extra_s = {kind: statistics.median(start.extra_s for start in found) for kind, found in starts.items()}
    passed = {
        **{f"extra_s of the {kind} job": value <= MOST_EXTRA_S for kind, value in extra_s.items()},
        **{f"CPU of {host}": share < MOST_CPU_SHARE for host, share in supervision.hosts.items()},
    }
    for kind, value in extra_s.items():
        console.print(
            f"{kind}: {value:+.2f} s (median of {rounds}) until the first step; required: at most {MOST_EXTRA_S:g} s: "
            f"{verdict(passed[f'extra_s of the {kind} job'])}",
            highlight=False,
            soft_wrap=True,
        )
    shares = ", ".join(f"{host} {100 * share:.2f} %" for host, share in supervision.hosts.items())
    console.print(
        f"supervision: {shares} of a CPU; required: under {100 * MOST_CPU_SHARE:g} % on each host: "
        f"{verdict(all(share < MOST_CPU_SHARE for share in supervision.hosts.values()))}",
        highlight=False,
        soft_wrap=True,
    )
    return {
        "benchmark": "startup",
        "cpus": cpu_count(),
        "writes_bytecode": not sys.dont_write_bytecode,
        "alone": {kind: [asdict(plain) for plain in found] for kind, found in alone.items()},
        "starts": {kind: [asdict(start) for start in found] for kind, found in starts.items()},
        "extra_s": extra_s,
        "supervision": {**asdict(supervision), "together": supervision.together},
        "timelines": timelines,
        "required": {"extra_s": MOST_EXTRA_S, "cpu_share_of_a_host": MOST_CPU_SHARE},
        "kept": passed,
        "passed": all(passed.values()),
    }


def verdict(kept: bool) -> str:
    """Return how to say whether a requirement holds."""
    return "kept" if kept else "NOT KEPT"


if __name__ == "__main__":
    sys.exit(main())
