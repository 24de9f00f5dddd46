"""Fixtures that end every coordinator and client that a test started."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_job import FakeClock, Job
from control_running import CoordinatorProcess, CoordinatorThread

from hetero.control.client import ControlClient
from hetero.control.config import CoordinatorConfig
from hetero.control.ledger import Ledger


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., CoordinatorConfig]:
    def make(**changes: object) -> CoordinatorConfig:
        values = {
            "port": 0,
            "bind": "127.0.0.1",
            "data": ("d1", "d2"),
            "trainers": ("t1", "t2"),
            "journal": tmp_path / "journal.json",
            "run_id": "run-1",
            "start_timeout_s": 60.0,
            "lease_s": 10.0,
        }
        return CoordinatorConfig(**{**values, **changes})

    return make


@pytest.fixture
def start_coordinator(make_config) -> Iterator[Callable[..., CoordinatorThread]]:
    started: list[CoordinatorThread] = []

    def start(*, ledger: Ledger | None = None, **changes: object) -> CoordinatorThread:
        started.append(CoordinatorThread(make_config(**changes), ledger))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def spawn_coordinator(make_config) -> Iterator[Callable[..., CoordinatorProcess]]:
    spawned: list[CoordinatorProcess] = []

    def spawn(**changes: object) -> CoordinatorProcess:
        spawned.append(CoordinatorProcess(make_config(**changes)))
        return spawned[-1]

    yield spawn
    for one in spawned:
        one.end(signal.SIGKILL)


@pytest.fixture
def make_client() -> Iterator[Callable[..., ControlClient]]:
    made: list[ControlClient] = []

    def make(address: str, host: str = "", token: str | None = None, **more: str) -> ControlClient:
        role = {"d": "data", "t": "trainer", "": ""}[host[:1]]
        made.append(ControlClient(address, token, host, role, **more))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def make_job(make_config):
    def make(**changes: object) -> Job:
        return Job(make_config(**changes), FakeClock())

    return make
