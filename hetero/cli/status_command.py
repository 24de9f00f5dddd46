"""`hetero status HOST:PORT`: what a job's coordinator knows, as a table or as JSON."""

from __future__ import annotations

import json
import re
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from hetero.control.client import ControlClient
from hetero.control.state import HostState, JobState
from hetero.errors import SettingsError


def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The coordinator: first data host, port 16000.")],
    token: Annotated[Optional[str], typer.Option(envvar="HETERO_TOKEN", help="The job's token.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
) -> None:
    """Print who is in a job, what every host runs, and how the job stands."""
    port = re.fullmatch(r"(\[.+\]|[^:\s]+):([0-9]{1,5})", address)
    if not port or not 0 < int(port[2]) < 65536:
        raise SettingsError([f"{address!r} is no HOST:PORT, such as algo-1:16000"])
    with ControlClient(address, token) as client:
        state = client.status(timeout_s)
    if as_json:
        typer.echo(json.dumps(state.to_dict(), indent=2, default=str))
        return
    console = Console()
    console.print(_headline(state), highlight=False)
    console.print(_table(state))


def _headline(state: JobState) -> str:
    text = f"run {state.run_id}: {state.phase.value}"
    if state.ended:
        text += f", {state.outcome.value}"
        if state.failure:
            text += f": {state.failure.describe()}"
    return f"{text}; up {state.uptime_s:.0f} s, coordinator restarted {state.restarts} times"


def _table(state: JobState) -> Table:
    table = Table()
    for column in ("host", "role", "address", "state", "last seen", "CPU", "process", "pid", "port", "process state"):
        table.add_column(column, justify="right" if column in ("last seen", "CPU", "pid", "port") else "left")
    for host in state.hosts:
        where = (host.name, host.role, host.address, _state_of(host), f"{host.age_s:.1f} s", f"{host.cpu_s:.1f} s")
        if not host.processes:
            table.add_row(*where)
        for index, process in enumerate(host.processes):
            first = where if index == 0 else ("",) * len(where)
            table.add_row(*first, process.name, str(process.pid or ""), str(process.port or ""), process.state)
        table.add_section()
    return table


def _state_of(host: HostState) -> str:
    if host.lost:
        return "lost"
    if host.left:
        return f"left: {host.leave_reason}" if host.leave_reason else "done"
    return "here" if host.registered else "not here yet"
