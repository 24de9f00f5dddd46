"""A local cluster for tests: one launcher a virtual host, each a process that can be killed alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hetero.clusters.local import LocalCluster
from hetero.control.client import ControlClient
from hetero.control.state import JobState
from hetero.errors import CoordinatorUnreachable

ROWS_JOB = Path(__file__).parent / "jobs" / "rows.py"
REPOSITORY = Path(__file__).resolve().parents[2]
Value = TypeVar("Value")


def patient(timeout_s: float) -> float:
    """Return how long to wait for what only has to come at some time: longer where tests share the CPUs.

    Less than a minute stays what it is, because a test that gives no more says that something comes soon.
    """
    return 3 * timeout_s if timeout_s >= 60 and "PYTEST_XDIST_WORKER" in os.environ else timeout_s


def wait_until(what: str, condition: Callable[[], Value], timeout_s: float = 60.0) -> Value:
    """Return the first true value of `condition`; fail, naming `what`, if there is none in time."""
    deadline = time.monotonic() + patient(timeout_s)
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def _is_dead(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass
class LocalJob:
    """A job on virtual hosts. Use as a context manager: leaving it kills whatever still runs.

    Attributes:
        folder: Scratch folder of the test; the run folder is below it.
        options: Options of the run and the job, given to every launcher.
        launcher: What every host runs.
    """

    folder: Path
    data_hosts: int = 1
    trainer_hosts: int = 1
    options: list[str] = field(default_factory=list)
    job: str = f"{ROWS_JOB}:job"
    launcher: Path = REPOSITORY / "launcher.py"
    launchers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = LocalCluster.create(
            self.folder / "cluster.json", data_hosts=self.data_hosts, trainer_hosts=self.trainer_hosts
        )
        self.run_dir = self.folder / "run"
        self.address = f"127.0.0.1:{self.cluster.control_port}"

    def __enter__(self) -> LocalJob:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.terminate()
        for launcher in self.launchers.values():
            try:
                launcher.wait(20)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()

    def start(self, *hosts: str, options: tuple[str, ...] = ()) -> LocalJob:
        """Start the launchers of these hosts, of all if none is named."""
        for host in hosts or self.cluster.hosts:
            argv = [sys.executable, str(self.launcher), f"--job={self.job}", f"--run-dir={self.run_dir}"]
            output = (self.folder / f"{host}.out").open("w")
            self.launchers[host] = subprocess.Popen(
                [*argv, *self.options, *options],
                env={**os.environ, **self.cluster.environ(host)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output.close()
        return self

    def output(self, host: str) -> str:
        """Return what a host's launcher printed so far."""
        return (self.folder / f"{host}.out").read_text(errors="replace")

    def status(self, token: str | None = None) -> JobState | None:
        """Return the coordinator's state, None while there is no answer."""
        with ControlClient(self.address, token) as client:
            try:
                return client.status(2.0)
            except CoordinatorUnreachable:
                return None

    def pid(self, host: str, process: str, timeout_s: float = 60.0) -> int:
        """Return the pid of a process of a host, waiting until the coordinator knows it."""

        def find() -> int | None:
            state = self.status()
            found = state.host(host) if state else None
            return next((p.pid for p in found.processes if p.name == process and p.pid), None) if found else None

        found = wait_until(f"{process} on {host}", lambda: find() or (-1 if self._over() else None), timeout_s)
        assert found > 0, f"the job ended before {process} of {host} was found: {self.outputs()}"
        return found

    def kill(self, host: str, process: str) -> int:
        """SIGKILL a process of a host, make sure that it is gone, and return its pid; lets held training go on."""
        pid = self.pid(host, process)
        victim = psutil.Process(pid)
        assert process.split("-", maxsplit=1)[0] in " ".join(victim.cmdline()), "the coordinator named another process"
        (self.run_dir / "go").touch()
        victim.send_signal(signal.SIGKILL)
        wait_until(f"the death of {process}", lambda: _is_dead(victim), 10)
        return pid

    def wait_for_steps(self, steps: int, rank: int = 0, timeout_s: float = 90.0) -> None:
        """Wait until a rank has taken that many steps."""
        wait_until(f"step {steps} of rank {rank}", lambda: len(self.seen(rank)) >= steps or self._over(), timeout_s)
        assert len(self.seen(rank)) >= steps, f"the job ended before step {steps}: {self.outputs()}"

    def _over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers.values())

    def seen(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank wrote down, one entry a step."""
        path = self.run_dir / f"seen-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def rows(self, epoch: int, ranks: int) -> Counter[int]:
        """Return how often each row was seen in an epoch, over all ranks."""
        return Counter(
            row for rank in range(ranks) for step in self.seen(rank) if step["epoch"] == epoch for row in step["rows"]
        )

    def wait(self, timeout_s: float = 90.0) -> dict[str, int]:
        """Wait until all launchers have ended and return their exit codes."""
        deadline = time.monotonic() + patient(timeout_s)
        while time.monotonic() < deadline and len(self.ended_s) < len(self.launchers):
            for host, launcher in self.launchers.items():
                if host not in self.ended_s and launcher.poll() is not None:
                    self.ended_s[host] = time.monotonic()
            time.sleep(0.01)
        running = [host for host, launcher in self.launchers.items() if launcher.poll() is None]
        assert not running, f"{running} still run after {timeout_s} s\n{self.outputs()}"
        return {host: launcher.returncode for host, launcher in self.launchers.items()}

    def outputs(self) -> str:
        """Return the end of what every host printed, for a failed assertion."""
        return "\n".join(f"--- {host}\n{self.output(host)[-3000:]}" for host in self.launchers)

    def summary(self) -> dict[str, Any]:
        """Return summary.json."""
        return json.loads((self.run_dir / "summary.json").read_text())

    def failure(self) -> dict[str, Any]:
        """Return failure.json."""
        return json.loads((self.run_dir / "failure.json").read_text())
