"""What a local worker takes from a training loop under a CPU quota, with and without pacing.

    python benchmarks/pacing.py [--quota 0.4] [--rounds 3] [--seconds 15] [--threads 1] [--step-ms 40] [--json FILE]

A control group with a quota stands for a trainer host's container; needs root and a writable hierarchy of control
groups. In it, under a supervisor as a launcher has it: a training loop whose simulated accelerator takes --step-ms a
step and no CPU, and whose own code takes --work-ms of CPU; and a worker that would use all CPUs it gets, in so many
threads. In turn, --rounds times: no worker, a worker at the lowest priority, a worker that is paced as well.

Printed, medians: **used**, the part of the quota that the group used; **worker**, the worker's part; **stall**, the
part of the time in which the simulated accelerator did nothing, late wake-ups and the loop's own code included;
**late**, steps that began more than 5 ms after the one before had ended; **throttled**, the part of the kernel's
periods in which the group was kept from running, and **throttled_s** for how many seconds in each, summed over CPUs;
**pacer**, CPUs that pacing itself takes.

Exit status 1 if pacing leaves more than 5 % of the quota unused, or if the accelerator does nothing for more than 1 %
of the time beyond what it does without a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hetero.process.child import ChildSpec, clock_of, die_with_parent
from hetero.process.cpu_quota import CpuQuota, tightest_quota
from hetero.process.group import ChildEnded
from hetero.process.pacer import Pacer
from hetero.process.priority import yield_to_others
from hetero.process.supervisor import Supervisor

MODES = ("none", "priority", "paced")
LEAST_USED, MOST_STALL, LATE_S = 0.95, 0.01, 0.005
WARM_UP_S = 3.0
COLUMNS = ("used", "worker", "stall", "late", "throttled", "throttled_s", "pacer", "margin")
ROOTS = {1: Path("/sys/fs/cgroup/cpu"), 2: Path("/sys/fs/cgroup")}
HERE = Path(__file__).resolve()


@contextlib.contextmanager
def group_of(quota: float) -> Iterator[Path]:
    """Make a control group with a quota, and the greatest weight beside whatever else runs; remove it afterwards."""
    version = 2 if (ROOTS[2] / "cgroup.controllers").exists() else 1
    path = ROOTS[version] / f"hetero-pacing-{os.getpid()}"
    path.mkdir()
    try:
        if version == 2:
            (path / "cpu.max").write_text(f"{int(quota * 1e5)} 100000", encoding="ascii")
            (path / "cpu.weight").write_text("10000", encoding="ascii")
        else:
            (path / "cpu.shares").write_text("262144", encoding="ascii")
            (path / "cpu.cfs_quota_us").write_text(str(int(quota * 1e5)), encoding="ascii")
        yield path
    finally:
        path.rmdir()


def loop(seconds: float, step_s: float, work_s: float) -> dict[str, Any]:
    """Train: wait for the accelerator, then do one's own work; return how long the accelerator had none."""
    time.sleep(WARM_UP_S)
    end_s = time.monotonic() + seconds
    idle_s = busy_s = 0.0
    late = steps = 0
    begun_s = time.monotonic()
    while begun_s < end_s:
        time.sleep(step_s)
        used_s = time.thread_time() + work_s
        while time.thread_time() < used_s:
            pass
        now_s = time.monotonic()
        gap_s = now_s - (begun_s + step_s)
        idle_s, busy_s, steps, late, begun_s = (
            idle_s + gap_s,
            busy_s + step_s,
            steps + 1,
            late + (gap_s > LATE_S),
            now_s,
        )
    return {"stall": idle_s / (idle_s + busy_s), "late": late / steps}


def burn(threads: int) -> None:
    """Use all CPUs, without holding Python's lock."""
    for _ in range(threads - 1):
        threading.Thread(target=burn, args=(1,), daemon=True).start()
    while True:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2000)


