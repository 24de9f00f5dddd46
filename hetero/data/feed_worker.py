"""A worker: runs the job's `inputs` on one split at a time and hands the batches to its host's feed.

The process outlives whatever goes wrong in the job's code, which is told to the feed, and the feed itself, to whose
successor it connects. Batches are copied once, from the job's arrays into memory that the feed maps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hetero import bitmap
from hetero.batch import flatten, leaf_rows
from hetero.data import feed_wire
from hetero.data.arena import Arena, SlotId
from hetero.data.feed_cause import cause_of
from hetero.data.local import LocalSource
from hetero.data.worker_frames import FRAME_BYTES, Frame, Task, read_task
from hetero.data.worker_socket import LinkLost, WorkerSocket
from hetero.errors import InputError, Stopped

MakeInputs = Callable[[Any, int], Any]
ListSplits = Callable[[], list[Any]]
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_SHOWN_CHARS = 200  # of a split, in what is said of a failure


def serve(  # noqa: PLR0917 - the first six are what a worker is
    connect_name: str,
    secret: bytes,
    name: str,
    capacity: int,
    make_inputs: MakeInputs,
    list_splits: ListSplits,
    *,
    host: str,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Work for the feed until the process is ended. Never returns; SIGTERM ends the process at once.

    Args:
        connect_name: Name of the feed's socket; it may not be there yet, or again.
        secret: What the feed wants to be shown.
        name: Name of this worker.
        capacity: Bytes of finished batches that may wait for ranks. Beyond it the worker holds the batch that it has in
            hand; a batch that is larger alone waits until it is the only one.
        make_inputs: Called with a split and an epoch, once for each task; returns a `tf.data.Dataset` or an iterable of
            raw batches. It must give the same batches each time it is called with the same two: that is what makes a
            repetition after a failure exact. Batches are numbered 0, 1, ... in the order given, empty ones left out.
        list_splits: Returns the splits of the whole input, JSON values.
        host: Name of this host.
        on_ready: Called once, when a feed has been reached for the first time.

    Raises:
        KeyboardInterrupt, Stopped: Raised by a signal handler. All other exceptions of the job's code are told to the
            feed, SystemExit included.
    """
    with contextlib.suppress(ValueError):  # in a thread that may not; a handler of the job's could raise SystemExit
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    owner, pause_s = os.getpid(), _FIRST_PAUSE_S
    while True:
        with contextlib.suppress(LinkLost), contextlib.closing(WorkerSocket(connect_name, secret, name)) as link:
            if on_ready is not None:
                on_ready()
                on_ready = None
            session = _Session(link, capacity, make_inputs, list_splits, host=host, name=name)
            try:
                session.run()
            finally:
                session.close()
                if link.was_heard:
                    pause_s = _FIRST_PAUSE_S
        if os.getpid() != owner:  # the job's code has forked, and the child came out of it as if it were the worker
            print(f"hetero: a process that was forked in `inputs` went on beyond it; {name} ends it", flush=True)
            os._exit(1)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _AbandonedTask(Exception):
    """The feed wants nothing more of the task at hand."""


@dataclass
class _Progress:
    batches: int = 0
    replayed: int = 0


