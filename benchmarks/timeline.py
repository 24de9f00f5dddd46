"""What happens when in the start of a job, put together from its processes, its coordinator and its job file."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from virtual_hosts import VirtualHosts, started_at

from hetero.control.client import ControlClient
from hetero.control.state import JobState
from hetero.host import CONFIG_VARIABLE

MOMENTS_VARIABLE = "BENCHMARK_MOMENTS"
_LOOK_S = 0.01


def read_moments(path: Path) -> dict[str, float]:
    """Return the notes of `jobs/digits_timed.py`: moment -> seconds since 1970, the first of each."""
    moments: dict[str, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.endswith("}"):
            note = json.loads(line)
            moments.setdefault(note["moment"], note["time_s"])
    return moments


class Observer:
    """Watches a job start from outside, in a thread: costs it about 1 % of a CPU, so measured runs go without.

    Args:
        hosts: The job; `watch` before or right after its start.

    Attributes:
        moments: What was seen, seconds since 1970.
    """

    def __init__(self, hosts: VirtualHosts) -> None:
        self.moments: dict[str, float] = {}
        self._hosts = hosts
        self._closed = threading.Event()
        self._client = ControlClient(hosts.control_address)
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
        self._client.close()

    def _watch(self) -> None:
        while not self._closed.is_set():
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._hosts.cluster.control_port)) == 0:
                    break
            time.sleep(_LOOK_S)
        else:
            return
        self._note("coordinator listens")
        self._client.watch(self._on_state)

    def _on_state(self, state: JobState) -> None:
        for host in state.hosts:
            if host.registered:
                self._note(f"{host.name} registered")
            for process in host.processes:
                name = f"{host.name}: {process.name}"
                if process.pid and f"{name} started" not in self.moments:
                    self._note_process(name, process.pid)
            if host.workers_alive:
                self._note(f"{host.name} reports a living worker")
        for name in state.endpoints:
            self._note(f"{name} published")
        if state.phase.value == "training":
            self._note("job is in phase training")

    def _note_process(self, name: str, pid: int) -> None:
        try:
            started_s = started_at(pid)
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return
        self.moments[f"{name} started"] = started_s
        prefix = CONFIG_VARIABLE.encode() + b"="
        config = next((entry[len(prefix) :] for entry in environment if entry.startswith(prefix)), None)
        if config is not None:
            host = name.partition(":")[0]
            self.moments.setdefault(f"{host}: launcher imported, main() called", json.loads(config)["started_s"])

    def _note(self, moment: str) -> None:
        self.moments.setdefault(moment, time.time())


def timeline_table(title: str, started_s: float, moments: dict[str, float]) -> Table:
    """Return the moments in order of time, in seconds since the launchers' start."""
    table = Table(title=title)
    table.add_column("s", justify="right")
    table.add_column("after", justify="right")
    table.add_column("what")
    before_s = started_s
    for moment, at_s in sorted(moments.items(), key=lambda entry: entry[1]):
        table.add_row(f"{at_s - started_s:.2f}", f"+{at_s - before_s:.2f}", moment)
        before_s = at_s
    return table


def cpu_count() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def as_json(started_s: float, moments: dict[str, float]) -> list[dict[str, Any]]:
    """Return the timeline as JSON values."""
    ordered = sorted(moments.items(), key=lambda entry: entry[1])
    return [{"s": round(at_s - started_s, 3), "moment": moment} for moment, at_s in ordered]