def host(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Be a trainer host's launcher for a while; return what happened."""
    own: tuple[str, ...] = (
        sys.executable,
        str(HERE),
        "--seconds",
        str(options.seconds),
        "--step-ms",
        str(options.step_ms),
    )
    own += ("--work-ms", str(options.work_ms), "--threads", str(options.threads), "--be")
    quota = tightest_quota()
    if quota is None:
        raise SystemExit("there is no quota to be seen here")
    with Supervisor(grace_s=2.0) as supervisor:
        if mode != "none":
            supervisor.start(ChildSpec("worker", (*own, "worker"), dict(os.environ)))
        supervisor.start(ChildSpec("loop", (*own, "loop"), dict(os.environ), log_path=options.log))
        pacer = Pacer(supervisor.living, lambda name: name == "worker", quota, lanes=options.threads)
        if mode == "paced":
            pacer.start()
        time.sleep(WARM_UP_S)
        result = measure(supervisor, quota, options.seconds)
        while not isinstance(supervisor.next_event(10.0), ChildEnded):
            pass
        pacer.close()
        result["margin"], result["cpus"] = pacer.margin, pacer.cpus
    told: dict[str, Any] = json.loads(options.log.read_text(encoding="utf-8").splitlines()[-1])
    return result | told


def measure(supervisor: Supervisor, quota: CpuQuota, seconds: float) -> dict[str, Any]:
    """Return what the group and its processes used in so many seconds."""

    def now() -> tuple[Any, ...]:
        clocks = {child.spec.name: time.clock_gettime(clock_of(child.pid)) for child in supervisor.living()}
        return quota.read(), clocks, time.process_time(), time.monotonic()

    first = now()
    time.sleep(seconds - 0.5)
    last = now()
    took_s = last[3] - first[3]
    used = {name: (used_s - first[1][name]) / took_s for name, used_s in last[1].items()}
    own = (last[2] - first[2]) / took_s
    periods = last[0].periods - first[0].periods
    return {
        "used": (sum(used.values()) + own) / quota.cpus,
        "worker": used.get("worker", 0.0) / quota.cpus,
        "pacer": own,
        "throttled": periods and (last[0].throttled_periods - first[0].throttled_periods) / periods,
        "throttled_s": (last[0].throttled_s - first[0].throttled_s) / took_s,
    }


def run(mode: str, group: Path) -> dict[str, Any]:
    """Run one host in its group."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    log = Path(tempfile.gettempdir(), f"{group.name}.log")
    argv = [sys.executable, str(HERE), *sys.argv[1:], "--log", str(log), "--be", mode]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=enter) as process:  # noqa: PLW1509
        out, _ = process.communicate()
    log.unlink(missing_ok=True)
    if process.returncode:
        raise SystemExit(f"the host ended with exit code {process.returncode}")
    return dict(json.loads(out.splitlines()[-1]))


def table_of(medians: dict[str, dict[str, float]]) -> Table:
    """Return the medians as a table."""
    table = Table(title="A training loop and a worker under a CPU quota")
    for column in ("", *COLUMNS):
        table.add_column(column, justify="right")
    for mode, values in medians.items():
        table.add_row(mode, *(f"{values[column]:.3f}" for column in COLUMNS))
    return table


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quota", type=float, default=0.4, help="CPUs")
    parser.add_argument("--rounds", type=int, default=3, help="of all modes")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a measurement")
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the simulated accelerator")
    parser.add_argument("--work-ms", type=float, default=0.2, help="CPU time of the loop's own code in a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quota <= 0 or options.rounds < 1 or options.seconds < 2:
        parser.error("--quota needs more than 0, --rounds 1 or more, --seconds 2 or more")
    return options


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = parse()
    if options.be in ("loop", "worker"):
        die_with_parent()
        if options.be == "worker":
            yield_to_others()
            burn(options.threads)
        print(json.dumps(loop(options.seconds, options.step_ms / 1e3, options.work_ms / 1e3)), flush=True)
        return 0
    if options.be:
        print(json.dumps(host(options.be, options)), flush=True)
        return 0
    console = Console()
    rounds = []
    with group_of(options.quota) as group:
        for _ in range(options.rounds):
            rounds.append({mode: run(mode, group) for mode in MODES})
            console.print(table_of(rounds[-1]))
    medians = {mode: {c: statistics.median(one[mode][c] for one in rounds) for c in COLUMNS} for mode in MODES}
    more = statistics.median(one["paced"]["stall"] - one["none"]["stall"] for one in rounds)
    passed = medians["paced"]["used"] >= LEAST_USED and more <= MOST_STALL
    settings = {
        name: getattr(options, name) for name in ("quota", "rounds", "seconds", "threads", "step_ms", "work_ms")
    }
    required = {"used": LEAST_USED, "stall_more_than_without": MOST_STALL}
    result = {"benchmark": "pacing", **settings, "cpus": os.cpu_count(), "medians": medians, "rounds": rounds}
    result |= {"stall_more_than_without": more, "required": required, "passed": passed}
    console.print(table_of(medians))
    console.print("kept" if passed else "NOT KEPT")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
