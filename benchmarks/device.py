"""How late the simulated accelerator wakes its loop up, and what CPU it takes: `python benchmarks/device.py`.

Runs `hetero.training.device.SimulatedDevice` as a rank does, asleep in `Stopping.pause`, and for comparison in
`time.sleep`; alone, then with as many computing processes beside it as there are CPUs. Each round is repeated in turn.
Prints JSON: by step time, neighbours and sleep, the wake-ups' lateness in microseconds (p50, p95, worst), the CPU
microseconds that a step takes, and the stall that a loop would see that does nothing and never waits for input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from hetero.stopping import Stopping
from hetero.training.device import SimulatedDevice, stall

STEPS_MS = (2.0, 20.0, 100.0)
ROUND_S = 1.5
"""Seconds of a round; a round has at least ten steps."""


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Have processes compute beside this one."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def nothing(*_: object) -> Any:
    """Stand for the launcher, which is not there."""


def sleeps() -> dict[str, Callable[[float], object]]:
    """Return the ways to sleep by their names."""
    stopping = Stopping(0, 1.0, order=nothing, lost=nothing, follows_from_a_peer=nothing, report=nothing)
    return {"pause": stopping.pause, "time.sleep": time.sleep}


class Round:
    """What the rounds of one kind have come to."""

    def __init__(self, step_ms: float) -> None:
        self.step_ms = step_ms
        self.late_s: list[float] = []
        self.cpu_s = self.busy_s = self.idle_s = 0.0

    def run(self, sleep: Callable[[float], object]) -> None:
        """Take steps for a while."""

        def timed(seconds: float) -> None:
            began_s = time.monotonic()
            sleep(seconds)
            self.late_s.append(time.monotonic() - began_s - seconds)

        device = SimulatedDevice(self.step_ms / 1000, sleep=timed)
        steps = max(10, math.ceil(1000 * ROUND_S / self.step_ms))
        cpu_s = time.thread_time()
        for _ in device.drive(repeat(None, steps), nothing_logged):
            pass
        self.cpu_s += time.thread_time() - cpu_s
        self.busy_s += device.busy_s
        self.idle_s += device.idle_s

    def to_dict(self) -> dict[str, float]:
        """Return the figures as JSON values."""
        late_s = sorted(self.late_s)
        quantiles = {"p50": 0.5, "p95": 0.95, "worst": 1.0}
        late = {
            f"late_us_{name}": 1e6 * late_s[max(0, math.ceil(part * len(late_s)) - 1)]
            for name, part in quantiles.items()
        }
        values = {**late, "cpu_us_a_step": 1e6 * self.cpu_s / len(late_s)}
        rounded = {name: round(value, 1) for name, value in values.items()}
        return {"steps": len(late_s), **rounded, "stall": round(stall(self.busy_s, self.idle_s) or 0.0, 6)}


def nothing_logged(**_: object) -> None:
    """Stand for the meter."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cpus = len(os.sched_getaffinity(0))
    kinds = {(step_ms, busy, name): Round(step_ms) for step_ms in STEPS_MS for busy in (0, cpus) for name in sleeps()}
    for _ in range(rounds):
        for busy in (0, cpus):
            with neighbours(busy):
                for (_, beside, name), one in kinds.items():
                    if beside == busy:
                        one.run(sleeps()[name])
    results = [
        {"step_ms": step_ms, "neighbours": busy, "sleep": name, **one.to_dict()}
        for (step_ms, busy, name), one in kinds.items()
    ]
    print(json.dumps({"cpus": cpus, "load": os.getloadavg()[0], "rounds": rounds, "results": results}, indent=2))


if __name__ == "__main__":
    main()
