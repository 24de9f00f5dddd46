"""Runs one cell of the table of ends: cluster, fault, ends, and what is wrong with them.

What a cell has to show is in `hetero`'s promise (docs/failures.md); here it is compared with what happened, by looking
only at exit codes, `output/failure`, the rows that ranks wrote down, the clock, and the processes that are left.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

from local_job import REPOSITORY, wait_until
from sagemaker_cluster import End, SageMakerCluster

from ends.faults import Fault, Injected, Scene, own_clock, small_disk, taken_ports

LEASE_S = 5.0
BOUND_S = LEASE_S + 10
"""Within this after its fault a job has ended on every host, or trains again."""
PAUSE_S = 1.0
"""A longer time in which no rank takes a step counts as a pause of training."""
START_S = 240.0
"""How long the hosts may take until training runs: long, because several clusters start at once on few CPUs."""
STEPS_BEFORE = 12
_HERE = Path(__file__).parent
_SOURCE = "/opt/ml/input/source"
_LIGHT_TRAIN = """import os, sys
if len(sys.orig_argv) > 1 and os.path.basename(sys.orig_argv[1]) == "train":
    sys.modules["tensorflow"] = None
"""
"""`train` imports TensorFlow, where it is installed, to know the names of its errors: in each cell four times, and half
of all CPU time."""
_JOBS = {"grpc": _HERE / "steps.py", "tf_data": _HERE / "graph_steps.py"}
_ROWS = {"rows": 80, "pieces": 10}
TOTAL_ROWS = _ROWS["rows"] * _ROWS["pieces"]
FAILURE_CHARS = 1024


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Hosts are called by what they are in the job: `chief` and `other` train, `first` and `second` prepare input.

    Attributes:
        name: What happens, in words.
        fault: What happens to `on` once training runs; None where the fault is there from the start.
        on: Which host.
        codes: The launchers' exit codes by host; None: there is none, because the host was switched off. Negative:
            ended by that signal. A host that is not named ends with 0.
        causes: A regular expression for output/failure by host; a host that is not named must have none.
        goes_on: Whether training must be running again within `BOUND_S`, else the job ends by then.
        engine: `grpc` or `tf_data`.
        data: Number of data hosts.
        options: Further hyperparameters.
        own_clock: Hosts whose wall clock can be set.
        small_disk: Hosts whose output folder is a small disk.
        ports: Ports of `on` that somebody has taken before the job starts.
        late_s: How long `on` comes after the others.
        at_start: Whether `fault` does not wait for training.
        train_code: Exit code of `train` on `on`, where it is not what follows from the launcher's.
        exact: Whether every row must be seen once an epoch where the job goes on; else no row may be seen twice.
    """

    name: str
    fault: Fault | None = None
    on: str = ""
    codes: Mapping[str, int | None] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)
    goes_on: bool = False
    engine: str = "grpc"
    data: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    own_clock: tuple[str, ...] = ()
    small_disk: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    late_s: float = 0.0
    at_start: bool = False
    train_code: int | None = None
    exact: bool = True


@dataclass
class Outcome:
    """What became of a cell.

    Attributes:
        cell: Its name.
        proof: How it is known that the fault happened.
        codes: Exit code of each host's launcher, None where there is none.
        train_codes: Exit code of `train` on each host.
        success: Whether `train` left its success file.
        out_s: Seconds from the fault until the host was out, by host.
        again_s: Seconds from the fault to the end of the last pause of training; 0 without a pause, None if it ended.
        causes: output/failure by host.
        problems: What is not as it has to be; empty if all is well.
        hang: Whether a host was still running when the time was up.
        seconds: How long all of it took.
    """

    cell: str
    proof: str = ""
    codes: dict[str, int | None] = field(default_factory=dict)
    train_codes: dict[str, int] = field(default_factory=dict)
    success: dict[str, bool] = field(default_factory=dict)
    out_s: dict[str, float] = field(default_factory=dict)
    again_s: float | None = None
    causes: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hang: bool = False
    seconds: float = 0.0


def make_cluster(folder: Path, engine: str, data: int, options: Mapping[str, Any]) -> SageMakerCluster:
    """Return a cluster of two trainer hosts and some data hosts, with a lease of `LEASE_S`."""
    slow = {"prepare-s": 0.1} if engine == "grpc" else {}
    given = {"lease-s": LEASE_S, "workers-per-host": 1, "epochs": 3, "seed": 1, **_ROWS, **slow, **options}
    light = {"sources": {"sitecustomize.py": _LIGHT_TRAIN}, "environment": {"PYTHONPATH": f"{_SOURCE}:{REPOSITORY}"}}
    return SageMakerCluster(folder, data, 2, _JOBS[engine], given, tensorflow=engine == "tf_data", **light)


