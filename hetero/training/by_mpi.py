"""What a rank does differently where Horovod's ranks meet through MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


def rank_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank that uses MPI needs of its slot's environment; its number it has from MPI."""
    interface = {name: env[name] for name in ("NCCL_SOCKET_IFNAME",) if name in env}  # mpirun passes on its own host's
    return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", **interface}


def call_within(timeout_s: float, call: Callable[[], object]) -> None:
    """Call in another thread; raise what it raises, and TimeoutError if it has not returned in time (MPI has no such).

    The thread then stays where it is: the process has to end.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="hetero-init", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(f"not all ranks came within {timeout_s:g} s")
    if raised:
        raise raised[0]
