"""What a worker and its host's feed say to each other: frames over a Unix socket.

The socket lies in the abstract namespace: it has no file, and its name is free the moment the feed has died. A frame is
two lengths, a JSON head and raw bytes; batches themselves lie in shared memory (`hetero.data.arena`), whose file
descriptor travels beside the frame that announces it.

    worker: hello (secret), arena, then for each task: batch, batch, ... and one of end, failed, abandoned
    feed:   task, abandon, free (slots), list, share (bytes)
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

PIECE_BYTES = 1 << 16
"""What one read from the socket asks for."""
FRAME_BYTES = 1 << 28
"""The longest frame; a list of splits is what comes nearest."""
_LENGTHS = struct.Struct("!II")  # of the head and of the body
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_ADDRESS_BYTES = 108  # sun_path of struct sockaddr_un


class ProtocolError(Exception):
    """A peer says what no worker and no feed says."""


class Frame(NamedTuple):
    """One thing that one side says to the other."""

    kind: str
    head: dict[str, Any]
    body: bytes


class Task(NamedTuple):
    """One split for a worker.

    Attributes:
        epoch, split, attempt: which; `split` is its position in the job's list.
        value_json: the split itself.
        skip: bitmap of the sequences that ranks have already.
        start: sequences below this one are left out too.
    """

    epoch: int
    split: int
    value_json: str
    attempt: int
    skip: bytes = b""
    start: int = 0


def pack_task(task: Task) -> bytes:
    """Return a task as a frame."""
    head = {"epoch": task.epoch, "split": task.split, "attempt": task.attempt, "start": task.start}
    return pack("task", task.skip, value=task.value_json, **head)


def read_task(frame: Frame) -> Task:
    """Return the task that a frame holds."""
    head = frame.head
    return Task(head["epoch"], head["split"], head["value"], head["attempt"], frame.body, head["start"])


def pack(kind: str, body: bytes = b"", **head: Any) -> bytes:
    """Return a frame as bytes."""
    text = json.dumps({"kind": kind, **head}, separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


class FrameReader:
    """Puts frames together from pieces as they come.

    Attributes:
        limit: bytes of the longest frame that is accepted; may be changed between frames.
    """

    def __init__(self, limit: int = FRAME_BYTES) -> None:
        self.limit = limit
        self._pending = bytearray()

    def add(self, piece: bytes) -> None:
        """Take in what has been read."""
        self._pending += piece

    def frames(self) -> Iterator[Frame]:
        """Give the frames that are complete.

        Raises:
            ProtocolError: this is no frame, or it is too long.
        """
        pending, start = self._pending, 0
        try:
            while len(pending) - start >= _LENGTHS.size:
                head_size, body_size = _LENGTHS.unpack_from(pending, start)
                if head_size + body_size > self.limit:
                    raise ProtocolError(f"a frame of {head_size + body_size} bytes; the limit is {self.limit}")
                middle = start + _LENGTHS.size + head_size
                end = middle + body_size
                if len(pending) < end:
                    break
                frame = _frame(pending[start + _LENGTHS.size : middle], bytes(pending[middle:end]))
                start = end
                yield frame
        finally:
            del pending[:start]


def _frame(text: bytearray, body: bytes) -> Frame:
    try:
        head = json.loads(text)
        return Frame(str(head["kind"]), head, body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{bytes(text[:80])!r} is no head of a frame: {error!r:.200}") from None


def address_of(name: str) -> str:
    """Return the address of a socket's name: in the abstract namespace, hashed where it is too long for one.

    Args:
        name: any text, with or without the NUL that marks the namespace.
    """
    name = name.removeprefix("\0")
    if len(name.encode()) >= _ADDRESS_BYTES:
        name = f"hetero-{hashlib.sha256(name.encode()).hexdigest()}"
    return "\0" + name


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