class _Session:
    """The work for one feed. Memory and tasks do not outlive it: its successor knows nothing of them."""

    def __init__(
        self,
        link: WorkerSocket,
        capacity: int,
        make_inputs: MakeInputs,
        list_splits: ListSplits,
        *,
        host: str,
        name: str,
    ) -> None:
        self._link = link
        self._make_inputs, self._list_splits = make_inputs, list_splits
        self._host, self._name = host, name
        self._owner = os.getpid()
        self._arena = Arena(capacity)
        self._announced = -1
        self._orders: deque[Frame] = deque()  # tasks and lists that wait
        self._is_abandoned = False

    def run(self) -> None:
        """Do what the feed asks for. Raises LinkLost when it is gone."""
        self._announce_arena()
        while True:
            while not self._orders:
                self._listen(wait=True)
            order = self._orders.popleft()
            if order.kind == "task":
                self._run_task(read_task(order))
            else:
                self._send_splits()

    def close(self) -> None:
        """Let go of the memory; batches that the feed has not freed stay readable for it."""
        self._arena.close()

    def _listen(self, *, wait: bool) -> None:
        for frame in self._link.read(wait=wait):
            if frame.kind == "free":
                for arena, offset, size in frame.head["slots"]:
                    self._arena.free(SlotId(arena, offset, size))
            elif frame.kind == "share":
                self._arena.resize(frame.head["bytes"])
            elif frame.kind != "abandon":
                self._orders.append(frame)
            elif self._orders:  # it means a task that has not begun
                self._orders.pop()
                self._link.send("abandoned")
            else:
                self._is_abandoned = True

    def _run_task(self, task: Task) -> None:
        self._is_abandoned = False  # an earlier one was meant, which had ended when the word came
        progress = _Progress()
        try:
            self._prepare(task, progress)
        except _AbandonedTask:
            self._link.send("abandoned")
        except (LinkLost, KeyboardInterrupt, Stopped):
            raise
        except BaseException as error:  # whatever the job's code raises is the split's fault, not the worker's
            if os.getpid() != self._owner:
                raise
            where = f"in split {task.split} of epoch {task.epoch}, {task.value_json:.{_SHOWN_CHARS}}"
            self._link.send("failed", self._cause(error, where), batches=progress.batches, replayed=progress.replayed)
        else:
            self._link.send("end", batches=progress.batches, replayed=progress.replayed)

    def _prepare(self, task: Task, progress: _Progress) -> None:
        source = LocalSource(self._make_inputs(json.loads(task.value_json), task.epoch))
        batches: Iterator[Any] | None = None
        try:
            batches = iter(source)
            self._check_abandoned()
            for batch in batches:
                self._check_abandoned()
                self._take(task, batch, progress)
                del batch  # not to be held while the next one is made
        finally:
            _close(batches)
            source.close()

    def _take(self, task: Task, batch: Any, progress: _Progress) -> None:
        """Hand one raw batch to the feed, or leave it out."""
        sequence = progress.batches
        if sequence < task.start or bitmap.has(task.skip, sequence):
            rows = leaf_rows(*flatten(batch))
            progress.replayed += rows > 0
        else:
            rows = self._put(sequence, feed_wire.encode(batch))
        progress.batches += rows > 0

    def _put(self, sequence: int, encoded: feed_wire.Encoded) -> int:
        if not encoded.rows:
            return 0
        while (slot := self._arena.allocate(encoded.size)) is None:
            self._listen(wait=True)
            self._check_flag()
        self._announce_arena()
        self._arena.write(slot, encoded.buffers)
        self._link.send("batch", encoded.layout, sequence=sequence, rows=encoded.rows, slot=slot)
        return encoded.rows

    def _check_abandoned(self) -> None:
        self._listen(wait=False)
        self._check_flag()

    def _check_flag(self) -> None:
        if self._is_abandoned:
            raise _AbandonedTask

    def _announce_arena(self) -> None:
        if self._announced != self._arena.number:
            self._announced = self._arena.number
            self._link.send("arena", fd=self._arena.fd, number=self._arena.number, size=self._arena.size)

    def _send_splits(self) -> None:
        try:
            values = _listed(self._list_splits())
        except (KeyboardInterrupt, Stopped):
            raise
        except BaseException as error:  # as in a task
            if os.getpid() != self._owner:
                raise
            self._link.send("list_failed", self._cause(error, "in the job's splits function"))
        else:
            self._link.send("splits", values)

    def _cause(self, error: BaseException, where: str) -> bytes:
        return json.dumps(cause_of(error, host=self._host, process=self._name, where=where)).encode()


def _listed(splits: list[Any]) -> bytes:
    text = json.dumps([json.dumps(split) for split in splits]).encode()
    if len(text) > FRAME_BYTES // 2:
        raise InputError(
            f"The job's list of splits has {len(text)} bytes as JSON; {FRAME_BYTES // 2} are the limit. "
            "List fewer, larger ones."
        )
    return text


def _close(batches: Iterator[Any] | None) -> None:
    """Run the `finally` blocks of a generator that was not read to its end."""
    if batches is None or not hasattr(batches, "send"):
        return
    try:
        batches.close()  # type: ignore[attr-defined]  # a generator, by its `send`
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # the task has its outcome already
        print(f"hetero: closing the input raised {type(error).__name__}; the split had ended", flush=True)
