"""The lane: a TCP connection beside a rank's `Read` call, on which a batch goes from memory to memory.

On the call a batch is copied four times in user space: into a message, into gRPC's buffers, out of them, into the
array. On the lane it is sent from the worker's memory and received into the array.

Both ends of the framing are here; feed.proto describes it (`Lane`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
from typing import Any

import numpy as np

from hetero.data.feed_wire import Arrived, Header, ReplyReader, batch_header

_log = logging.getLogger(__name__)

_TICKET_BYTES = 32
_COME_S = 10.0  # within which a rank has to connect
_TICKET_S = 5.0  # within which it has to show its ticket then
_MOST_STRANGERS = 1024  # connections that have not shown their ticket yet
_LENGTH = struct.Struct("!I")
_MOST_MESSAGE_BYTES = 64 << 20  # of a batch's header
_SMALL_BYTES = 32 << 10  # a batch up to this size is sent together with its header
_READ_BYTES = 64 << 10


class Lanes:
    """The feed's door for lanes: matches connections with the calls that announced them. Belongs to one event loop.

    Attributes:
        port: where it listens; 0 before `start`.
    """

    def __init__(self) -> None:
        self.port = 0
        self._door: socket.socket | None = None
        self._expected: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0

    async def start(self, bind: str) -> None:
        """Listen on a free port of an address."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._door = socket.create_server((bind, 0), family=family, backlog=128)
        self._door.setblocking(False)
        self.port = self._door.getsockname()[1]
        self._keep(self._accept(self._door))

    def close(self) -> None:
        """Take no more connections; lanes that are open stay so. May be repeated."""
        for task in self._tasks:
            task.cancel()
        for lane in self._expected.values():
            lane.cancel()
        self._expected.clear()
        if self._door is not None:
            self._door.close()

    def expect(self) -> bytes:
        """Return the ticket for one lane."""
        ticket = secrets.token_bytes(_TICKET_BYTES)
        self._expected[ticket] = asyncio.get_running_loop().create_future()
        return ticket

    def forget(self, ticket: bytes) -> None:
        """Expect nobody with this ticket any more; a connection that came meanwhile is closed. May be repeated."""
        lane = self._expected.pop(ticket, None)
        if lane is not None and not lane.cancel() and not lane.cancelled():
            lane.result().close()

    async def arrival(self, ticket: bytes) -> Lane:
        """Wait for the rank to connect.

        Raises:
            ConnectionError: it did not within `_COME_S`.
        """
        try:
            connection = await asyncio.wait_for(asyncio.shield(self._expected[ticket]), _COME_S)
        except asyncio.TimeoutError:
            raise ConnectionError(f"the rank did not connect to its lane within {_COME_S:g} s") from None
        del self._expected[ticket]
        return Lane(connection)

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(door)
            except OSError as error:  # too many open files, most likely by strangers
                _log.warning("a lane cannot be taken: %s", error)
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            if self._strangers >= _MOST_STRANGERS:
                connection.close()
                continue
            self._strangers += 1
            self._keep(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """Let in whoever has a ticket that is expected."""
        lane: asyncio.Future[socket.socket] | None = None
        try:
            ticket = await asyncio.wait_for(_read_exactly(connection, _TICKET_BYTES), _TICKET_S)
            lane = self._expected.get(ticket)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            self._strangers -= 1
            if lane is None or lane.done():
                connection.close()
            else:
                lane.set_result(connection)


class Lane:
    """The feed's end of one lane.

    Args:
        connection: connected, not blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    async def send(self, message: bytes) -> None:
        """Send one reply. Raises OSError if the rank is gone."""
        await self._loop.sock_sendall(self._connection, _LENGTH.pack(len(message)) + message)

    async def send_batch(self, header: bytes, payload: memoryview) -> None:
        """Send the reply with `batch`, and the batch's bytes. Raises OSError if the rank is gone."""
        head, size = _LENGTH.pack(len(header)) + header, payload.nbytes
        if size <= _SMALL_BYTES:
            await self._loop.sock_sendall(self._connection, b"".join((head, payload)))
            return
        await self._loop.sock_sendall(self._connection, head)
        await self._loop.sock_sendall(self._connection, payload)

    def close(self) -> None:
        """End it at once; what is under way is lost. May be repeated."""
        with contextlib.suppress(OSError):
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()


class LaneReader:
    """The rank's end of one lane; used by one thread, but for `end`.

    Args:
        address: host and port.
        ticket: from the feed's `welcome`.
        timeout_s: how long connecting may take.

    Raises:
        OSError: the port cannot be reached.
    """

    def __init__(self, address: tuple[str, int], ticket: bytes, timeout_s: float = 5.0) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(ticket)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = self._stop = 0  # what of it is not used yet
        self._replies = ReplyReader()

    def read(self) -> Any:
        """Wait for the next reply; None at the lane's end.

        Returns:
            What `ReplyReader.read` gives: Arrived, SplitEnd or EpochEnd.

        Raises:
            OSError: the connection broke.
            ValueError: what came makes no sense.
        """
        head = self._take(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_MESSAGE_BYTES:
            raise ValueError(f"a reply of {length} bytes on a lane")
        message = self._take(length)
        if message is None:
            return None
        header = batch_header(message)
        return self._replies.read(message) if header is None else self._batch(header)

    def end(self) -> None:
        """Have `read` come to the lane's end, from any thread. May be repeated."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. May be repeated."""
        self._socket.close()

    def _batch(self, header: Header) -> Arrived | None:
        buffer = np.empty(header.size, dtype=np.uint8)
        target = buffer.data
        have = min(header.size, self._stop - self._start)
        target[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        while have < header.size:
            got = self._socket.recv_into(target[have:], header.size - have, socket.MSG_WAITALL)
            if got == 0:
                return None
            have += got
        return header.arrived(buffer)

    def _take(self, size: int) -> bytes | None:
        """Read so many bytes; None if the connection ends before."""
        taken: list[bytes] = []
        while size:
            if self._start == self._stop:
                self._start, self._stop = 0, self._socket.recv_into(self._buffer)
                if self._stop == 0:
                    return None
            used = min(size, self._stop - self._start)
            taken.append(bytes(self._buffer[self._start : self._start + used]))
            self._start += used
            size -= used
        return taken[0] if len(taken) == 1 else b"".join(taken)


async def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes. Raises ConnectionError if there are fewer."""
    read = b""
    while len(read) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(read))
        if not more:
            raise ConnectionError("closed before it said who it was")
        read += more
    return read
