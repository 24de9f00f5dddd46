"""`hetero status HOST:PORT`: what a job's coordinator knows, as a table or as JSON."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from hetero.cli.input_view import Rates, input_tables, input_to_dict
from hetero.control.client import ControlClient
from hetero.control.state import HostState, JobState
from hetero.errors import CoordinatorUnreachable, SettingsError
from hetero.tls import Tls

PIPE_WIDTH = 160
RATE_INTERVAL_S = 1.2
"""Between the two looks that rows a second need; feeds and ranks tell their figures once a second."""


def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The coordinator: first data host, port 16000.")],
    token: Annotated[Optional[str], typer.Option(envvar="HETERO_TOKEN", help="The job's token.")] = None,  # noqa: UP045
    tls_ca: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--tls-ca", envvar="HETERO_TLS_CA", help="CA of a job that uses TLS."),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch an object a line.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until the job is over, or Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, with --watch.")] = 2.0,
) -> None:
    """Print who is in a job, what every host runs, how the job stands, and under grpc how its input flows."""
    port = re.fullmatch(r"(\[.+\]|[^:\s]+):([0-9]{1,5})", address)
    if not port or not 0 < int(port[2]) < 65536:
        raise SettingsError([f"{address!r} is no HOST:PORT, such as algo-1:16000"])
    with ControlClient(address, token, tls=Tls(ca=tls_ca)) as client:
        look = _Look(client, timeout_s)
        if watch:
            _watch(look, every_s, as_json=as_json)
            return
        look.now()
        if look.input is not None and not look.state.ended:
            time.sleep(RATE_INTERVAL_S)
            look.now()
        if as_json:
            typer.echo(json.dumps(look.to_dict(), indent=2, default=str))
            return
        console = _console()
        for part in look.parts():
            console.print(part, highlight=False)


def _console() -> Console:
    """Return where to print; a table that goes to a file or a pipe is not squeezed into 80 columns."""
    return Console() if Console().is_terminal or "COLUMNS" in os.environ else Console(width=PIPE_WIDTH)


def _watch(look: _Look, every_s: float, *, as_json: bool) -> None:
    """Show the job again and again. Ctrl-C is how a person ends that."""
    try:
        if as_json:
            for _ in _looks(look, every_s):
                typer.echo(json.dumps(look.to_dict(), default=str))
            return
        with Live(console=_console(), auto_refresh=False) as live:
            for _ in _looks(look, every_s):
                live.update(Group(*look.parts()), refresh=True)
    except KeyboardInterrupt:
        return


def _looks(look: _Look, every_s: float) -> Iterator[None]:
    look.now()
    while True:
        yield
        if look.state.ended:
            return
        time.sleep(every_s)
        try:
            look.now()
        except CoordinatorUnreachable:  # it answered before, and a coordinator goes when its job is over
            typer.echo("The coordinator is gone, as it is once the job has ended; summary.json has the rest.", err=True)
            return


class _Look:
    """The job as it was when last asked after.

    Args:
        client: Whom to ask.
        timeout_s: How long it may take to answer.
    """

    def __init__(self, client: ControlClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._rates = Rates()
        self.state: JobState
        self.input: Any = None

    def now(self) -> None:
        """Ask."""
        self.state = self._client.status(self._timeout_s)
        self.input = self._client.input_state(self._timeout_s)
        if self.input is not None:
            self._rates.look(self.input, time.monotonic())

    def to_dict(self) -> dict[str, object]:
        """Return all of it as JSON values; `input` is null but for a `grpc` job."""
        inputs = None if self.input is None else input_to_dict(self.input, self._rates)
        return {**self.state.to_dict(), "input": inputs}

    def parts(self) -> list[str | Table]:
        """Return what to print, top to bottom."""
        inputs = [] if self.input is None else input_tables(self.input, self._rates)
        return [_headline(self.state), _table(self.state), *inputs]


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
