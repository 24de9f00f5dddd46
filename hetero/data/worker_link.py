"""Where a host's workers connect to its feed.

Everything happens in the event loop; there are no threads. Processes of the same user that know the secret may connect.
Anybody else is cut off, with a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time

from hetero.data.arena import SlotId
from hetero.data.worker_frames import Task, address_of, peer_of
from hetero.data.worker_port import WorkerBatch, WorkerListener, WorkerPort
from hetero.errors import PortInUse

__all__ = ["SlotId", "Task", "WorkerBatch", "WorkerListener", "WorkerPort", "WorkerServer"]

_log = logging.getLogger(__name__)
_NAME_IN_USE_S = 10.0  # a feed that is being killed holds its name until the kernel is done with it
_RETRY_S = 0.1
_LOG_INTERVAL_S = 10.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class WorkerServer:
    """Where a host's workers connect.

    Args:
        name: of the socket, in the abstract namespace.
        secret: what a worker has to show.
        listener: told of workers and what they say, in the event loop that calls `start`.
    """

    def __init__(self, name: str, secret: bytes, listener: WorkerListener) -> None:
        self.secret = secret
        self.listener = listener
        self._address = address_of(name)
        self._socket: socket.socket | None = None
        self._ports: set[WorkerPort] = set()
        self._last_log_s = -_LOG_INTERVAL_S

    async def start(self) -> None:
        """Listen.

        Raises:
            PortInUse: another process has had the name for 10 s.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.setblocking(False)
        try:
            await self._bind(listening)
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
        self._socket = listening
        asyncio.get_running_loop().add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop listening and cut all workers off, without telling the listener. May be repeated."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        ports, self._ports = self._ports, set()
        for port in ports:
            port.drop()

    def on_dropped(self, port: WorkerPort, reason: str) -> None:
        """Hear from a port that its connection is cut."""
        who = port.name or "a process that is no worker of this run"
        if reason:
            self._log(f"cut off {who} (pid {port.pid}): {reason}", is_stranger=not port.name)
        if port not in self._ports:
            return
        self._ports.remove(port)
        if port.name:
            try:
                self.listener.on_gone(port)
            except Exception:  # whatever came before, the feed goes on
                _log.exception("feed: cannot take in that %s is gone", port.name)

    async def _bind(self, listening: socket.socket) -> None:
        deadline = time.monotonic() + _NAME_IN_USE_S
        while True:
            try:
                listening.bind(self._address)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > deadline:
                    raise PortInUse(
                        f"Cannot listen for this host's workers on the Unix socket {self._address[1:]!r}: another "
                        "process has had that name for 10 s, probably an older feed of this run. End it."
                    ) from error
            await asyncio.sleep(_RETRY_S)

    def _accept(self) -> None:
        if self._socket is None:
            return
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._log(f"cannot accept a worker: {error}; raise the limit (ulimit -n)", is_stranger=True)
                self._pause(self._socket)
            return  # else it has gone again
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            connection.setblocking(False)
            pid, uid = peer_of(connection)
            if uid != os.geteuid():
                self._log(f"cut off pid {pid}: it runs as user {uid}, workers as {os.geteuid()}", is_stranger=True)
                return
            self._ports.add(WorkerPort(self, connection))
            undo.pop_all()

    def _pause(self, listening: socket.socket) -> None:
        """Leave the queue of connections alone for a second: as it stays readable, the loop would spin."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            if self._socket is listening:
                loop.add_reader(listening, self._accept)

        loop.call_later(1.0, go_on)

    def _log(self, text: str, *, is_stranger: bool) -> None:
        now = time.monotonic()
        if is_stranger:
            if now - self._last_log_s < _LOG_INTERVAL_S:
                return
            self._last_log_s = now
        _log.warning("feed: %s", text)
