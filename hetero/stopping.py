"""What a rank does when its job is stopped: if the job has a checkpoint (`ctx.on_stop`), rank 0 writes it first.

A launcher that is told to stop, or hears that the job was, leaves an order for its ranks, sends them SIGTERM, and kills
them when the grace period is over. From the signal on, as parts of that period:

    0 to 1/3    rank 0 saves when its loop asks for the next batch: in the main thread, with the weights of whole steps
    1/3         no such moment came, as in a collective that will not end: saved from another thread
    any time    `train` raises because a peer has gone, or returns: saved then
    0.8         the other ranks end, which until then went on so that rank 0 could finish its step
    1           SIGKILL

Whatever comes first saves, and nothing saves twice. Then rank 0 says so and ends at once, as by the signal itself:
nothing of `train` is run any more. A rank without a function to call, one that was told to end because the job has
failed, and one whose training is over die of the signal at once.

The main thread may be in a library that never comes back to Python, where no handler of Python's would run. So the
signal is heard by a thread, through the descriptor that Python's own handler writes to (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hetero.errors import DataServiceLost, HeteroError, InputError, TrainerLost
from hetero.rundir import read_json, write_json_atomic

EXIT_CODE = 128 + signal.SIGTERM
BOUNDARY_PART, PEERS_PART = 1 / 3, 0.8
"""Parts of the grace period: until rank 0 no longer waits for its step's end; until the other ranks end."""
ORDER_S = 2.0
"""How long a rank waits for its launcher's order, which comes later where something signals all processes at once."""
PEER_S = 1.0
"""How long a rank that lost a peer waits to hear why."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """How one rank ends when it is told to.

    Changes nothing about the process before `on_stop`; that starts a thread and takes SIGTERM and SIGINT over.

    Args:
        rank: This rank.
        grace_s: Seconds from the signal to SIGKILL.
        order: Returns what the launcher has left for this rank, `checkpoint` (whether to write one), `by` (the
            signal's name) and `within_s` (a shorter `grace_s`, or None); None while there is nothing.
        lost: Tells how the job has ended, as far as this rank knows: True if hosts were stopped or lost, False
            otherwise, None while it goes on.
        follows_from_a_peer: Tells whether an exception only follows from another rank's end.
        report: Takes what came of the checkpoint, for the launcher: `written` (None until it is), `error`, `seconds`,
            `epoch`, `step`.
    """

    def __init__(
        self,
        rank: int,
        grace_s: float,
        *,
        order: Callable[[], Mapping[str, Any] | None],
        lost: Callable[[], bool | None],
        follows_from_a_peer: Callable[[BaseException], bool],
        report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._rank, self._grace_s = rank, grace_s
        self._order, self._lost, self._report = order, lost, report
        self._follows_from_a_peer = follows_from_a_peer
        self._save: Callable[[], Any] | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._place: tuple[int, int] | None = None
        self._by = ""
        self._asked = threading.Event()
        self._claimed = threading.Event()
        self._claimer = 0  # the thread that saves or has saved
        self._over = False
        self._lock = threading.Lock()  # guards the moments at which _asked, _claimed and _over change

    def on_stop(self, save: Callable[[], Any]) -> None:
        """Register what writes the checkpoint, or replace it.

        Raises:
            InputError: This is not the main thread, the only one that may take signals over.
        """
        if threading.current_thread() is not threading.main_thread():
            raise InputError("ctx.on_stop was called in a thread of the job's own; call it where `train` was called.")
        self._save = save
        if self._sockets is None:
            self._sockets = reader, writer = socket.socketpair()
            writer.setblocking(False)
            for signum in _SIGNALS:
                signal.signal(signum, lambda *_: None)
                signal.siginterrupt(signum, False)  # the job's system calls go on as if nothing had happened
            signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_as_before)
            threading.Thread(target=self._listen, args=(reader,), name="hetero-stop", daemon=True).start()

    def boundary(self, epoch: int, step: int) -> None:
        """Take note that a step begins; does not return in rank 0 if the job has been stopped.

        Args:
            epoch: The epoch at hand, from 0.
            step: The step that is about to begin, from 0 in each epoch: that many are done.
        """
        self._place = epoch, step
        if self._rank != 0 or not self._asked.is_set():
            return
        if threading.current_thread() is not threading.main_thread():
            # Somebody reads ahead: what the main thread has got it may finish. With no more to come its weights rest.
            _wait_for_ever()
        self._save_once("")
        leave(EXIT_CODE)

    def pause(self, seconds: float) -> bool:
        """Sleep; return at once, and True, where the job is stopped: what is slept through here needs no end."""
        return self._asked.wait(seconds)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Cover the call of `train`: however it ends, a stop that was asked for is carried out."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._on_end(error)

    def _on_end(self, error: BaseException | None) -> None:
        how = "" if error is None else f" (train had raised {type(error).__name__})"
        if self._save is not None and error is not None and self._is_lost(error) and self._rank == 0:
            self._save_once(how)  # and then as without a checkpoint, unless the launcher asks meanwhile
        with self._lock:
            self._over = True
        if self._asked.is_set():
            if self._rank == 0:
                self._save_once(how)
            leave(EXIT_CODE)

    def _is_lost(self, error: BaseException) -> bool:
        """Whether the job is over because hosts were stopped or lost; a peer's end is known before its reason."""
        deadline_s = time.monotonic() + (PEER_S if self._follows_from_a_peer(error) else 0.0)
        while (lost := self._lost()) is None and not self._asked.is_set() and time.monotonic() < deadline_s:
            self._asked.wait(0.02)
        return bool(lost)

    def _listen(self, reader: socket.socket) -> None:
        """Wait for the signal and see to the end; runs in a thread of its own."""
        while (signum := reader.recv(1)[0]) not in _SIGNALS:  # others have handlers of the job's own
            pass
        began_s = time.monotonic()
        order = self._await_order(began_s)
        if order is None or not order.get("checkpoint"):
            die_of(signum)
        self._grace_s = min(self._grace_s, order.get("within_s") or self._grace_s)
        with self._lock:
            if self._over:
                die_of(signum)
            self._by = f" by {order.get('by') or signal.Signals(signum).name}"
            self._asked.set()
        if self._rank == 0:
            boundary_s = self._grace_s * BOUNDARY_PART
            if self._claimed.wait(max(0.0, began_s + boundary_s - time.monotonic())):
                return  # whoever has claimed it ends the process
            self._save_once(f" (no end of the step within {boundary_s:.1f} s)")
        else:
            time.sleep(max(0.0, began_s + self._grace_s * PEERS_PART - time.monotonic()))
        leave(EXIT_CODE)

    def _await_order(self, began_s: float) -> Mapping[str, Any] | None:
        patience_s = min(ORDER_S, self._grace_s / 5)
        while (order := self._order()) is None and time.monotonic() < began_s + patience_s:
            time.sleep(0.02)
        return order

    def _save_once(self, how: str) -> None:
        """Write the checkpoint and say what came of it; does not return if another thread is about it."""
        with self._lock:
            claimed = self._claimed.is_set()
            if not claimed:
                self._claimer = threading.get_ident()
                self._claimed.set()
        if claimed and self._claimer != threading.get_ident():
            _wait_for_ever()
        if claimed:
            return
        place = "before the first step" if self._place is None else "at epoch {}, step {}".format(*self._place)
        epoch, step = self._place or (None, None)
        self._report({"written": None, "epoch": epoch, "step": step})
        problem, began_s = None, time.monotonic()
        try:
            if self._save is not None:
                self._save()
        except BaseException as error:  # whatever it is, this rank ends by the stop
            if not isinstance(error, HeteroError):
                traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began_s
        result = f"checkpoint written in {seconds:.1f} s" if problem is None else f"no checkpoint, {problem}"
        _print(f"stopped{self._by} {place}{how}: {result}")
        self._report({"written": problem is None, "error": problem, "seconds": seconds, "epoch": epoch, "step": step})


def leave_order(path: Path, exit_code: int, within_s: float | None = None) -> None:
    """Tell a rank, before its launcher stops it, whether to write a checkpoint.

    It is to be written where hosts were stopped or lost, and not where the job has failed, which might be for what the
    checkpoint would hold, or is done.

    Args:
        path: The rank's order (`RunDir.order`).
        exit_code: What the launcher is about to end with.
        within_s: Seconds until the ranks are killed, where that is less than the grace period.
    """
    by = signal.Signals(exit_code - 128) if exit_code > 128 else signal.SIGTERM
    with contextlib.suppress(OSError):  # a full disk: the rank ends without a checkpoint
        write_json_atomic(path, {"checkpoint": _is_no_failure(exit_code), "by": by.name, "within_s": within_s})


def checkpoint_outcome(path: Path | None, exit_code: int, chief: str) -> str:
    """Return what came of the checkpoint, to end a sentence about why the launcher ends; empty if there is nothing.

    Args:
        path: What rank 0 has reported (`RunDir.checkpoint`); None on a host without rank 0.
        exit_code: What the launcher is about to end with.
        chief: Name of the host with rank 0.
    """
    stopped = exit_code > 128
    if path is None:
        return f"whether a checkpoint was written is told on {chief}, where rank 0 is" if stopped else ""
    try:
        said = read_json(path)
    except (OSError, ValueError):
        said = None
    if said is None:
        return "no checkpoint was written, since the job had registered none (ctx.on_stop)" if stopped else ""
    if said["written"]:
        at = "before the first step" if said["step"] is None else f"at epoch {said['epoch']}, step {said['step']}"
        return f"a checkpoint was written {at} in {said['seconds']:.1f} s"
    if said["written"] is None:
        return "no checkpoint was written: rank 0 was killed before it was done. Give a longer --grace-s"
    return f"no checkpoint was written: {said['error']}"


def _is_no_failure(exit_code: int) -> bool:
    return exit_code > 128 or exit_code in (DataServiceLost.exit_code, TrainerLost.exit_code)


def leave(code: int) -> NoReturn:
    """End this process at once; only what was printed still gets out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def die_of(signum: int) -> NoReturn:
    """End this process by a signal, as if it had never been handled; from any thread."""
    ctypes.CDLL(None).signal(signum, int(signal.SIG_DFL))  # Python's own door to it is the main thread's alone
    os.kill(os.getpid(), signum)
    _wait_for_ever()


def _as_before() -> None:
    """Let a fork (of a DataLoader, say) die of signals again instead of telling its parent of them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_for_ever() -> NoReturn:
    while True:
        threading.Event().wait()


def _print(line: str) -> None:
    with contextlib.suppress(Exception):  # nobody reads it any more
        print(line, flush=True)
