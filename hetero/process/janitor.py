"""The last resort: a small process that kills what a launcher left behind when it was killed itself.

A launcher that ends in any orderly way ends its children. SIGKILL leaves it no time to, and the kernel's parent-death
signal reaches children but not their children. So the launcher holds a pipe to a janitor, a process in a session of its
own that ignores polite signals, and tells it of each process group that begins and ends. When the pipe closes without
goodbye, the janitor sends SIGKILL to the groups that are left and to every process that carries the launcher's mark,
and then removes the folders it was told of.

The mark is an environment variable, which descendants inherit even into sessions of their own. Marks of nested
launchers are joined by "/", so that an outer one finds the descendants of an inner one too; a janitor carries none.

This file is also run as a script (`python -I -S janitor.py TOKEN`) and imports only what starts in milliseconds.
"""

# ruff: noqa: PTH100, PTH106, PTH118, PTH208, SIM105
# pathlib and contextlib would double the start-up time of the script.
from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` would double the script's start-up time
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

MARK = "HETERO_PROCESS_MARK"
_ABANDONED_SWEEP_S = 10.0


def mark_of(token: str, parent_mark: str | None) -> str:
    """Return the value of the mark for the children of a launcher that may itself be a marked child."""
    return f"{parent_mark}/{token}" if parent_mark else token


def sweep(token: str, timeout_s: float = 1.0) -> list[int]:
    """Send SIGKILL to all processes that carry `token` in their mark, until none is left.

    Each is held by a pidfd while its mark is read, so that a recycled pid is never hit.

    Args:
        token: One part of a mark.
        timeout_s: How long to wait for the killed to be gone.

    Returns:
        The pids that were killed.
    """
    deadline_s = time.monotonic() + timeout_s
    killed: list[int] = []
    while True:
        held = []
        for pid in _marked(token):
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                continue
            held.append(fd)
            if _has_mark(pid, token):
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    killed.append(pid)
                except OSError:
                    pass
        in_time = _wait_gone(held, deadline_s)
        for fd in held:
            os.close(fd)
        if not held or not in_time:
            return killed


def _marked(token: str) -> list[int]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    own = os.getpid()
    return [int(name) for name in names if name.isdigit() and int(name) != own and _has_mark(int(name), token)]


def _has_mark(pid: int, token: str) -> bool:
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    parts = []
    try:
        while part := os.read(fd, 65536):
            parts.append(part)
    except OSError:
        pass
    finally:
        os.close(fd)
    wanted, key = token.encode(), MARK.encode() + b"="
    for variable in b"".join(parts).split(b"\0"):
        if variable.startswith(key):
            return wanted in variable[len(key) :].split(b"/")
    return False


def _wait_gone(pidfds: list[int], deadline_s: float) -> bool:
    """Wait until every process is gone; False if the deadline came first."""
    for fd in pidfds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            return False
    return True


class JanitorHandle:
    """The launcher's end of the pipe. Starts the janitor at once; `close` ends it.

    Args:
        token: The launcher's part of the mark.
        warn: Called with one sentence if the janitor cannot be had or is lost; the job goes on without it.
    """

    def __init__(self, token: str, warn: Callable[[str], None]) -> None:
        import subprocess
        import threading

        self._warn = warn
        self._lock = threading.Lock()
        self._pipe = -1
        self._process: subprocess.Popen[bytes] | None = None
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), token],
                stdin=read_end,
                # Never the launcher's own output: whoever reads that to its end must not wait for the janitor.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != MARK},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            os.close(write_end)
            warn(f"cannot start the janitor ({error}): if this launcher is killed, grandchildren may outlive it")
        else:
            os.set_blocking(write_end, False)
            self._pipe = write_end
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int | None:
        """Pid of the janitor, None if there is none."""
        return None if self._process is None else self._process.pid

    def watch(self, pgid: int) -> None:
        """Tell of a process group that has begun."""
        self._tell(f"+{pgid}\n")

    def forget(self, pgid: int) -> None:
        """Tell of a group that has ended; call it before the leader is reaped, while its number cannot be another's."""
        self._tell(f"-{pgid}\n")

    def own(self, folder: str) -> None:
        """Tell of a folder that has no use without the launcher."""
        self._tell(f"={folder}\n")

    def close(self) -> None:
        """Say goodbye and wait for the janitor to end. May be repeated."""
        import subprocess

        self._tell("bye\n")
        with self._lock:
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _tell(self, text: str) -> None:
        with self._lock:
            if self._pipe < 0:
                return
            try:
                os.write(self._pipe, text.encode())
                return
            except OSError as error:
                os.close(self._pipe)
                self._pipe = -1
                problem = error
        self._warn(f"the janitor is lost ({problem}): if this launcher is killed, grandchildren may outlive it")


def main(token: str) -> int:
    """Serve one launcher: read its messages from stdin until it says goodbye or is gone."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    folders: list[bytes] = []
    rest = b""
    while chunk := os.read(0, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line == b"bye":
                return 0
            _note(line, groups, folders)
    # Groups first: nothing has had time to recycle their numbers, and it reaches members with a cleaned environment.
    for pgid in groups:
        try:
            os.killpg(pgid, signal.SIGKILL)
        except OSError:
            pass
    sweep(token, _ABANDONED_SWEEP_S)
    for folder in folders:
        _remove(folder)
    return 0


def _note(line: bytes, groups: set[int], folders: list[bytes]) -> None:
    if line[:1] == b"+":
        groups.add(int(line[1:]))
    elif line[:1] == b"-":
        groups.discard(int(line[1:]))
    elif line[:1] == b"=":
        folders.append(line[1:])


def _remove(folder: bytes) -> None:
    """Remove a folder and what is in it; os alone, because shutil would double the start-up time."""
    for parent, inner, files in os.walk(folder, topdown=False):
        for name, remove in (*((name, os.unlink) for name in files), *((name, os.rmdir) for name in inner)):
            try:
                remove(os.path.join(parent, name))
            except OSError:
                pass
    try:
        os.rmdir(folder)
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