def by_part(cluster: SageMakerCluster) -> dict[str, str]:
    """Return the name of the host for each part that a host plays."""
    parts = dict(zip(("first", "second"), cluster.data_hosts, strict=False))
    return dict(zip(("chief", "other"), cluster.trainer_hosts, strict=True)) | parts


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Run a cell once; whatever is wrong is in the outcome."""
    outcome, started_s = Outcome(cell.name), time.monotonic()
    folder.mkdir(parents=True)
    with make_cluster(folder, cell.engine, cell.data, cell.options) as cluster:
        scene = Scene(cluster, folder)
        with scene.clean_up:
            try:
                injected = _start(cell, scene)
                outcome.proof = injected.proof
                _wait(cell, scene, injected, outcome)
            except AssertionError as error:
                outcome.problems.append(str(error))
                outcome.hang = " still run" in str(error)
    outcome.seconds = time.monotonic() - started_s
    return outcome


def _start(cell: Cell, scene: Scene) -> Injected:
    """Start the hosts and let the fault happen."""
    cluster, hosts = scene.cluster, by_part(scene.cluster)
    for part in cell.small_disk:
        small_disk(scene, hosts[part])
    late = hosts[cell.on] if cell.late_s else None
    if cell.ports:
        scene.clean_up.enter_context(taken_ports(scene, hosts[cell.on], *cell.ports))
    for part, host in hosts.items():
        if host != late:
            cluster.start(host, environment=own_clock(scene, host) if part in cell.own_clock else None)
    if late is not None:
        time.sleep(cell.late_s)
        assert late not in cluster.running(), f"{late} was there before its time"
        needed = cell.on != "second"
        assert not (needed and scene.steps()), f"training began without {late}"
        cluster.start(late)
        return Injected(time.monotonic(), f"{late} was started {cell.late_s:g} s after the others")
    if cell.fault is None:
        return Injected(time.monotonic(), f"ports {cell.ports} of {cell.on} were taken before it started")
    if cell.at_start:
        return cell.fault(scene, hosts[cell.on])
    wait_until("training", lambda: scene.steps() >= STEPS_BEFORE or not cluster.running(), START_S)
    assert scene.steps() >= STEPS_BEFORE, f"the job ended before its fault\n{cluster.logs()}"
    return cell.fault(scene, hosts[cell.on])


def _wait(cell: Cell, scene: Scene, injected: Injected, outcome: Outcome) -> None:
    cluster, hosts = scene.cluster, by_part(scene.cluster)
    ends = cluster.wait(START_S if cell.goes_on else BOUND_S + 30)
    left = {part: left for part, host in hosts.items() if (left := left_on(scene, host))}
    for part, host in hosts.items():
        end = ends[host]
        code = launcher_code(end, cluster.log(host))
        outcome.codes[part], outcome.train_codes[part] = code, end.code
        outcome.out_s[part] = round(end.ended_s - injected.at_s, 2)
        outcome.success[part] = (scene.run_dir(host).parents[1] / "success").exists()
        failure = scene.run_dir(host).parents[1] / "failure"
        if failure.exists():
            outcome.causes[part] = failure.read_text()
    outcome.problems += [f"{part}: still runs {what}" for part, what in left.items()]
    if cell.goes_on:
        outcome.again_s = again_s(scene, injected.at_s)
    outcome.problems += judge(cell, scene, outcome)
    if outcome.problems:
        outcome.problems.append(cluster.logs())


def left_on(scene: Scene, host: str) -> list[str]:
    """Return what still runs on a host a little while after `train` has ended there."""
    if not scene.cluster.hosts[host].running:
        return []
    deadline_s = time.monotonic() + 2
    while (left := [line for line in scene.cluster.processes(host) if "socket.create_server" not in line]) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.05)
    return left


def launcher_code(end: End, log: str) -> int | None:
    """Return how the launcher ended, by what `train` made of it; None where `train` was killed and knows nothing."""
    if end.code < 0:
        return None
    told = re.findall(r"^ExitCode (-?\d+)$", log, flags=re.MULTILINE)
    return int(told[-1]) if told else end.code


def again_s(scene: Scene, fault_s: float, effect_s: float = LEASE_S + 5) -> float:
    """Return the seconds from the fault to the end of the last pause of training that it led to; 0 if it led to none.

    Where no rank had taken a step before, it is the first step that is counted to.

    Args:
        scene: The cluster.
        fault_s: When it happened.
        effect_s: A pause that begins within this after it is its effect.
    """
    times = [line["at_s"] - fault_s for line in scene.lines()]
    pauses = [late for early, late in pairwise(times) if late - early > PAUSE_S and late > 0 and early < effect_s]
    begins = [times[0]] if times and times[0] > 0 else []
    return round(max(pauses + begins, default=0.0), 2)


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(cell: Cell, scene: Scene, outcome: Outcome) -> list[str]:
    """Return what is not as the cell says."""
    problems = _ends_judged(cell, outcome)
    problems += _times_judged(cell, outcome)
    problems += rows_judged(scene, whole=_epochs(cell) if cell.goes_on and cell.exact else 0)
    return problems


def _epochs(cell: Cell) -> int:
    return int(cell.options.get("epochs", 3))


def _ends_judged(cell: Cell, outcome: Outcome) -> list[str]:
    problems = []
    for part, code in outcome.codes.items():
        wanted = cell.codes.get(part, 0)
        if code != wanted:
            problems.append(f"{part}: the launcher ended with {code}, not {wanted}")
        train_wanted = 0 if wanted == 0 else 1
        if part == cell.on and cell.train_code is not None:
            train_wanted = cell.train_code
        elif wanted is None:
            train_wanted = -9
        if outcome.train_codes[part] != train_wanted:
            problems.append(f"{part}: train ended with {outcome.train_codes[part]}, not {train_wanted}")
        if outcome.success[part] != (wanted == 0):
            problems.append(f"{part}: train reports {'success' if outcome.success[part] else 'no success'}")
        cause, pattern = outcome.causes.get(part), cell.causes.get(part)
        if pattern is None and cause is not None:
            problems.append(f"{part}: output/failure should not be there: {cause}")
        elif pattern is not None and (cause is None or not re.search(pattern, cause)):
            problems.append(f"{part}: output/failure does not match {pattern!r}: {cause}")
        if cause is not None and len(cause) > FAILURE_CHARS and not cause.startswith("ExecuteUserScriptError"):
            problems.append(f"{part}: output/failure has {len(cause)} characters")
    return problems


def _times_judged(cell: Cell, outcome: Outcome) -> list[str]:
    if cell.ports:
        return []  # nothing happened at a moment of its own
    if cell.goes_on:
        again = outcome.again_s or 0.0
        return [] if again <= BOUND_S else [f"training went on only {again} s after the fault, not within {BOUND_S} s"]
    late = {part: seconds for part, seconds in outcome.out_s.items() if seconds > BOUND_S}
    return [f"out only so many seconds after the fault: {late}, not within {BOUND_S} s"] if late else []


def rows_judged(scene: Scene, whole: int) -> list[str]:
    """Return what is wrong with the rows: none may be seen twice in an epoch, and in `whole` epochs none may miss."""
    seen: dict[int, Counter[int]] = {}
    for line in scene.lines():
        seen.setdefault(line["epoch"], Counter()).update(line["rows"])
    problems = []
    for epoch, counts in sorted(seen.items()):
        twice = sorted(row for row, count in counts.items() if count > 1)
        if twice:
            problems.append(f"epoch {epoch}: rows seen twice: {twice[:20]}")
    for epoch in range(whole):
        missing = sorted(set(range(TOTAL_ROWS)) - set(seen.get(epoch, ())))
        if missing:
            problems.append(f"epoch {epoch}: {len(missing)} rows were never seen: {missing[:20]}")
    return problems


# --- several at once --------------------------------------------------------------------------------------------------


def run_cells(cells: Sequence[tuple[Cell, Path]], jobs: int) -> Iterator[Outcome]:
    """Run cells, several at once, and yield their outcomes as they come.

    Cells in which a host comes late mostly wait and all run beside the others. Of those that start TensorFlow on every
    host only one runs at a time: each costs a minute of CPU, and two would make each other late.

    Args:
        cells: Each with a folder of its own, which does not exist yet.
        jobs: How many at a time.
    """
    outcomes = Queue[Outcome]()

    def run(cell: Cell, folder: Path) -> None:
        try:
            outcomes.put(run_cell(cell, folder))
        except BaseException:
            outcomes.put(Outcome(cell.name, problems=[f"it could not be run: {traceback.format_exc()}"]))

    late = sum(bool(cell.late_s) for cell, _ in cells)
    with (
        ThreadPoolExecutor(max(1, late)) as waiting,
        ThreadPoolExecutor(1) as heavy,
        ThreadPoolExecutor(max(1, jobs - 1)) as light,
    ):
        for cell, folder in cells:
            pool = waiting if cell.late_s and jobs > 1 else heavy if cell.engine == "tf_data" or jobs == 1 else light
            pool.submit(run, cell, folder)
        for _ in cells:
            yield outcomes.get()
