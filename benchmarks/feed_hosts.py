"""The processes of one virtual data host of feed_cluster.py, kept alive as its launcher would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from virtual_hosts import BenchmarkFailed

from hetero.control.state import HostReport, ProcessReport
from hetero.host import CONFIG_VARIABLE, PORT_VARIABLE, PROCESS_VARIABLE, HostConfig
from hetero.process.child import PARENT_PID

RESTART_S = 0.2
START_S = 60.0


class Kept:
    """One process of a host, started again after each death until it is to stay dead.

    A thread starts it and waits for it: the kernel ends a child of hetero.children with the thread that started it.

    Attributes:
        name: Its name within the host.
        deaths: How it ended each time: an exit code, or -N for signal N.
    """

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.deaths: list[int] = []
        self._argv, self._environment, self._log = argv, environment, log
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._keep, name=f"keep-{name}", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with self._changed:
                if self._stopped:
                    return
                with self._log.open("ab") as output:
                    self._process = process = subprocess.Popen(
                        self._argv,
                        env={**self._environment, PARENT_PID: str(os.getpid())},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                self._changed.notify_all()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: nobody else gets its pid yet
            with self._changed:
                code = process.wait()
                self._process = None
                self.deaths.append(code)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped, RESTART_S)

    @property
    def pid(self) -> int | None:
        """Pid, None while it is dead."""
        process = self._process
        return None if process is None else process.pid

    def wait_alive(self, timeout_s: float = START_S) -> int:
        """Return its pid, waiting for its next start if it is dead."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._process is not None, timeout_s) or self._process is None:
                raise BenchmarkFailed(f"{self.name} was not started again within {timeout_s:g} s")
            return self._process.pid

    def kill(self, signum: int = signal.SIGKILL, timeout_s: float = 10.0) -> int:
        """Send a signal that ends it, make sure that it is dead, and return the pid it had. It is started again.

        Raises:
            BenchmarkFailed: It was not running, or did not die.
        """
        with self._changed:
            if self._process is None:
                raise BenchmarkFailed(f"{self.name} is to be killed, but it is not running")
            pid, deaths = self._process.pid, len(self.deaths)
            os.killpg(pid, signum)
            if not self._changed.wait_for(lambda: len(self.deaths) > deaths, timeout_s):
                raise BenchmarkFailed(f"{self.name} did not die of signal {signum} within {timeout_s:g} s")
            return pid

    def condemn(self) -> None:
        """SIGKILL it and start it no more; does not wait."""
        with self._changed:
            self._stopped = True
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until a condemned process is dead."""
        self._thread.join()


class DataHost:
    """One virtual data host: its processes and its lease.

    Args:
        config: As its processes get it.
        workers: Number of its workers.
        log: Folder for what they print.
        environment: Variables for its processes.
        control_port: Runs the coordinator on this port; None: another host does.
    """

    def __init__(
        self, config: HostConfig, workers: int, log: Path, environment: Mapping[str, str], control_port: int | None
    ) -> None:
        self.name = config.host
        self.processes: dict[str, Kept] = {}
        common = {**environment, CONFIG_VARIABLE: config.to_json()}

        def keep(name: str, port: int, *arguments: str) -> None:
            argv = [sys.executable, "-m", "hetero.children", *arguments]
            variables = {**common, PROCESS_VARIABLE: name, PORT_VARIABLE: str(port)}
            self.processes[name] = Kept(name, argv, variables, log / self.name / f"{name}.log")

        if control_port is not None:
            keep("coordinator", control_port, "coordinator")
        keep("feed", 0, "feed")
        for index in range(workers):
            keep(f"worker-{index}", 0, "feed-worker", str(workers))
        self._control = config.connect()

    def join_job(self) -> None:
        """Register with the coordinator and keep the lease."""
        self._control.register(self._report(), START_S)
        self._control.start_lease(self._report, lambda _silent_s: None)

    def _report(self) -> HostReport:
        workers = [kept for name, kept in self.processes.items() if name.startswith("worker-")]
        alive = sum(kept.pid is not None for kept in workers)
        return HostReport(
            workers_alive=alive,
            workers_busy=alive,
            workers_lost=sum(len(kept.deaths) for kept in workers),
            processes=tuple(ProcessReport(name, kept.pid or 0, "running") for name, kept in self.processes.items()),
        )

    def kill(self) -> None:
        """SIGKILL everything at once, as the loss of a machine does; nothing of it is started again."""
        for kept in self.processes.values():
            kept.condemn()
        self._control.close()
        for kept in self.processes.values():
            kept.join()
