"""The console: whole lines, and survival of what is behind it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections import deque

import pytest

from hetero.process import ConsoleSink


def test_lines_of_many_threads_stay_whole() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    threads = [threading.Thread(target=deque, args=(map(sink, [c * 200] * 200), 0)) for c in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(stream.getvalue().splitlines())) == [c * 200 for c in "abcd"]
    assert stream.getvalue().count("\n") == 800


def test_reader_that_goes_away_changes_neither_work_nor_exit_code() -> None:
    code = "from hetero.process import ConsoleSink\nsink = ConsoleSink()\nfor i in range(50_000): sink('line')\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_full_disk_behind_the_console_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    stream = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    sink = ConsoleSink(stream)
    for _ in range(3):
        sink("lost")
    with pytest.raises(OSError, match="No space"):
        stream.close()
    assert capsys.readouterr().err.count("cannot write to the console") == 1


def test_closed_stream_is_silent() -> None:
    stream = io.StringIO()
    stream.close()
    ConsoleSink(stream)("line")


def test_characters_that_the_stream_cannot_show_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleSink(stream)("gr\u00fcn")
    assert raw.getvalue() == b"gr?n\n"
