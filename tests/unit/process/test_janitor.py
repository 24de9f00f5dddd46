"""SIGKILL of the launcher, and what is left of its processes then: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from process_probe import Lines, MakeSpec, is_alive, wait_until

from hetero.process import Supervisor
from hetero.process.janitor import MARK, JanitorHandle, mark_of, sweep

# A launcher with one child that knows nothing of us, with a grandchild in its group and one in a session of its own.
CHILD = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
near = subprocess.Popen(sleep)
bare = subprocess.Popen(sleep, env={})
away = subprocess.Popen(sleep, start_new_session=True)
print("pids", os.getpid(), near.pid, bare.pid, away.pid, flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import os, sys
from hetero.process import ChildSpec, Supervisor
with Supervisor() as supervisor:
    supervisor.start(ChildSpec("child", (sys.executable, "-c", {CHILD!r}), dict(os.environ)))
    print("janitor", supervisor._janitor.pid, flush=True)
    supervisor.next_event()
"""


def start_launcher(env: dict[str, str]) -> tuple[subprocess.Popen[str], int, list[int]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert launcher.stdout is not None
    found: dict[str, list[int]] = {}
    while len(found) < 2:
        line = launcher.stdout.readline()
        assert line, "the launcher ended"
        label, *pids = line.split()
        found[label] = [int(pid) for pid in pids]
    return launcher, found["janitor"][0], found["pids"]


@pytest.mark.parametrize("how", ["launcher", "group"])
def test_sigkill_of_the_launcher_leaves_neither_children_nor_grandchildren(python: MakeSpec, how: str) -> None:
    launcher, janitor, pids = start_launcher(dict(python("").env))
    assert all(is_alive(pid) for pid in [janitor, *pids])
    with launcher:
        if how == "group":
            os.killpg(launcher.pid, signal.SIGKILL)
        else:
            os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in [janitor, *pids]), f"{pids} are gone", 5.0)


def test_janitor_is_deaf_to_term_and_int_and_leaves_with_its_launcher(python: MakeSpec) -> None:
    launcher, janitor, pids = start_launcher(dict(python("").env))
    wait_until(lambda: _ignores(janitor, signal.SIGTERM), "deaf")
    os.kill(janitor, signal.SIGTERM)
    os.kill(janitor, signal.SIGINT)
    assert os.getsid(janitor) == janitor
    with launcher:
        os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in [janitor, *pids]), "all gone", 5.0)


def _ignores(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (signum - 1) & 1)


def test_sigkill_of_an_outer_launcher_takes_inner_launchers_and_theirs_along(python: MakeSpec, lines: Lines) -> None:
    with Supervisor(0.5, lines) as outer:
        outer.start(python(LAUNCHER, name="inner"))
        janitor = lines.pid("janitor")
        pids = [int(word) for word in lines.wait_for("pids ").split()[2:]]
        outer.stop(grace_s=0)
    wait_until(lambda: not any(is_alive(pid) for pid in [janitor, *pids]), f"{pids} are gone", 5.0)


def test_orderly_end_takes_the_janitor_along(lines: Lines) -> None:
    with Supervisor(sink=lines) as made:
        assert made._janitor is not None
        pid = made._janitor.pid
        assert pid is not None
        assert is_alive(pid)
    assert not psutil.pid_exists(pid)
    made.close()


def test_loss_of_the_janitor_is_said_once_and_the_job_goes_on(python: MakeSpec, lines: Lines) -> None:
    with Supervisor(sink=lines) as made:
        assert made._janitor is not None
        pid = made._janitor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "killed")
        for i in range(2):
            made.start(python("", name=f"c{i}"))
            made.next_event(10.0)
    assert len([line for line in lines if "janitor is lost" in line]) == 1


def test_goodbye_leaves_the_groups_alone(lines: Lines) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    handle = JanitorHandle("token", lines)
    handle.watch(process.pid)
    handle.close()
    assert process.poll() is None
    process.kill()
    process.wait()


def test_group_that_was_reported_ended_is_not_killed(lines: Lines) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    handle = JanitorHandle("no-such-token", lines)
    handle.watch(process.pid)
    handle.forget(process.pid)
    os.close(handle._pipe)  # as when the launcher is killed
    handle._pipe = -1
    assert handle._process is not None
    assert handle._process.wait(10) == 0
    assert process.poll() is None
    process.kill()
    process.wait()


def test_sweep_hits_only_what_carries_the_token() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    token = os.urandom(8).hex()
    marks = {"ours": mark_of(token, None), "nested": mark_of("in", token), "other": "t2", "longer": f"{token}1"}
    children = {name: subprocess.Popen(sleep, env={**os.environ, MARK: mark}) for name, mark in marks.items()}
    wait_until(lambda: all(f"{MARK}=" in _environ(child.pid) for child in children.values()), "all have begun")
    killed = sweep(token)
    assert sorted(killed) == sorted([children["ours"].pid, children["nested"].pid])
    assert children["other"].poll() is None
    assert children["longer"].poll() is None
    for child in children.values():
        child.kill()
        child.wait()


def _environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()
