"""Processes that take only what others leave: local workers beside the ranks of a trainer host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOWEST = 19
"""Niceness that a process sinks to: beside one of the ordinary 0 it gets 15 parts of a CPU of 1,039 (man 7 sched); with
10 it would be 110 of 1,134, and training that uses all CPUs would lose a tenth."""
_OOM_SCORE = 500  # of -1000 to 1000: killed before a rank with up to half of the memory more


def yield_to_others(proc: Path = Path("/proc/self")) -> None:
    """Have this process, and those it starts from now on, run when others do not want to, and die first for memory.

    What a system refuses or does not have is left out; nothing here is needed to be right, only to be polite.

    Args:
        proc: The process's folder in /proc.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # does not preempt others when it wakes up
    with contextlib.suppress(OSError):
        os.nice(LOWEST)
    with contextlib.suppress(OSError):
        (proc / "oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")
    if os.getsid(0) == os.getpid():
        # Outside containers Linux may weigh sessions against each other instead (sched_autogroup_enabled), and then
        # niceness counts within one only.
        with contextlib.suppress(OSError):
            (proc / "autogroup").write_text(str(LOWEST), encoding="ascii")
