"""The worker's end of the socket to its host's feed.

It lives in a process that runs anybody's code: code that forks, closes file descriptors that it never opened, or sets
default timeouts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Any

from hetero.data.arena import file_identity
from hetero.data.worker_frames import PIECE_BYTES, Frame, FrameReader, ProtocolError, address_of, pack, peer_of


class LinkLost(Exception):
    """The feed is not there, or not any more."""


class WorkerSocket:
    """A connection to the feed; whoever opens it closes it.

    Args:
        name: Of the feed's socket.
        secret: What the feed wants to be shown.
        worker: Name of this worker.

    Attributes:
        was_heard: Whether the feed has said anything, which it does only to who knows the secret.

    Raises:
        LinkLost: Nobody listens there, or a process of another user.
    """

    def __init__(self, name: str, secret: bytes, worker: str) -> None:
        self.was_heard = False
        self._reader = FrameReader()
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(None)  # whatever default the job's code has set
        self._identity = file_identity(self._socket.fileno())
        _open_sockets.add(self)
        try:
            self._socket.connect(address_of(name))
            _check_owner(self._socket)
            self.send("hello", name=worker, pid=os.getpid(), secret=secret.hex())
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise LinkLost(repr(error)) from error
            raise

    def send(self, kind: str, body: bytes = b"", fd: int | None = None, **head: Any) -> None:
        """Send a frame, with a file descriptor beside it. Blocks while the feed does not read.

        Raises:
            LinkLost: The feed is gone.
        """
        connection, data = self._checked(), memoryview(pack(kind, body, **head))
        try:
            if fd is not None:
                data = data[socket.send_fds(connection, [data], [fd], socket.MSG_NOSIGNAL) :]
            connection.sendall(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise LinkLost(repr(error)) from error

    def read(self, *, wait: bool) -> list[Frame]:
        """Return the frames that have come; with `wait`, block until there is something to read.

        Raises:
            LinkLost: The feed is gone, or makes no sense.
        """
        try:
            piece = self._checked().recv(PIECE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(repr(error)) from error
        if not piece:
            raise LinkLost("the feed has closed the connection")
        self.was_heard = True
        self._reader.add(piece)
        try:
            return list(self._reader.frames())
        except ProtocolError as error:
            raise LinkLost(str(error)) from error

    def close(self) -> None:
        """Close the connection. May be repeated."""
        with contextlib.suppress(LinkLost):
            self._checked().close()
            self._socket = None

    def _checked(self) -> socket.socket:
        """Return the socket, if its number is not another file's by now: the job's code may have closed it."""
        if self._socket is not None and file_identity(self._socket.fileno()) != self._identity:
            self._socket.detach()
            self._socket = None
        if self._socket is None:
            raise LinkLost("the connection has been closed in this process")
        return self._socket


def _check_owner(connection: socket.socket) -> None:
    _, uid = peer_of(connection)
    if uid != os.geteuid():  # it must not learn the secret
        raise LinkLost(f"user {uid} listens there, not {os.geteuid()}")


_open_sockets: weakref.WeakSet[WorkerSocket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Keep forked processes off the link: the feed would not see the worker's death while one holds it open."""
    for link in tuple(_open_sockets):
        link.close()


os.register_at_fork(after_in_child=_close_in_child)
