"""The `hetero` command: the table of commands, and how an error looks to a person."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Annotated

import typer
import typer.core
from rich.console import Console

from hetero import __version__
from hetero.cli import plan_command
from hetero.cli.compose_command import compose_config
from hetero.cli.demo_command import demo
from hetero.cli.run_command import CONTEXT_SETTINGS, run
from hetero.cli.status_command import status
from hetero.errors import HeteroError
from hetero.process.leaving import leave, open_standard_streams

app = typer.Typer(
    name="hetero",
    help="Train on heterogeneous clusters: CPU hosts prepare the input, GPU hosts only train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("run", context_settings=CONTEXT_SETTINGS, epilog=plan_command.EPILOG)(run)
app.command("plan", context_settings=plan_command.CONTEXT_SETTINGS, epilog=plan_command.EPILOG)(plan_command.plan)
app.command("status")(status)
app.command("compose-config")(compose_config)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"hetero {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that stand before the command."""
    del version
    if debug:
        os.environ["HETERO_DEBUG"] = "1"


def main() -> None:
    """Run the command line; the console script's entry. Ends the process with DESIGN's exit codes."""
    open_standard_streams()
    sys.path.append("")  # `--job package.module:name` is looked for in the current folder too, as launchers do
    try:
        app(standalone_mode=True)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)  # the reader of our output left; closing stdout would only fail again
    except (HeteroError, OSError) as error:
        if os.environ.get("HETERO_DEBUG"):
            traceback.print_exc()
        else:
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        leave(error.exit_code if isinstance(error, HeteroError) else 1)
