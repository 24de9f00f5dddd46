"""One child process: started in a group of its own, heard line by line, signalled as a group, reaped at once.

Who ends what: `Child` starts the process and two daemon threads (output, reaper). The owner ends the process with
`terminate` and `kill`; the reaper kills what the leader leaves of its group, reaps the leader, and both threads end.

A pid is signalled only while it cannot be another process's: the reaper first learns of the exit without reaping (the
zombie keeps its number), kills the rest of the group, and reaps under the same lock that `terminate` and `kill` take.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hetero.errors import ChildFailed
from hetero.process.janitor import MARK, mark_of, sweep
from hetero.process.output import LineSink, OutputReader
from hetero.spec import NEVER, RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PARENT_PID = "HETERO_PARENT_PID"
_DRAIN_S = 0.25
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class ChildSpec:
    """Blueprint of one child.

    Args:
        name: Unique in its supervisor.
        argv: Command line.
        env: Its whole environment. HETERO_PARENT_PID and HETERO_PROCESS_MARK are added, and PYTHONUNBUFFERED=1
            unless the variable is there, so that lines come when they are written.
        log_path: File that its output is appended to, or None.
        prefix: Put before each line on the console, such as "[data algo-1 worker-0] ".
        restarts: What happens when it fails.
        error_path: File that it writes its exception to (`record_exception`); removed before each start.
        cwd: Working directory, None for the launcher's.
        critical: Whether its failure for good is the root cause even if a child that is not critical failed earlier.
        endless: Whether it ends only when it is told to: ending by itself, also with exit code 0, is a failure.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path | None = None
    prefix: str = ""
    restarts: RestartPolicy = NEVER
    error_path: Path | None = None
    cwd: Path | None = None
    critical: bool = True
    endless: bool = False


@dataclass(frozen=True)
class ChildExit:
    """How a child ended.

    Args:
        name: The child.
        pid: Its pid, by now free for others.
        exit_code: Its exit code; None if a signal ended it, or if its status is unknown.
        signal: Name of the signal that ended it.
        time_s: When, seconds since the epoch.
        sent: Signals that we had sent before it ended, by name, and when we first did.
        cpu_s: CPU seconds of it and the descendants that it waited for.
    """

    name: str
    pid: int
    exit_code: int | None
    signal: str | None
    time_s: float
    sent: Mapping[str, float]
    cpu_s: float

    @property
    def stopped(self) -> bool:
        """Whether it ended because we asked: after our TERM by exit code 0 or 143, or by a signal that we sent."""
        return bool(self.sent) and (self.signal in self.sent or self.exit_code in (0, 128 + signal.SIGTERM))


class GroupWatch(Protocol):
    """Who is told of process groups that begin and end: the janitor."""

    def watch(self, pgid: int) -> None:
        """Tell of a group that has begun."""
        ...

    def forget(self, pgid: int) -> None:
        """Tell of a group that is about to be gone."""
        ...


