"""What a launcher shows on a pipe, to a parent that draws the bar, and on a terminal of its own."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from hetero.process.console import EVENT_MARK, Console

PREFIX = "[trainer algo-1 rank-0] "


def event(**values: Any) -> str:
    """Return a progress line as rank 0's meter writes it, with the prefix its launcher puts before it."""
    figures = {
        "epoch": 0, "epochs": 4, "step": 5, "steps_per_epoch": 10, "rows": 40, "rows_per_s": 123.4, "step_ms": 2.0,
        "wait_fraction": 0.25, "epoch_ended": False,
    }  # fmt: skip
    return PREFIX + EVENT_MARK + json.dumps(figures | values)


class Terminal:
    """A pseudo-terminal: `stream` is the program's side, `text()` what a person has seen since the last call."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")

    def text(self, until: str, timeout_s: float = 10.0) -> str:
        """Read until a text has come."""
        seen, deadline_s = "", time.monotonic() + timeout_s
        while until not in seen:
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self._master], [], [], max(0.0, left_s))
            assert ready, f"{until!r} did not come, but {seen!r}"
            seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._master, 65536).decode())
        return seen

    def hang_up(self) -> None:
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def close(self) -> None:
        self.hang_up()
        with contextlib.suppress(OSError):
            self.stream.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    made = Terminal()
    yield made
    made.close()


def broken_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


def test_on_a_pipe_lines_come_as_they_are_and_children_write_plain_ones() -> None:
    stream = io.StringIO()
    with Console(stream, {}) as console:
        assert console.child_environment == {"HETERO_PROGRESS": "plain"}
        console(PREFIX + "hello [red]world[/red]")
        console("é")
    assert stream.getvalue() == PREFIX + "hello [red]world[/red]\né\n"


def test_below_a_parent_that_draws_the_bar_events_are_passed_on_without_prefix() -> None:
    stream = io.StringIO()
    console = Console(stream, {"HETERO_PROGRESS": "events"})
    assert console.child_environment == {"HETERO_PROGRESS": "events"}
    console("before")
    console(event(step=7))
    first, second, rest = stream.getvalue().split("\n")
    assert rest == ""
    assert first == "before"
    assert second.startswith(EVENT_MARK)
    assert json.loads(second[1:])["step"] == 7


def test_the_environment_tells_whether_a_parent_draws_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_PROGRESS", "events")
    assert Console(io.StringIO()).child_environment == {"HETERO_PROGRESS": "events"}
    assert Console(io.StringIO(), {}).child_environment == {"HETERO_PROGRESS": "plain"}


def test_by_default_lines_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    Console(environ={})("hello")
    assert capsys.readouterr().out == "hello\n"


def test_quiet_shows_nothing_on_a_pipe_and_on_a_terminal(terminal: Terminal) -> None:
    stream = io.StringIO()
    Console(stream, {}, quiet=True)("hello")
    assert stream.getvalue() == ""
    with Console(terminal.stream, {}, quiet=True) as console:
        assert console.child_environment == {"HETERO_PROGRESS": "plain"}
        console("hello")
        console(event())
    terminal.stream.write("the end")
    terminal.stream.flush()
    assert terminal.text("the end") == "the end"


def test_on_a_terminal_there_is_one_bar_and_lines_scroll_above_it(terminal: Terminal) -> None:
    with Console(terminal.stream, {}) as console:
        assert console.child_environment == {"HETERO_PROGRESS": "events"}
        console("before [red]the bar[/red]")
        assert terminal.text("\n") == "before [red]the bar[/red]\r\n"
        console(event(epoch=1, step=5))
        shown = terminal.text("25 %")
        assert "epoch 2/4" in shown
        assert "step 5  123 rows/s  input wait 25 %" in shown
        console("a line of a child [red]in between[/red]")
        assert "a line of a child [red]in between[/red]\r\n" in terminal.text("25 %")
        assert EVENT_MARK not in shown


def test_the_bar_says_that_the_accelerator_is_simulated(terminal: Terminal) -> None:
    with Console(terminal.stream, {}) as console:
        console(event(simulated=True))
        assert "input wait 25 %  simulated accelerator" in terminal.text("accelerator")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"epoch": 1, "step": 5, "steps_per_epoch": 10}, 1.5),
        ({"epoch": 1, "step": 12, "steps_per_epoch": 10}, 2.0),
        ({"epoch": 1, "step": 12, "steps_per_epoch": 12, "epoch_ended": True}, 2.0),
        ({"epoch": 0, "step": 3, "steps_per_epoch": None}, 0.0),
        ({"epoch": 3, "step": 10, "steps_per_epoch": 10, "epoch_ended": True}, 4.0),
    ],
    ids=["half an epoch", "longer than the last", "ended", "first epoch", "the end"],
)
def test_the_bar_moves_within_an_epoch_and_is_full_at_the_end(
    terminal: Terminal, values: dict[str, Any], part: float
) -> None:
    with Console(terminal.stream, {}) as console:
        console(event(**values))
        assert console._bar is not None
        assert console._bar._progress.tasks[0].completed == part


def test_figures_that_are_not_measured_yet_and_events_of_others_disturb_nothing(terminal: Terminal) -> None:
    with Console(terminal.stream, {}) as console:
        for text in ("", "{", "[1]", "3", "{}", '{"epoch": "x", "epochs": 1}', '{"epoch": 0, "epochs": null}'):
            console(PREFIX + EVENT_MARK + text)
        console(event(step_ms=None, wait_fraction=None, steps_per_epoch=None, rows_per_s=0.0))
        assert "step 5  0 rows/s  input wait 0 %" in terminal.text("0 %")


def test_closing_gives_standard_output_back_and_may_be_repeated(terminal: Terminal) -> None:
    stdout = sys.stdout
    console = Console(terminal.stream, {})
    console(event())
    console.close()
    console.close()
    assert sys.stdout is stdout
    terminal.text("25 %")
    console("after the bar")
    assert "after the bar\r\n" in terminal.text("after the bar\r\n")


def test_a_terminal_that_is_gone_ends_the_showing_and_nothing_else(terminal: Terminal) -> None:
    stdout, threads = sys.stdout, threading.active_count()
    with Console(terminal.stream, {}) as console:
        console(event())
        terminal.text("25 %")
        terminal.hang_up()
        for number in range(3):
            console(event(step=number))
            console("line")
    assert sys.stdout is stdout
    assert threading.active_count() == threads


def test_a_reader_that_went_away_ends_the_showing_and_later_prints_fail_no_more() -> None:
    stream = broken_pipe()
    console = Console(stream, {})
    for _ in range(3):
        console("line")
    print("the launcher's own words", file=stream, flush=True)
    stream.close()


def test_a_closed_stream_ends_the_showing() -> None:
    stream = io.StringIO()
    console = Console(stream, {})
    stream.close()
    console("line")
    Console(stream, {})("line")


def test_lines_of_many_threads_stay_whole() -> None:
    stream = io.StringIO()
    console = Console(stream, {})

    def write(name: str) -> None:
        for _ in range(200):
            console(name * 40)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 800
    assert {len(set(line)) for line in lines} == {1}
