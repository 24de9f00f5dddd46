"""How a launcher learns that the process which started it has ended.

SageMaker's toolkit does not pass on the signal that stops a job. Where it dies of that signal, its launcher would go on
as an orphan until the machine is switched off.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

PARENT_GONE = signal.SIGHUP
"""What this process is sent; not SIGTERM, which may reach it as well and counts as a second wish then."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHELLS = ("sh", "dash", "bash", "ash")
_LOOK_S = 0.5


def watch_parent() -> None:
    """Have this process sent PARENT_GONE when the process that started it ends. Linux; does nothing elsewhere.

    The kernel sends it (PR_SET_PDEATHSIG). The toolkit starts its script by `sh -c`, and not every shell replaces
    itself by its last command: where shells stand between, a daemon thread looks every half second whether the one
    that was started first has got another parent. The handler of the signal must be set before.
    """
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    line = _line_of(parent)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, PARENT_GONE, 0, 0, 0)
    if os.getppid() != parent:  # ended before prctl: the signal would never come
        os.kill(os.getpid(), PARENT_GONE)
    elif len(line) > 1:
        threading.Thread(target=_watch, args=(line,), name="watch-parent", daemon=True).start()


def _line_of(pid: int) -> list[int]:
    """Return a process and, as long as these are shells, those that started it."""
    line = [pid]
    while line[-1] > 1 and _command(line[-1]) in _SHELLS:
        line.append(_parent_of(line[-1]))
    return line


def _watch(line: list[int]) -> None:
    while all(_parent_of(child) == parent for child, parent in itertools.pairwise(line)):
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), PARENT_GONE)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 where the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the command before it may hold anything
