"""What a launcher shows: the lines of its children, and one progress bar where there is a terminal.

Rank 0 reports its progress as events (lines that start with the record separator, then JSON) when HETERO_PROGRESS is
`events`, else as plain lines. Whoever owns the terminal draws the bar; everybody between passes the events on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

EVENT_MARK = "\x1e"
PROGRESS_VARIABLE = "HETERO_PROGRESS"


class Console:
    """Write whole lines to a stream; draw a bar from progress events if the stream is a terminal.

    A stream that was closed or is full ends the showing, never the job.

    Args:
        stream: Where the lines go (default: standard output).
        environ: Tells whether a parent draws the bar.
        quiet: Show nothing.
        bar: Draw one at all. The processes of mpirun have a terminal that nobody sits at.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        quiet: bool = False,
        bar: bool = True,
    ) -> None:
        self._stream = stream or sys.stdout
        self._relay = (os.environ if environ is None else environ).get(PROGRESS_VARIABLE) == "events"
        draws = bar and not self._relay and not quiet and _is_terminal(self._stream)
        self._bar = _Bar(self._stream) if draws else None
        self._lock = threading.Lock()
        self._broken = quiet

    @property
    def child_environment(self) -> dict[str, str]:
        """What children must have in their environment to report progress in the form that this console shows."""
        return {PROGRESS_VARIABLE: "events" if self._relay or self._bar else "plain"}

    def __call__(self, line: str) -> None:
        """Show one line, prefix included; called from any thread."""
        before, mark, event = line.partition(EVENT_MARK)
        with self._lock:
            if self._broken:
                return
            try:
                if mark and self._bar:
                    self._bar.update(event)
                elif mark and self._relay:
                    self._write(EVENT_MARK + event)
                elif self._bar:
                    self._bar.print(line)
                else:
                    self._write(before if mark else line)
            except (OSError, ValueError):  # closed pipe, full disk, closed file
                self._broken = True
                _silence(self._stream)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """End the bar; may be repeated."""
        with self._lock:
            if self._bar:
                self._bar.close()
                self._bar = None

    def __enter__(self) -> Console:  # noqa: PYI034  typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _silence(stream: TextIO) -> None:
    """Point a broken stream nowhere, or what else this process prints there, and its flush at exit, would fail too."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def _number(values: Mapping[str, Any], name: str) -> float:
    """Return a figure of an event, 0 where it was not measured yet."""
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


class _Bar:
    """One rich progress bar, made when the first event arrives."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: Any = None
        self._task: Any = None

    def update(self, event: str) -> None:
        try:
            values = json.loads(event)
            epoch, epochs = int(values["epoch"]), int(values["epochs"])
        except (ValueError, KeyError, TypeError):
            return  # not an event of ours
        self._start(epochs)
        step, steps = _number(values, "step"), _number(values, "steps_per_epoch")
        part = 1.0 if values.get("epoch_ended") else min(1.0, step / steps) if steps > 0 else 0.0
        self._progress.update(
            self._task,
            completed=epoch + part,
            description=f"epoch {min(epoch + 1, epochs)}/{epochs}",
            figures=f"step {step:.0f}  {_number(values, 'rows_per_s'):.0f} rows/s  "
            f"input wait {100 * _number(values, 'wait_fraction'):.0f} %"
            + ("  simulated accelerator" if values.get("simulated") else ""),
            refresh=True,
        )

    def _start(self, epochs: int) -> None:
        if self._progress is not None:
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
        )
        # No refreshing thread: it would be the one to meet a terminal that is gone, and nobody could catch that.
        self._progress = Progress(*columns, console=RichConsole(file=self._stream), auto_refresh=False)
        self._task = self._progress.add_task("", total=epochs, figures="")
        self._progress.start()

    def print(self, line: str) -> None:
        if self._progress is None:
            self._stream.write(line + "\n")
            self._stream.flush()
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            with contextlib.suppress(OSError, ValueError):
                self._progress.stop()
