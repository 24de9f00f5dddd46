"""One worker as its host's feed sees it: what it says, and the memory that its finished batches lie in."""

from __future__ import annotations

import array
import asyncio
import errno
import functools
import hmac
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from hetero.data.arena import MappedArena, SlotId
from hetero.data.worker_frames import (
    FRAME_BYTES,
    PIECE_BYTES,
    Frame,
    FrameReader,
    ProtocolError,
    Task,
    pack,
    pack_task,
    peer_of,
)

_log = logging.getLogger(__name__)
_STRANGER_BYTES = 4096  # of a frame from somebody who has not shown the secret yet
_MAX_DESCRIPTORS = 4
_HELLO_S = 10.0


class WorkerBatch(NamedTuple):
    """A finished batch.

    Attributes:
        sequence: 0, 1, ... within the split.
        rows: number of rows.
        slot: where its bytes lie; `slot.size` is their number.
        layout: a serialised `Layout`.
    """

    sequence: int
    rows: int
    slot: SlotId
    layout: bytes


class WorkerListener(Protocol):
    """Told in the event loop what workers say. Where a method raises, the worker in question is let go."""

    def on_worker(self, port: WorkerPort) -> None:
        """Take in a worker that has connected; it is idle."""

    def on_batch(self, port: WorkerPort, batch: WorkerBatch) -> None:
        """Take a batch of its task; the slot stays in use until `port.free`."""

    def on_end(self, port: WorkerPort, batches: int, replayed: int) -> None:
        """Its task is done: the split has so many batches; `replayed` were prepared only to be left out."""

    def on_failed(self, port: WorkerPort, cause: dict[str, Any], batches: int, replayed: int) -> None:
        """The job's code failed in its task after so many batches; `cause` is what `Failure.to_dict` gives."""

    def on_abandoned(self, port: WorkerPort) -> None:
        """It has dropped its task as asked. on_end or on_failed come instead if that was on its way."""

    def on_splits(self, port: WorkerPort, values: list[str]) -> None:
        """Take the job's list of splits, a JSON text each."""

    def on_list_failed(self, port: WorkerPort, cause: dict[str, Any]) -> None:
        """The job's code failed in listing the splits; `cause` as in `on_failed`."""

    def on_gone(self, port: WorkerPort) -> None:
        """Nothing more will come from it. What it had finished can be read until it is freed."""


class Server(Protocol):
    """What a port needs of the server that made it."""

    secret: bytes
    listener: WorkerListener

    def on_dropped(self, port: WorkerPort, reason: str) -> None:
        """Hear from a port that its connection is cut."""


