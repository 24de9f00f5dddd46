"""Coordinators for tests: in a thread, where a test looks inside, and as a process, where one is killed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from hetero.control.config import CoordinatorConfig
from hetero.control.coordinator import Coordinator
from hetero.control.ledger import Ledger

DEADLINE_S = 15.0


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CoordinatorThread:
    """A coordinator in an event loop of its own."""

    def __init__(self, config: CoordinatorConfig, ledger: Ledger | None) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-coordinator", daemon=True)
        self._thread.start()
        self.coordinator = self.run(self._make(config, ledger))
        self.port = self.run(self.coordinator.start())
        self.address = f"127.0.0.1:{self.port}"

    async def _make(self, config: CoordinatorConfig, ledger: Ledger | None) -> Coordinator:
        return Coordinator(config, ledger)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def stop(self) -> None:
        if self.loop.is_closed():
            return
        self.run(self.coordinator.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()


class CoordinatorProcess:
    """A coordinator as its own process, which can be killed."""

    MAIN = (
        "import sys; from hetero.control.coordinator import CoordinatorConfig, serve;"
        "serve(CoordinatorConfig.from_json(sys.argv[1]), on_ready=lambda port: print(port, flush=True))"
    )

    def __init__(self, config: CoordinatorConfig) -> None:
        argv = [sys.executable, "-c", self.MAIN, config.to_json()]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def wait_ready(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def end(self, signum: int) -> str:
        if self._process.returncode is None:
            os.kill(self.pid, signum)
        return self._process.communicate(timeout=DEADLINE_S)[1]

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode
