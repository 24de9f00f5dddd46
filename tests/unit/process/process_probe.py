"""What the tests of processes look with: conditions with deadlines, and a sink that remembers."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from hetero.process import ChildSpec

MakeSpec = Callable[..., ChildSpec]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody waits for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Lines(list[str]):
    """A sink that keeps what it gets; appending is atomic."""

    def __call__(self, line: str) -> None:
        self.append(line)

    def wait_for(self, text: str) -> str:
        wait_until(lambda: any(text in line for line in self), f"a line with {text!r} in {self!r}")
        return next(line for line in self if text in line)

    def pid(self, label: str) -> int:
        """Wait for a line "LABEL <pid>" and return the pid."""
        return int(self.wait_for(label + " ").split()[-1])
