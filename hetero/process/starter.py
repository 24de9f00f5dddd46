"""Makes sure that mpirun ends on this host once its launcher has failed.

mpirun, and its daemon `orted` on the other hosts, end their processes when one of them has failed; then they wait until
all hosts have said so. One that has vanished never does, and they wait for ever: the job would be paid for and do
nothing. So a launcher that fails leaves a small process that waits for mpirun's end, and kills it when it is overdue.

This file is also run as a script (`python -I -S starter.py PIDFD SECONDS`), so it imports only what starts quickly.
"""

from __future__ import annotations

import os
import select
import signal
import sys

_STARTERS = ("mpirun", "mpiexec", "orterun", "orted")


def end_starter(within_s: float) -> bool:
    """See to it that the mpirun or orted that started this process ends.

    Starts a process in a session of its own, which holds none of this one's files and ends when mpirun does.

    Args:
        within_s: How long it may take by itself.

    Returns:
        False if no such process started this one, or it cannot be watched.
    """
    import subprocess

    import psutil

    try:
        starter = next((parent for parent in psutil.Process().parents() if parent.name() in _STARTERS), None)
        if starter is None:
            return False
        pidfd = os.pidfd_open(starter.pid)  # from here on it cannot be another process's number
    except (psutil.Error, OSError, AttributeError):  # pidfd_open: Linux 5.3
        return False
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(pidfd), str(within_s)],  # noqa: PTH100
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(pidfd,),
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def main(pidfd: int, seconds: float) -> int:
    """Wait for the end of a process, and kill it if it does not come."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(seconds * 1000):
        try:  # noqa: SIM105  contextlib would double the start-up time of the script
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
