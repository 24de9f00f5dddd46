"""A folder in memory: made where there is room, and removed with its launcher however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_probe import Lines, wait_until

from hetero.process import Supervisor, memory_folder

LAUNCHER = """
import sys
from pathlib import Path
from hetero.process import Supervisor
with Supervisor() as supervisor:
    supervisor.own(Path(sys.argv[1]))
    print("owned", flush=True)
    supervisor.next_event()
"""


def filled(folder: Path) -> Path:
    (folder / "dispatcher" / "datasets").mkdir(parents=True)
    (folder / "dispatcher" / "journal").write_text("x")
    return folder


def test_a_folder_is_made_where_memory_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(memory_folder, "LEAST_FREE_BYTES", 1)
    folder = memory_folder.make("run1")
    assert folder == memory_folder.path_of("run1")
    assert folder is not None
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0
    assert memory_folder.make("run1") is None, "somebody else's"


@pytest.mark.parametrize("missing", ["room", "memory"])
def test_without_room_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "none" if missing == "memory" else tmp_path)
    monkeypatch.setattr(memory_folder, "LEAST_FREE_BYTES", 1 if missing == "memory" else 2**62)
    assert memory_folder.make("run1") is None
    assert not memory_folder.path_of("run1").exists()


def test_an_owned_folder_goes_with_the_supervisor(tmp_path: Path, lines: Lines) -> None:
    folder = filled(tmp_path / "own")
    with Supervisor(sink=lines) as supervisor:
        supervisor.own(folder)
        assert folder.exists()
    assert not folder.exists()


def test_an_owned_folder_goes_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    folder, other = filled(tmp_path / "own"), filled(tmp_path / "other")
    argv = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "owned\n"
        assert folder.exists()
        os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not folder.exists(), "the folder is gone", 5.0)
    assert (other / "dispatcher" / "journal").exists()
