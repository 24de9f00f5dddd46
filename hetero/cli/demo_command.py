"""`hetero demo`: one job on a homogeneous and on a heterogeneous cluster of this machine's CPUs, and what it saved."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console as RichConsole
from rich.table import Table

from hetero.cli.cluster import ClusterSpec, exit_code_of, run_cluster
from hetero.cli.run_command import device_rows, figure, percent
from hetero.errors import ChildFailed
from hetero.process.console import Console
from hetero.process.failure import Failure
from hetero.rundir import RunDir, read_json

RANKS = 2
DATA_HOSTS = 2


def demo(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the run folders and say where they are.")] = False,
) -> None:
    """Train on 1,797 real handwritten digits twice, without and with data hosts, and compare.

    The trainer host has the same CPUs both times. The second time two data hosts, pinned to the other CPUs, prepare the
    input (tf.data service) while two Horovod ranks only train.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    trainer_cpus, data_cpus = split_cpus(cpus)
    folder = Path(tempfile.mkdtemp(prefix="hetero-demo-"))
    screen = RichConsole(quiet=as_json)
    try:
        homogeneous = ClusterSpec(data_hosts=0, trainer_hosts=1, trainer_cpus=trainer_cpus)
        screen.print(
            f"1 of 2: homogeneous, 1 trainer host with {RANKS} ranks on CPUs {_names(trainer_cpus)}", highlight=False
        )
        before = _run(homogeneous, RunDir(folder / "homogeneous"), quiet=as_json)
        heterogeneous = ClusterSpec(
            data_hosts=DATA_HOSTS, trainer_hosts=1, data_cpus=data_cpus, trainer_cpus=trainer_cpus
        )
        screen.print(
            f"2 of 2: heterogeneous, the same and {DATA_HOSTS} data hosts on CPUs {_names(data_cpus)}", highlight=False
        )
        after = _run(heterogeneous, RunDir(folder / "heterogeneous"), quiet=as_json)
        one_cpu = len(cpus) == 1
        if as_json:
            values = {
                "homogeneous": before,
                "heterogeneous": after,
                "speed_up": speed_up(before, after),
                "one_cpu": one_cpu,
            }
            typer.echo(json.dumps(values, indent=2))
        else:
            screen.print(_table(before, after))
            screen.print(meaning(before, after, one_cpu=one_cpu), highlight=False)
            if keep:
                screen.print(f"Run folders: {folder}", highlight=False, soft_wrap=True)
    except ChildFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


def split_cpus(cpus: list[int]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the CPUs of the trainer host and those of the data hosts; None where this system cannot pin."""
    if not cpus:
        return None, None
    if len(cpus) == 1:
        return (cpus[0],), (cpus[0],)
    half = len(cpus) // 2
    return tuple(cpus[:half]), tuple(cpus[half:])


def _names(cpus: tuple[int, ...] | None) -> str:
    return "of its choice" if cpus is None else ",".join(map(str, cpus))


def _job_file() -> Path:
    """Return examples/digits/job.py: in a checkout the file itself, in an installed wheel the copy it carries."""
    package = Path(__file__).resolve().parents[1]
    places = (package.parent / "examples" / "digits" / "job.py", package / "examples" / "digits.py")
    return next(place for place in places if place.is_file())


def _run(spec: ClusterSpec, run: RunDir, *, quiet: bool) -> dict[str, Any]:
    arguments = [f"--job={_job_file()}:job", f"--ranks-per-host={RANKS}"]
    with Console(quiet=quiet) as console:
        results = run_cluster(spec, run, arguments, console)
    code = exit_code_of(results, spec.trainer_hosts)
    summary: dict[str, Any] | None = read_json(run.summary)
    if code or summary is None:
        failure = read_json(run.failure)
        cause = Failure.from_dict(failure).describe() if failure else f"exit code {code}"
        raise ChildFailed(f"The demo's training failed: {cause}. Its logs are in {run.path}.")
    return summary


def speed_up(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return how many times the rows/s of the first run the second one reached."""
    if not before["rows_per_s"] or not after["rows_per_s"]:
        return None
    return float(after["rows_per_s"] / before["rows_per_s"])


def _table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    table = Table()
    for column in ("", "homogeneous", "heterogeneous"):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "mean step time": lambda run: figure(run["step_ms"]["mean"], "ms", 1),
        "input wait": lambda run: percent(run["input_wait_fraction"]),
        "rows/s": lambda run: figure(run["rows_per_s"], "", 0),
        "test accuracy": lambda run: figure(run["results"].get("test_accuracy"), "", 3),
    }
    for name, value in rows.items():
        table.add_row(name, value(before), value(after))
    device_before, device_after = device_rows(before), device_rows(after)
    for name in device_before:
        table.add_row(name, device_before[name], device_after[name])
    ratio = speed_up(before, after)
    table.add_row("speed-up", "1.00 x", f"{ratio:.2f} x" if ratio else "-")
    return table


def meaning(before: Mapping[str, Any], after: Mapping[str, Any], *, one_cpu: bool) -> str:
    """Return what the table means, in two sentences."""
    if one_cpu:
        return (
            "This machine has one CPU, which all hosts share, so it cannot show a speed-up. "
            "On a cluster the data hosts bring CPUs of their own."
        )
    ratio = speed_up(before, after)
    if ratio is None:
        return (
            "One of the two runs took too few steps to be measured, so there is no speed-up to tell. "
            "`hetero demo --keep` keeps what they wrote."
        )
    first = (
        f"With the input prepared on the data hosts the same ranks took {ratio:.2f} times as many rows a second: they "
        f"waited for input {percent(after['input_wait_fraction'])} of the time instead of "
        f"{percent(before['input_wait_fraction'])}. "
    )
    if round(ratio, 2) <= 1:
        return first + (
            "No data host is cheap enough to save money here: this machine's other CPUs were busy with something else, "
            "or input was not what the ranks waited for."
        )
    return first + (
        f"A rented trainer host is paid for {1 / ratio:.2f} times as long, so data hosts that cost less than "
        f"{100 * (ratio - 1):.0f} % of its price save money."
    )
