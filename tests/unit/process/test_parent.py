"""A process hears of the end of the one that started it, also through a shell between them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

CHILD = """
import signal, sys, time
from pathlib import Path
from hetero.process.parent import PARENT_GONE, watch_parent
folder, heard = Path(sys.argv[1]), []
for signum in (PARENT_GONE, signal.SIGTERM):
    signal.signal(signum, lambda number, _: heard.append(signal.Signals(number).name))
watch_parent()
(folder / "ready").touch()
while not heard:
    time.sleep(0.01)
time.sleep(0.2)
(folder / "heard").write_text(" ".join(heard))
"""
PARENT = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(1000)"
HOW = {
    "directly": lambda argv: argv,
    "by a shell that stays": lambda argv: ["sh", "-c", '"$@"; true', "sh", *argv],
    "by two shells": lambda argv: ["bash", "-c", '"$@"; true', "bash", "sh", "-c", '"$@"; true', "sh", *argv],
}


def wait_for(path: Path, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def start(folder: Path, how: Callable[[list[str]], list[str]]) -> subprocess.Popen[bytes]:
    child = how([sys.executable, "-c", CHILD, str(folder)])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *child], start_new_session=True)
    wait_for(folder / "ready")
    return parent


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * ("shell" in how)) for how in HOW])
def test_the_end_of_the_parent_is_heard_once(tmp_path: Path, how: str, signum: signal.Signals) -> None:
    parent = start(tmp_path, HOW[how])
    descendants = psutil.Process(parent.pid).children(recursive=True)
    assert len(descendants) == list(HOW).index(how) + 1
    os.kill(parent.pid, signum)
    parent.wait()
    wait_for(tmp_path / "heard", 5)
    assert (tmp_path / "heard").read_text() == "SIGHUP"
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(5)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_arrives_beside_the_word_of_the_parents_end(tmp_path: Path) -> None:
    parent = start(tmp_path, HOW["directly"])
    os.killpg(parent.pid, signal.SIGTERM)
    parent.wait()
    wait_for(tmp_path / "heard", 5)
    assert sorted((tmp_path / "heard").read_text().split()) == ["SIGHUP", "SIGTERM"]


@pytest.mark.slow
def test_as_long_as_the_parent_lives_nothing_is_heard(tmp_path: Path) -> None:
    parent = start(tmp_path, HOW["by a shell that stays"])
    time.sleep(0.7)  # longer than the interval at which the shell is looked at
    assert not (tmp_path / "heard").exists()
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
