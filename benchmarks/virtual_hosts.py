"""A job on virtual hosts of this machine: one launcher each, a child of the benchmark, which times its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from hetero.clusters.local import LocalCluster
from hetero.control.client import ControlClient
from hetero.control.state import JobState
from hetero.errors import CoordinatorUnreachable

REPOSITORY = Path(__file__).resolve().parents[1]
_STOP_S = 20.0


class BenchmarkFailed(Exception):
    """What was to be measured did not happen; says what, and shows the end of the hosts' output."""


@dataclass(frozen=True)
class LauncherExit:
    """How a launcher ended.

    Attributes:
        code: Its exit code, -N if signal N ended it.
        ended_s: When, on the clock of `time.monotonic`.
    """

    code: int
    ended_s: float


class VirtualHosts:
    """The launchers of one job. A context manager: leaving it ends whatever still runs.

    Args:
        folder: Scratch folder; each host's output and the run's folder go there.
        job: `path/to/job.py:name`.
        data_hosts: Number of data hosts.
        trainer_hosts: Number of trainer hosts.
        options: Options for every launcher.
        environment: Variables for every launcher, beside this process's own.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        *,
        data_hosts: int,
        trainer_hosts: int,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.cluster = LocalCluster.create(folder / "cluster.json", data_hosts=data_hosts, trainer_hosts=trainer_hosts)
        self._arguments = (f"--job={job}", f"--run-dir={self.run_dir}", *options)
        self._environment = {**clean_environment(), **(environment or {})}
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._waiters: list[threading.Thread] = []
        self._exits: dict[str, LauncherExit] = {}

    def __enter__(self) -> VirtualHosts:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def command(self, host: str) -> list[str]:  # noqa: ARG002 - for hosts that differ
        """Return the command line of a host's launcher."""
        return [sys.executable, str(REPOSITORY / "launcher.py"), *self._arguments]

    def start(self) -> float:
        """Start all launchers, data hosts first; return the time just before the first, seconds since 1970."""
        started_s = time.time()
        for host in self.cluster.hosts:
            with (self.folder / f"{host}.out").open("wb") as output:
                self._launchers[host] = subprocess.Popen(
                    self.command(host),
                    env={**self._environment, **self.cluster.environ(host)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the benchmark, which stops them
                )
        for host, launcher in self._launchers.items():
            waiter = threading.Thread(target=self._wait_for, args=(host, launcher), daemon=True)
            waiter.start()
            self._waiters.append(waiter)
        return started_s

    def terminate(self) -> None:
        """Ask all launchers to end."""
        for launcher in self._launchers.values():
            if launcher.poll() is None:
                launcher.terminate()

    def _wait_for(self, host: str, launcher: subprocess.Popen[bytes]) -> None:
        code = launcher.wait()
        self._exits[host] = LauncherExit(code, time.monotonic())

    def wait(self, timeout_s: float) -> dict[str, LauncherExit]:
        """Wait until all launchers have ended well and return how.

        Raises:
            BenchmarkFailed: One did not end in time, or not with exit code 0.
        """
        deadline_s = time.monotonic() + timeout_s
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline_s - time.monotonic()))
        if len(self._exits) < len(self._launchers):
            running = ", ".join(sorted(set(self._launchers) - set(self._exits)))
            raise BenchmarkFailed(f"not ended after {timeout_s:g} s: {running}\n{self.outputs()}")
        failed = {host: end.code for host, end in self._exits.items() if end.code}
        if failed:
            raise BenchmarkFailed(f"launchers failed, exit codes {failed}\n{self.outputs()}")
        return {host: self._exits[host] for host in self._launchers}

    def stop(self) -> None:
        """End whatever still runs, politely first; the launchers end their own children."""
        self.terminate()
        deadline_s = time.monotonic() + _STOP_S
        for launcher in self._launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, deadline_s - time.monotonic()))
            if launcher.poll() is None:
                launcher.kill()
        for waiter in self._waiters:
            waiter.join()

    @property
    def over(self) -> bool:
        """Whether a launcher has ended."""
        return bool(self._exits)

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each host's launcher."""
        return {host: launcher.pid for host, launcher in self._launchers.items()}

    @property
    def control_address(self) -> str:
        """host:port of the coordinator."""
        return f"127.0.0.1:{self.cluster.control_port}"

    def pid(self, host: str, process: str, timeout_s: float) -> int:
        """Return the pid of a host's process as the coordinator knows it, waiting until it does.

        Raises:
            BenchmarkFailed: It did not come.
        """
        with ControlClient(self.control_address) as client:
            deadline_s = time.monotonic() + timeout_s
            while time.monotonic() < deadline_s and not self.over:
                try:
                    pid = pid_of(client.status(1.0), host, process)
                except CoordinatorUnreachable:
                    pid = None
                if pid is not None:
                    return pid
                time.sleep(0.1)
        raise BenchmarkFailed(f"{process} of {host} did not come within {timeout_s:g} s\n{self.outputs()}")

    def outputs(self) -> str:
        """Return the end of what every host printed."""
        texts = {host: (self.folder / f"{host}.out").read_text(errors="replace") for host in self._launchers}
        return "\n".join(f"--- {host}\n{text[-2000:]}" for host, text in texts.items())

    def summary(self) -> dict[str, Any]:
        """Return summary.json."""
        values: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        return values


def pid_of(state: JobState, host: str, process: str) -> int | None:
    """Return the pid of a host's process, None if it is not known."""
    found = state.host(host)
    return next((p.pid for p in found.processes if p.name == process and p.pid), None) if found else None


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would change the runs."""
    foreign = ("HETERO_", "SM_", "HOROVOD_", "OMPI_", "SAGEMAKER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "2"}


class ProcessEnd:
    """Sees a process of somebody else end, by a pidfd: no polling, and no other process that gets its pid.

    Args:
        pid: The process.
        words: All of them must be in its command line.

    Raises:
        BenchmarkFailed: It is not there, or is another one.
    """

    def __init__(self, pid: int, *words: str) -> None:
        try:
            self._fd = os.pidfd_open(pid)
            command = psutil.Process(pid).cmdline()
        except (ProcessLookupError, psutil.NoSuchProcess) as error:
            raise BenchmarkFailed(f"process {pid} ended before it was looked at; make the job longer") from error
        if not all(word in command for word in words):
            raise BenchmarkFailed(f"process {pid} is {command}, not {' '.join(words)}")

    def wait(self, timeout_s: float) -> float:
        """Return when it ended, on the clock of `time.monotonic`.

        Raises:
            BenchmarkFailed: It did not in time.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        ended = poll.poll(timeout_s * 1000)
        now_s = time.monotonic()
        os.close(self._fd)
        if not ended:
            raise BenchmarkFailed(f"the process did not end within {timeout_s:g} s")
        return now_s


def started_at(pid: int | str = "self") -> float:
    """Return when a process was started, seconds since 1970, to 10 ms; psutil knows the boot time to a second only."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, man 5 proc
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
