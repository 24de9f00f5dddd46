"""Real children that are paced: in a real control group, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_probe import Lines, MakeSpec, is_alive, wait_until

from hetero.frozen import LEAST_SILENCE_S
from hetero.process import Supervisor
from hetero.process.pace import LONGEST_PAUSE_S
from hetero.process.pacer import Pacer
from hetero.spec import RestartPolicy

BURN = "import os\nprint('pid', os.getpid(), flush=True)\nwhile True: pass"
BURN_BELOW = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}]).wait()"
LAUNCHER = f"""
import os, sys, time
from hetero.process import ChildSpec, Supervisor
from hetero.process.pacer import Pacer
with Supervisor() as supervisor:
    supervisor.start(ChildSpec("worker", (sys.executable, "-c", {BURN!r}), dict(os.environ)))
    Pacer(supervisor.living, lambda name: True, None, 0.01).start()
    time.sleep(60)
"""
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "pacing.py"


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@contextlib.contextmanager
def paced(supervisor: Supervisor, cap_cpus: float) -> Iterator[Pacer]:
    pacer = Pacer(supervisor.living, lambda name: name == "worker", None, cap_cpus)
    pacer.start()
    pacer.start()  # is nothing more
    try:
        yield pacer
    finally:
        pacer.close()
        pacer.close()


def test_a_worker_is_paused_and_let_go_on_and_others_are_left_alone(python: MakeSpec, lines: Lines) -> None:
    with Supervisor(sink=lines) as supervisor:
        pids = [supervisor.start(python(BURN, name)) for name in ("worker", "other")]
        with paced(supervisor, 0.1):
            for _ in range(3):
                wait_until(lambda: stopped(pids[0]), "the worker is paused")
                wait_until(lambda: not stopped(pids[0]), "the worker goes on")
                assert not stopped(pids[1])
        assert not stopped(pids[0]), "what paces it has ended"


def test_the_worker_that_replaces_another_is_paced_too(python: MakeSpec, lines: Lines) -> None:
    restarts = RestartPolicy(attempts=1, backoff_s=0.0)
    with Supervisor(sink=lines) as supervisor, paced(supervisor, 0.1):
        pid = supervisor.start(python(BURN, "worker", restarts=restarts))
        wait_until(lambda: stopped(pid), "the worker is paused")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: supervisor.next_event(0.05) and (supervisor.children()[0].pid or pid) != pid, "a new one")
        new = supervisor.children()[0].pid
        assert new is not None
        wait_until(lambda: stopped(new), "the new worker is paused")


def test_a_stop_while_it_is_paused_takes_no_kill(python: MakeSpec, lines: Lines) -> None:
    with Supervisor(sink=lines, grace_s=30.0) as supervisor, paced(supervisor, 0.01):
        pid = supervisor.start(python(BURN, "worker"))
        wait_until(lambda: stopped(pid), "the worker is paused")
        (ended,) = supervisor.stop(["worker"])
    assert (ended.signal, ended.stopped) == ("SIGTERM", True)


@pytest.mark.parametrize("how", ["launcher", "group"])
def test_sigkill_of_the_launcher_while_a_worker_is_paused_leaves_nothing(python: MakeSpec, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=dict(python("").env), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        below = psutil.Process(launcher.pid).children
        line = launcher.stdout.readline()
        assert line, "the launcher ended"
        worker = int(line.split()[-1])
        pids = [worker, *(process.pid for process in below(recursive=True))]
        wait_until(lambda: stopped(worker), "the worker is paused")
        (os.killpg if how == "group" else os.kill)(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), f"{pids} are gone", 5.0)


def test_no_pause_is_so_long_that_a_worker_is_taken_for_frozen() -> None:
    assert 5 * LONGEST_PAUSE_S < LEAST_SILENCE_S


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.parametrize("code", [BURN, BURN_BELOW])
def test_a_cap_is_kept_by_a_worker_and_its_own_children(python: MakeSpec, lines: Lines, code: str) -> None:
    cap_cpus, seconds = 0.2, 8.0
    with Supervisor(sink=lines) as supervisor:
        supervisor.start(python(code, "worker"))
        pid = lines.pid("pid")
        with paced(supervisor, cap_cpus):
            time.sleep(1.0)
            first_s = sum(psutil.Process(pid).cpu_times()[:2])
            time.sleep(seconds)
            used_s = sum(psutil.Process(pid).cpu_times()[:2]) - first_s
    assert 0.5 * cap_cpus < used_s / seconds < 1.2 * cap_cpus


def _can_make_groups() -> bool:
    return os.geteuid() == 0 and any(
        os.access(path, os.W_OK) for path in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cgroup.subtree_control")
    )


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.skipif(not _can_make_groups(), reason="needs root and control groups that can be made")
@pytest.mark.parametrize("threads", [1, 4])
def test_under_a_quota_a_loop_beside_a_paced_worker_is_late_less_often(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "result.json"
    argv = [sys.executable, str(BENCHMARK), "--rounds=1", "--seconds=8", f"--threads={threads}", f"--json={path}"]
    subprocess.run(argv, timeout=150, check=False, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["medians"]
    assert found["priority"]["throttled"] > 0.9
    assert found["paced"]["throttled_s"] < 0.2 * found["priority"]["throttled_s"]
    assert found["paced"]["late"] <= found["priority"]["late"]
    assert found["paced"]["used"] > 0.85