class Child:
    """A running child. The constructor starts it.

    Args:
        spec: What to start.
        sink: Takes its output.
        on_exit: Called once from the reaper thread, after `exit` has been set; must not block.
        groups: Told of the process group.
        token: Mark for it and its descendants (`janitor.sweep`).

    Raises:
        ChildFailed: It cannot be started.

    The calling thread must live as long as the child: Linux sends the parent-death signal when the *thread* that forked
    ends.
    """

    def __init__(
        self, spec: ChildSpec, sink: LineSink, on_exit: Callable[[], None], groups: GroupWatch | None, token: str
    ) -> None:
        self.spec = spec
        self.exit: ChildExit | None = None
        self._on_exit = on_exit
        self._groups = groups
        self._own_mark = f"{token}.{spec.name}.{time.monotonic_ns()}"
        self._lock = threading.RLock()  # re-entrant: a signal handler may call terminate
        self._done = threading.Event()
        self._sent: dict[str, float] = {}
        self._paused = False
        self._reaped = False
        self._cpu_s: float | None = None
        if spec.error_path is not None:
            spec.error_path.unlink(missing_ok=True)
        self._process = self._start(token)
        self.pid = self._process.pid
        self.started_s = time.monotonic()
        if groups is not None:
            groups.watch(self.pid)
        try:
            self._output = OutputReader(spec.name, _own_pipe(self._process), spec.log_path, spec.prefix, sink)
            threading.Thread(target=self._reap, name=f"reaper of {spec.name}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            raise ChildFailed(
                f"Cannot watch {spec.name}: {error}. Raise the limit of processes (ulimit -u)."
            ) from error

    def terminate(self) -> bool:
        """Send SIGTERM to the group; False if the leader had ended by itself before."""
        return self._send(signal.SIGTERM)

    def kill(self) -> bool:
        """Send SIGKILL to the group; False if the leader had ended before."""
        return self._send(signal.SIGKILL)

    def pause(self) -> bool:
        """Stop the group (SIGSTOP) until `resume`; False if it has ended or was told to, which also ends any pause."""
        with self._lock:
            if self._sent or self._reaped or self._leader_has_ended():
                return False
            self._paused = self._signal_group(signal.SIGSTOP)
            return self._paused

    def resume(self) -> None:
        """Let a paused group go on."""
        with self._lock:
            if self._paused and not self._reaped:
                self._signal_group(signal.SIGCONT)
            self._paused = False

    def clock_s(self) -> float | None:
        """Return the CPU seconds of all its threads, to the nanosecond as of the kernel's last tick; None if it ended.

        Far cheaper than /proc, but without its children.
        """
        try:
            used_s = time.clock_gettime(clock_of(self.pid))
        except OSError:
            return None
        return None if self._reaped else used_s  # asked afterwards: what was read is its own

    def wait(self, timeout_s: float | None = None) -> ChildExit | None:
        """Wait until the child has been reaped and its output read; None if the time ran out first."""
        self._done.wait(timeout_s)
        return self.exit

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of its output, at most 40 lines."""
        return self._output.last_lines()

    def reaped_cpu_s(self) -> float | None:
        """Return its CPU seconds once it has been reaped, None before."""
        return self._cpu_s

    def __repr__(self) -> str:
        if self.exit is None:
            how = "running"
        elif self.exit.signal is not None:
            how = f"killed by {self.exit.signal}"
        else:
            how = f"exited {self.exit.exit_code}"
        return f"<Child {self.spec.name} pid {self.pid} {how}>"

    def _start(self, token: str) -> subprocess.Popen[bytes]:
        spec = self.spec
        env = {"PYTHONUNBUFFERED": "1", **spec.env}
        env[PARENT_PID] = str(os.getpid())
        env[MARK] = mark_of(f"{token}/{self._own_mark}", os.environ.get(MARK))
        try:
            return subprocess.Popen(
                spec.argv,
                env=env,
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ChildFailed(
                f"Cannot start {spec.name} ({spec.argv[0] if spec.argv else 'no command'}): {error}. "
                "Check that the program, its working directory and enough memory are there."
            ) from error

    def _send(self, signum: signal.Signals) -> bool:
        with self._lock:
            if self._reaped or self._leader_has_ended():
                return False
            self._sent.setdefault(signum.name, time.time())  # before sending: the exit may follow at once
            told = self._signal_group(signum)
            self.resume()  # what is paused hears of nothing but SIGKILL
            return told

    def _signal_group(self, signum: signal.Signals) -> bool:
        """Send a signal to the group, under the lock and before it is reaped; False if that cannot be done."""
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _leader_has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _reap(self) -> None:
        status: int | None = None
        cpu_s = 0.0
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            time_s = time.time()
            with self._lock:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                if self._groups is not None:
                    self._groups.forget(self.pid)
                _, status, usage = os.wait4(self.pid, 0)
                cpu_s = usage.ru_utime + usage.ru_stime
                self._reaped = True
        except ChildProcessError:  # somebody else in this process waited for it: its number may be another's by now
            time_s = time.time()
            with self._lock:
                self._reaped = True
                if self._groups is not None:
                    self._groups.forget(self.pid)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        self._process.returncode = -1 if code is None else code  # Popen must never wait for this pid
        self._cpu_s = cpu_s
        self._drain()
        self.exit = ChildExit(
            name=self.spec.name,
            pid=self.pid,
            exit_code=None if code is None or code < 0 else code,
            signal=None if code is None or code >= 0 else _signal_name(-code),
            time_s=time_s,
            sent=dict(self._sent),
            cpu_s=cpu_s,
        )
        self._done.set()
        self._on_exit()

    def _drain(self) -> None:
        """Read what is left in the pipe, but not for long: a descendant in a session of its own may hold it open."""
        if self._output.join(_DRAIN_S):
            return
        sweep(self._own_mark, _DRAIN_S)
        if not self._output.join(_DRAIN_S):
            self._output.close()


def clock_of(pid: int) -> int:
    """Return the id of the clock that counts the CPU time of a process: CPUCLOCK_SCHED, linux/posix-timers.h."""
    return (~pid << 3) | 2


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel send this process SIGKILL when the thread that started it ends.

    First thing in every child's main. If the parent is gone already, this process ends here. Linux; does nothing
    elsewhere. HETERO_PARENT_PID is taken out of the environment, so that processes started from here on, whose parent
    is another, may call this too.

    Args:
        parent_pid: Pid of the parent; default: HETERO_PARENT_PID, and nothing happens where that is not set.
    """
    value = os.environ.pop(PARENT_PID, "")
    if parent_pid is None:
        if not value.isdigit():
            return
        parent_pid = int(value)
    if sys.platform != "linux":
        return
    import ctypes

    # The return value is of no use: without the signal, the janitor does the work.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # died before prctl: the signal would never come
        os.kill(os.getpid(), signal.SIGKILL)


def _own_pipe(process: subprocess.Popen[bytes]) -> int:
    """Take the read end of the output away from Popen, so that only its reader closes it."""
    if process.stdout is None:
        raise RuntimeError("started without a pipe")
    with process.stdout as pipe:
        return os.dup(pipe.fileno())


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # real-time signals
        return f"SIG{signum}"