class WorkerPort:
    """One connected worker as the feed sees it; made by `WorkerServer`.

    Attributes:
        name: the worker's.
        pid: its process.
    """

    def __init__(self, server: Server, connection: socket.socket) -> None:
        self.name = ""
        self.pid, _ = peer_of(connection)
        self._server = server
        self._connection: socket.socket | None = connection
        self._reader = FrameReader(_STRANGER_BYTES)
        self._descriptors: deque[int] = deque()  # received, not yet claimed by a frame
        self._arenas: dict[int, MappedArena] = {}
        self._slots: dict[int, set[SlotId]] = {}  # in use, by arena
        self._newest = -1
        self._freed: list[SlotId] = []
        self._unsent = bytearray()
        self._is_flush_due = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._on_readable)
        self._patience = self._loop.call_later(_HELLO_S, self.drop, f"it said nothing for {_HELLO_S:g} s")

    @property
    def is_gone(self) -> bool:
        """Whether the worker is no longer connected."""
        return self._connection is None

    def run(self, task: Task) -> None:
        """Give an idle worker a split. Exactly one of on_end, on_failed, on_abandoned and on_gone follows."""
        self._send(pack_task(task))

    def abandon(self) -> None:
        """Ask it to drop its task, which it does between two batches. Its slots stay in use until they are freed."""
        self._send(pack("abandon"))

    def list_splits(self) -> None:
        """Ask an idle worker for the job's list of splits; on_splits, on_list_failed or on_gone follows."""
        self._send(pack("list"))

    def share(self, size: int) -> None:
        """Have it keep so many bytes of finished batches at most, once all that it has now are freed."""
        self._send(pack("share", bytes=size))

    def payload(self, slot: SlotId) -> memoryview:
        """Return the bytes of a batch, read-only and without a copy; not to be used once the slot is freed.

        Raises:
            KeyError: the slot is not in use.
        """
        if slot not in self._slots[slot.arena]:
            raise KeyError(slot)
        return self._arenas[slot.arena].view(slot.offset, slot.size)

    def free(self, slot: SlotId) -> None:
        """Let the worker use a slot again; with the last one of memory that nobody writes to, that memory goes.

        Raises:
            KeyError: the slot is not in use.
        """
        self._slots[slot.arena].remove(slot)
        self._close_unused(slot.arena)
        if not self.is_gone:
            self._freed.append(slot)
            self._flush_soon()

    def drop(self, reason: str = "") -> None:
        """Cut the connection; the worker drops its task and connects anew. A reason is logged. May be repeated."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._patience.cancel()
        self._loop.remove_reader(connection)
        self._loop.remove_writer(connection)
        connection.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        for arena in tuple(self._arenas):
            self._close_unused(arena)
        self._server.on_dropped(self, reason)

    def _close_unused(self, number: int) -> None:
        if not self._slots[number] and (self.is_gone or number != self._newest):
            self._arenas.pop(number).close()
            del self._slots[number]

    def _send(self, frame: bytes) -> None:
        if not self.is_gone:
            self._pack_freed()
            self._unsent += frame
            self._flush_soon()

    def _pack_freed(self) -> None:
        if self._freed:
            self._unsent += pack("free", slots=self._freed)
            self._freed.clear()

    def _flush_soon(self) -> None:
        """Write once in a turn of the loop: ranks acknowledge several batches at a time."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._connection is None:
            return
        self._pack_freed()
        self._loop.remove_writer(self._connection)
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            self._is_flush_due = True
            self._loop.add_writer(self._connection, self._flush)
        except OSError:
            self._unsent.clear()  # it is dead: what it had said can still be read, and after that comes the end

    def _on_readable(self) -> None:
        if self._connection is None:
            return
        try:
            piece = self._receive(self._connection)
            if not piece:
                self.drop()
                return
            self._reader.add(piece)
            for frame in self._reader.frames():
                self._read(frame)()
                if self.is_gone:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.drop("" if error.errno == errno.ECONNRESET else repr(error))
        except ProtocolError as error:
            self.drop(str(error))
        except Exception as error:  # the listener's: one worker's trouble must not be everybody's
            _log.exception("feed: cannot take in what %s said", self.name)
            self.drop(f"the feed raised {error!r}")

    def _receive(self, connection: socket.socket) -> bytes:
        received = array.array("i")
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * received.itemsize)
        piece, ancillary, _, _ = connection.recvmsg(PIECE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        self._descriptors.extend(received)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ProtocolError(f"it sent {len(self._descriptors)} file descriptors without a word about them")
        return piece

    def _read(self, frame: Frame) -> Callable[[], None]:
        """Take a frame in; returns the call that tells the listener."""
        try:
            if not self.name:
                return self._hello(frame)
            return _READERS[frame.kind](self, frame)
        except (LookupError, TypeError, ValueError, OSError) as error:
            raise ProtocolError(f"a frame of kind {frame.kind!r:.40} cannot be read: {error!r:.200}") from None

    def _hello(self, frame: Frame) -> Callable[[], None]:
        if frame.kind != "hello" or not hmac.compare_digest(bytes.fromhex(frame.head["secret"]), self._server.secret):
            raise ProtocolError("it does not know the secret of this run")
        self.name = str(frame.head["name"]) or "worker"
        self.pid = self.pid or int(frame.head["pid"])  # the kernel says 0 where it lives in another pid namespace
        self._reader.limit = FRAME_BYTES
        self._patience.cancel()
        return functools.partial(self._server.listener.on_worker, self)

    def _arena(self, frame: Frame) -> Callable[[], None]:
        number, before = int(frame.head["number"]), self._newest
        if number <= before:
            raise ValueError(f"arena {number} after arena {before}")
        self._arenas[number] = MappedArena(self._descriptors.popleft(), int(frame.head["size"]))
        self._slots[number], self._newest = set(), number
        if before in self._arenas:
            self._close_unused(before)
        return _nothing

    def _batch(self, frame: Frame) -> Callable[[], None]:
        arena, offset, size = frame.head["slot"]
        slot = SlotId(int(arena), int(offset), int(size))
        self._arenas[slot.arena].view(slot.offset, slot.size)  # that it lies within
        if slot in self._slots[slot.arena]:
            raise ValueError(f"{slot} is in use")
        batch = WorkerBatch(int(frame.head["sequence"]), int(frame.head["rows"]), slot, frame.body)
        self._slots[slot.arena].add(slot)
        return functools.partial(self._server.listener.on_batch, self, batch)

    def _end(self, frame: Frame) -> Callable[[], None]:
        batches, replayed = int(frame.head["batches"]), int(frame.head["replayed"])
        return functools.partial(self._server.listener.on_end, self, batches, replayed)

    def _failed(self, frame: Frame) -> Callable[[], None]:
        cause, batches, replayed = _cause(frame), int(frame.head["batches"]), int(frame.head["replayed"])
        return functools.partial(self._server.listener.on_failed, self, cause, batches, replayed)

    def _abandoned(self, _frame: Frame) -> Callable[[], None]:
        return functools.partial(self._server.listener.on_abandoned, self)

    def _splits(self, frame: Frame) -> Callable[[], None]:
        values = [str(value) for value in json.loads(frame.body)]
        return functools.partial(self._server.listener.on_splits, self, values)

    def _list_failed(self, frame: Frame) -> Callable[[], None]:
        return functools.partial(self._server.listener.on_list_failed, self, _cause(frame))


_READERS: dict[str, Callable[[WorkerPort, Frame], Callable[[], None]]] = {
    kind: getattr(WorkerPort, f"_{kind}")
    for kind in ("arena", "batch", "end", "failed", "abandoned", "splits", "list_failed")
}


def _cause(frame: Frame) -> dict[str, Any]:
    return dict(json.loads(frame.body))


def _nothing() -> None:
    pass
