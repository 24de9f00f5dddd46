"""Strangers at the coordinator's port: an honest host beside them must not notice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hetero.control.client import ControlClient
from hetero.control.config import CoordinatorConfig
from hetero.control.state import HostReport, Outcome, Phase
from hetero.errors import Unauthorised

DEADLINE_S = 30.0
TOKEN = "secret"
LEASE_S = 3.0
MAIN = (
    "import sys; from hetero.control.coordinator import CoordinatorConfig, serve;"
    "serve(CoordinatorConfig.from_json(sys.argv[1]), on_ready=lambda port: print(port, flush=True))"
)


class Server:
    def __init__(self, config: CoordinatorConfig) -> None:
        argv = [sys.executable, "-c", MAIN, config.to_json()]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"


class Honest:
    """A trainer host with a lease, in a job that can only end when it says so."""

    def __init__(self, server: Server) -> None:
        self.beats = threading.Semaphore(0)
        self.silences: list[float] = []
        self.client = ControlClient(server.address, TOKEN, "t1", "trainer")
        self.client.register(HostReport(ranks=1), DEADLINE_S)
        self.client.wait_for(lambda s: s.phase is Phase.TRAINING, DEADLINE_S, "training")
        self.client.start_lease(self._report, self.silences.append)

    def _report(self) -> HostReport:
        self.beats.release()
        return HostReport(ranks=1)

    def live_through_a_lease(self) -> None:
        for _ in range(12):
            assert self.beats.acquire(timeout=DEADLINE_S)

    def end_well(self, server: Server) -> None:
        state = self.client.status()
        assert (state.phase, state.restarts) == (Phase.TRAINING, 0)
        assert self.silences == []
        assert server.process.poll() is None
        assert self.client.end_training(Outcome.SUCCEEDED).outcome is Outcome.SUCCEEDED


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    config = CoordinatorConfig(
        port=0,
        bind="127.0.0.1",
        data=(),
        trainers=("t1",),
        journal=tmp_path / "journal.json",
        run_id="run-1",
        token=TOKEN,
        lease_s=LEASE_S,
    )
    server = Server(config)
    yield server
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(DEADLINE_S) == 0
    server.process.stdout.close()


@pytest.fixture
def honest(server: Server) -> Iterator[Honest]:
    honest = Honest(server)
    yield honest
    honest.client.close()


def connections_of(server: Server) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(server.process.pid).net_connections("tcp"))


def test_a_hundred_idle_connections_disturb_nobody(server, honest):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S))
        deadline_s = time.monotonic() + DEADLINE_S
        while connections_of(server) < 101:  # the attack has taken place
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        honest.live_through_a_lease()
        honest.end_well(server)


def test_a_hundred_connections_with_random_bytes_disturb_nobody(server, honest):
    rng = random.Random(7)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    sent = 0
    with contextlib.ExitStack() as stack:
        for index in range(100):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S))
            payload = (preface if index % 2 else b"") + rng.randbytes(4096)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(payload)
                sent += 1
        assert sent >= 90
        honest.live_through_a_lease()
        honest.end_well(server)


def test_a_port_scan_disturbs_nobody(server, honest):
    for index in range(300):
        scanner = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        if index % 2:  # leave with a reset instead of a goodbye
            scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        scanner.close()
    honest.live_through_a_lease()
    honest.end_well(server)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_strangers_without_the_token_change_nothing(server, honest, token):
    before = honest.client.status()
    for _ in range(20):
        with ControlClient(server.address, token, "t1", "trainer") as stranger:
            for ask in (
                lambda: stranger.end_training(Outcome.FAILED, {"message": "sabotage"}),
                lambda: stranger.report_failure({"message": "sabotage"}),
                lambda: stranger.publish("rendezvous", "evil:1"),
                lambda: stranger.register(HostReport(), DEADLINE_S),
                stranger.status,
            ):
                with pytest.raises(Unauthorised):
                    ask()
            assert stranger.leave("sabotage") is None
    after = honest.client.status()
    assert (after.version, after.endpoints) == (before.version, before.endpoints)
    honest.live_through_a_lease()
    honest.end_well(server)
