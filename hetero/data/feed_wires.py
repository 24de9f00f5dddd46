"""On what a feed's replies go to a rank: its call, or the lane beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from hetero.data.feed_lane import Lane
from hetero.data.feed_splits import ReadyBatch
from hetero.data.feed_wire import CHUNK_BYTES, header_message, messages

Write = Callable[[bytes], Awaitable[None]]


class Wire(Protocol):
    """On which replies go to a rank."""

    async def reply(self, message: bytes) -> None:
        """Send one serialised reply; returns once there is room for another."""
        ...

    async def batch(self, batch: ReadyBatch, payload: memoryview, on_last: Callable[[], None]) -> None:
        """Send a batch.

        Args:
            batch: which; it is held.
            payload: its bytes.
            on_last: called before the last piece goes: the rank may acknowledge it sooner than this returns.
        """
        ...


class CallWire:
    """The rank's call itself: a batch is cut into messages, into which its bytes are copied."""

    def __init__(self, write: Write) -> None:
        self._write = write

    async def reply(self, message: bytes) -> None:
        """Send one serialised reply."""
        await self._write(message)

    async def batch(self, batch: ReadyBatch, payload: memoryview, on_last: Callable[[], None]) -> None:
        """Send a batch."""
        left = max(1, -(-batch.size // CHUNK_BYTES))
        for message in messages(batch.id, batch.rows, batch.layout, payload):
            left -= 1
            if left == 0:
                on_last()
            await self._write(message)
            # Two of them at a time would cost twice the CPU: the C library gives each back to the system.
            del message


class LaneWire:
    """A lane beside the call, but for the first reply, which announces it."""

    def __init__(self, write: Write, arrival: Callable[[], Awaitable[Lane]]) -> None:
        self._write, self._arrival = write, arrival
        self.lane: Lane | None = None
        self._announced = False

    async def reply(self, message: bytes) -> None:
        """Send one serialised reply. Raises OSError if the rank is gone."""
        if not self._announced:
            self._announced = True
            await self._write(message)
            self.lane = await self._arrival()
            return
        if self.lane is not None:
            await self.lane.send(message)

    async def batch(self, batch: ReadyBatch, payload: memoryview, on_last: Callable[[], None]) -> None:
        """Send a batch. Raises OSError if the rank is gone."""
        if self.lane is not None:
            on_last()
            header = header_message(batch.id, batch.rows, batch.layout, batch.size)
            await self.lane.send_batch(header, payload)
