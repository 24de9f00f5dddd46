"""`hetero run`: a job on a local cluster of virtual hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console as RichConsole
from rich.table import Table

from hetero.cli.cluster import ClusterSpec, HostResult, exit_code_of, run_cluster
from hetero.clusters.local import parse_cpus
from hetero.errors import SettingsError, Stopped
from hetero.job_file import settle
from hetero.process.console import Console
from hetero.rundir import RunDir, default_run_dir, read_json
from hetero.settings import resolve_engine

CONTEXT_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    # The command's own flags too are accepted with underscores, or --data_hosts would pass for an option of the job.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


def run(  # noqa: PLR0917  typer calls it by name
    context: typer.Context,
    data_hosts: Annotated[int, typer.Option(min=0, help="Virtual data hosts; 0 is the homogeneous job.")] = 1,
    trainer_hosts: Annotated[int, typer.Option(min=1, help="Virtual trainer hosts.")] = 1,
    data_cpus: Annotated[Optional[str], typer.Option(help="Pin data hosts to CPUs: 0,2-3.")] = None,  # noqa: UP045
    trainer_cpus: Annotated[Optional[str], typer.Option(help="Pin trainer hosts to CPUs.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")] = False,
) -> None:
    """Run a job on this machine as on a cluster: one launcher for each virtual host.

    Options of the run and of the job itself are accepted too, before or after `--`.
    """
    declaration, settings = settle(context.args, os.environ)
    resolve_engine(settings, _Shape(data_hosts), declaration.engine)
    _check_channels(settings.channels)
    control_port = settings.control_port if _said("control_port", context.args) else None
    spec = ClusterSpec(
        data_hosts=data_hosts,
        trainer_hosts=trainer_hosts,
        data_cpus=parse_cpus(data_cpus, "--data-cpus") if data_cpus else None,
        trainer_cpus=parse_cpus(trainer_cpus, "--trainer-cpus") if trainer_cpus else None,
        control_port=control_port,
        data_group=settings.data_group,
        trainer_group=settings.trainer_group,
        grace_s=settings.grace_s,
        lease_s=settings.lease_s,
    )
    folder = RunDir(settings.run_dir or default_run_dir(declaration.name))
    folder.claim()
    with Console(quiet=as_json) as console:
        try:
            results = run_cluster(spec, folder, _without_run_dir(context.args), console)
        except Stopped:
            if not as_json:
                _show_folder(folder)
            raise
    code = exit_code_of(results, trainer_hosts)
    _show(folder, results, code, as_json=as_json)
    raise typer.Exit(code)


def _check_channels(channels: Mapping[str, str]) -> None:
    """Raise SettingsError for folders that do not exist: all virtual hosts see the same ones."""
    problems = [
        f"--channel {name}={path}: there is no such file or folder"
        for name, path in channels.items()
        if "://" not in path and not Path(path).exists()
    ]
    if problems:
        raise SettingsError(problems)


class _Shape:
    """What `resolve_engine` needs of a cluster that does not exist yet."""

    source = "hetero run"

    def __init__(self, data_hosts: int) -> None:
        self.homogeneous = data_hosts == 0


def _said(name: str, arguments: list[str]) -> bool:
    """Return whether an option was given rather than left at its default."""
    flags = {f"--{name}", f"--{name.replace('_', '-')}"}
    return f"HETERO_{name.upper()}" in os.environ or any(word.partition("=")[0] in flags for word in arguments)


def _without_run_dir(arguments: list[str]) -> list[str]:
    """Return the arguments without the run folder: every launcher is given the absolute one."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        flag, separator, _ = word.partition("=")
        if skip:
            skip = False
        elif flag in ("--run-dir", "--run_dir"):
            skip = not separator
        else:
            kept.append(word)
    return kept


def _show(folder: RunDir, results: list[HostResult], code: int, *, as_json: bool) -> None:
    summary = read_json(folder.summary)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "exit_code": code,
                    "run_dir": str(folder.path),
                    "summary": summary,
                    "failure": read_json(folder.failure),
                }
            )
        )
        return
    console = RichConsole()
    if summary and code == 0:
        console.print(summary_table(summary))
    failed = ", ".join(f"{result.host} {result.exit_code}" for result in results if result.exit_code)
    if code or failed:
        console.print(f"Exit codes: {failed or 'all 0'}. Cause: {folder.failure}", highlight=False, soft_wrap=True)
    _show_folder(folder)


def _show_folder(folder: RunDir) -> None:
    RichConsole().print(f"Run folder: {folder.path}", highlight=False, soft_wrap=True)


def summary_table(summary: dict[str, object]) -> Table:
    """Return a run's figures as a table of two columns."""
    table = Table(
        title=f"{summary['job']}, engine {summary['engine']}: {summary['outcome']}",
        title_justify="left",
        show_header=False,
    )
    hosts = summary["hosts"]
    step = summary["step_ms"]
    assert isinstance(hosts, dict) and isinstance(step, dict)  # noqa: S101, PT018  written by hetero.summary
    rows = {
        "hosts": f"{hosts['data']} data, {hosts['trainer']} trainer",
        "ranks": str(summary["ranks"]),
        "steps, rows": f"{summary['steps']}, {summary['rows']}",
        "step": figure(step["mean"], "ms", 1),
        "input wait": percent(summary["input_wait_fraction"]),
        "rows/s": figure(summary["rows_per_s"], "", 0),
        "training": figure(summary["train_s"], "s", 1),
        **device_rows(summary),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    results = summary["results"]
    for name, value in (results if isinstance(results, dict) else {}).items():
        table.add_row(str(name), f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def device_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of the simulated accelerator by their names; empty where there was none."""
    device = summary.get("simulated_device")
    if device is None:
        return {}
    return {
        "simulated accelerator": f"{device['step_ms']:g} ms a step",
        "simulated stall": figure(100 * device["stall"] if device["stall"] is not None else None, "%", 2),
    }


def figure(value: object, unit: str, digits: int) -> str:
    """Return a number with its unit, or a dash where it was not measured."""
    return f"{value:.{digits}f} {unit}".strip() if isinstance(value, (int, float)) else "-"


def percent(value: object) -> str:
    """Return a fraction as a percentage, or a dash where it was not measured."""
    return f"{100 * value:.0f} %" if isinstance(value, (int, float)) else "-"
