"""`hetero plan`: what would run on each host, as a table or as JSON. Nothing is started."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from hetero.clusters import detect, from_file
from hetero.job_file import read_declaration
from hetero.options import AUTO, likely_misspelt, options_help
from hetero.plan import Hardware, HostPlan, plan_cluster
from hetero.process.cpu_quota import cpu_quota, tightest_quota
from hetero.settings import Settings, find_job, resolve, resolve_engine
from hetero.spec import ProcessSpec
from hetero.topology import Topology

# For `app.command("plan", context_settings=CONTEXT_SETTINGS, epilog=EPILOG)(plan)`: what the command does not know are
# options of the run and of the job, which `resolve` reads.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
EPILOG = "Options of the run, which `hetero plan` takes too:\n\n\b\n" + options_help()
_JSON_VERSION = 1


def plan(
    context: typer.Context,
    # Optional[...] and not `| None`: typer evaluates it, and Python 3.10 is supported.
    topology: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A resourceconfig.json or a local cluster's file; default: the cluster this host is in."),
    ] = None,
    host: Annotated[Optional[str], typer.Option(help="Only this host; default: all hosts.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print which processes each host would run, and start none of them."""
    settings, engine, cluster, warnings = _prepare(context.args, topology, host)
    for line in warnings:
        typer.echo(f"warning: {line}", err=True)
    quota = tightest_quota()
    hardware = Hardware(cpus=cpu_quota(), gpus=0, quota_cpus=quota.cpus if quota else None)
    plans = plan_cluster(cluster, settings, engine, hardware)
    shown = [one for one in plans if host is None or one.host.name == host]
    if as_json:
        typer.echo(json.dumps(as_values(cluster, settings, engine, shown), indent=2))
        return
    console = Console(soft_wrap=False)
    console.print(_table(cluster, engine, shown))
    console.print(_summary(cluster, settings, plans, shown[0]), soft_wrap=True, highlight=False)


def as_values(topology: Topology, settings: Settings, engine: str, plans: Sequence[HostPlan]) -> dict[str, object]:
    """Return the plan as JSON values; keys are only ever added while `version` stays the same.

    Args:
        topology: The cluster.
        settings: The run's settings; the token is left out.
        engine: The engine settled on.
        plans: Plans of the hosts to show, at least one.

    Returns:
        An object of JSON values.
    """
    return {
        "version": _JSON_VERSION,
        "source": topology.source,
        "homogeneous": topology.homogeneous,
        "engine": engine,
        "control_address": plans[0].control_address,
        "interface": topology.interface,
        "expected_ranks": plans[0].expected_ranks,
        "settings": settings.public(),
        "hosts": [
            {
                "name": one.host.name,
                "role": one.role.value,
                "group": one.host.group,
                "address": one.host.address,
                "instance_type": one.host.instance_type,
                "cpus": list(one.host.cpus) if one.host.cpus is not None else None,
                "processes": [_process_values(one, process) for process in one.processes],
                "most_local_workers": one.most_local_workers,
                "most_workers": one.most_workers,
            }
            for one in plans
        ],
    }


def _prepare(argv: Sequence[str], path: Path | None, host: str | None) -> tuple[Settings, str, Topology, list[str]]:
    """Settle settings, engine and topology as a launcher would; and say what looks misspelt."""
    job = find_job(argv, os.environ)
    declaration = read_declaration(job) if job else None
    defaults = declaration.defaults if declaration else None
    settings = resolve(argv, os.environ, defaults, require_job=False)
    cluster = from_file(path, settings, host) if path else detect(os.environ, settings)
    if host is not None:
        cluster = cluster.seen_from(host)
    warnings = likely_misspelt([name for name in settings.params if name not in (defaults or {})])
    return settings, resolve_engine(settings, cluster, declaration.engine if declaration else None), cluster, warnings


def _process_values(host: HostPlan, process: ProcessSpec) -> dict[str, object]:
    """Return one process as JSON values."""
    return {
        "name": process.name,
        "kind": process.kind.value,
        "module": process.module,
        "args": list(process.args),
        "port": process.port,
        "restarts": process.restarts.attempts,
        "restart_window_s": process.restarts.window_s,
        "critical": process.critical,
        "global_rank": host.global_rank(process),
        "local": host.is_local(process),
    }


def _table(topology: Topology, engine: str, plans: Sequence[HostPlan]) -> Table:
    """Return the plan as a table, a line a process."""
    table = Table(title=f"{topology.source}, engine {engine}", title_justify="left")
    for column in ("host", "role", "group", "process", "port", "if it dies"):
        table.add_column(column, no_wrap=column in {"host", "process", "port"})
    for one in plans:
        label = one.host.name if one.host.cpus is None else f"{one.host.name} (CPUs {_ranges(one.host.cpus)})"
        kind = f"{one.host.group}, {one.host.instance_type}" if one.host.instance_type else one.host.group
        for index, process in enumerate(one.processes):
            rank = one.global_rank(process)
            name = process.name if rank is None else f"{process.name} (rank {rank} of {one.expected_ranks})"
            name += " (local)" if one.is_local(process) else ""
            first = (label, one.role.value, kind) if index == 0 else ("", "", "")
            table.add_row(*first, name, str(process.port or ""), _fate(one, process))
        table.add_section()
    return table


def _summary(topology: Topology, settings: Settings, plans: Sequence[HostPlan], one: HostPlan) -> str:
    """Return what the table does not show."""
    lines = [
        f"Coordinator at {one.control_address}. A data port that is taken is replaced by another."
        if one.engine != "local"
        else f"Coordinator at {one.control_address}."
    ]
    if settings.ranks_per_host is None:
        lines.append("Shown is one rank a trainer host; there it is one for each GPU, or --ranks-per-host.")
    if settings.workers_per_host == AUTO and one.engine == "grpc":
        most = max(plan.most_workers for plan in plans)
        lines.append(
            "Shown are as many workers a data host as this machine has CPUs; there it is one for each CPU, and more "
            f"where training shows that ranks wait and CPUs are idle: {most} at most with as many CPUs as here."
        )
    if settings.local_workers == AUTO:
        lines.append(
            "Each trainer host starts local workers once training shows that input is short and CPUs are idle: "
            f"{_most(plans)}."
        )
    if not topology.homogeneous:
        hosts = (len(topology.data), len(topology.trainers))
        lines.append(f"{hosts[0]} data host{'s' * (hosts[0] > 1)}, {hosts[1]} trainer host{'s' * (hosts[1] > 1)}.")
    return "\n".join(lines)


def _most(plans: Sequence[HostPlan]) -> str:
    """Return how many local workers `--local-workers auto` comes to."""
    most = max(plan.most_local_workers for plan in plans)
    if most == 1 and plans[0].engine != "tf_data":
        return "one at most with as many CPUs as here"
    if plans[0].engine == "tf_data":
        return "one, which uses all idle CPUs"
    return f"{most} at most with as many CPUs as here"


def _fate(host: HostPlan, process: ProcessSpec) -> str:
    """Return what the death of a process leads to."""
    if process.restarts.attempts:
        after = ", then done without" if host.is_local(process) else ""
        return f"restart, {process.restarts.attempts} in {process.restarts.window_s:g} s{after}"
    return "job fails"


def _ranges(cpus: Sequence[int]) -> str:
    """Return CPU numbers, as a range if they are one."""
    text = ",".join(str(cpu) for cpu in cpus)
    if len(cpus) > 1 and list(cpus) == list(range(cpus[0], cpus[-1] + 1)):
        text = f"{cpus[0]}-{cpus[-1]}"
    return text
