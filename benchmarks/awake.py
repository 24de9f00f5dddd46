"""Keep the CPUs of this machine awake while hosts with CPU quotas are compared.

A host in a quota sleeps for a part of each period. Between two of its turns a CPU that has nothing else to do goes to
sleep and has to wake up, and a virtual machine's may be given to somebody else; a host that never sleeps pays nothing
of that. Measured without this: processes with 0.3 + 0.3 + 0.4 CPUs prepared 0.93 of what one with 1.0 did; with it
0.98.

So each CPU gets a process that spins, in a control group that takes only what nobody else wants.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from types import TracebackType

from control_groups import ControlGroup

_SPIN = """
import os
cpu, parent = {cpu}, {parent}
os.sched_setaffinity(0, [cpu])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class Awake:
    """A context manager: while it is open, no CPU that this process may run on sleeps.

    It starts a process a CPU, and ends them when it is left; they end by themselves if this process is killed.

    Raises:
        BenchmarkFailed: Control groups cannot be made here.
    """

    def __init__(self) -> None:
        self._left = contextlib.ExitStack()

    def __enter__(self) -> Awake:  # noqa: PYI034 - Self needs Python 3.11
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(ControlGroup("awake"))
            group.yield_to_others()
            for cpu in sorted(os.sched_getaffinity(0)):
                code = _SPIN.format(cpu=cpu, parent=os.getpid())
                spinner = subprocess.Popen(
                    group.command([sys.executable, "-S", "-E", "-c", code]),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                stack.callback(_end, spinner)
            self._left = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()


def _end(spinner: subprocess.Popen[bytes]) -> None:
    spinner.kill()
    spinner.wait()
