"""Memory that a worker shares with its host's feed: finished batches lie in it until a rank has them.

The memory is an anonymous file (memfd), so it has no name that could be left behind, and its pages are there as long as
somebody maps it: what a worker had finished can still be read after its death. Pages exist only once they were written,
and batches are put as far to the front as there is room.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 64
"""Bytes; every batch starts at a multiple."""
# The reader would be killed by SIGBUS if the file shrank under its mapping, so no process may change its size.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlotId(NamedTuple):
    """Where a batch lies.

    Attributes:
        arena: number of the memory, counted by the worker.
        offset: bytes from its start, a multiple of `ALIGNMENT`.
        size: bytes of the batch.
    """

    arena: int
    offset: int
    size: int


class Space:
    """Which parts of `size` bytes are free. First fit, neighbours joined.

    Args:
        size: bytes, a multiple of `ALIGNMENT`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: dict[int, int] = {}  # offset -> end
        self._starts, self._ends = [0], [size]  # of the free parts, ascending

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in use."""
        return not self._used

    def take(self, size: int) -> int | None:
        """Return the offset of `size` bytes that are now in use; None: there is no such room at present."""
        length = rounded(size)
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                self._used[start] = start + length
                if end - start > length:
                    self._starts[index] = start + length
                else:
                    del self._starts[index], self._ends[index]
                return start
        return None

    def give(self, offset: int) -> None:
        """Free what was taken at `offset`.

        Raises:
            ValueError: nothing is in use there.
        """
        if offset not in self._used:
            raise ValueError(f"nothing is in use at offset {offset}")
        start, end = offset, self._used.pop(offset)
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)


def rounded(size: int) -> int:
    """Return the bytes that a batch of `size` takes up; an empty one has a place of its own too."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


class Arena:
    """The worker's end: allocates and writes.

    A batch that is larger than the capacity gets memory of its size for itself alone, when everything else has been
    freed; the next batch that fits goes back to memory of the capacity. Whenever `number` has changed the feed needs
    the new `fd` before it can read.

    Args:
        capacity: bytes; rounded up to whole pages.

    Attributes:
        number: counts the memories, from 0.
        fd: the present one's file descriptor.

    Raises:
        OSError: the system gives no memory file (file descriptors, address space).
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"an arena needs a capacity above 0 bytes, got {capacity}")
        self._capacity = _whole_pages(capacity)
        self._numbers = itertools.count()
        self.fd = self.number = -1
        self._open(self._capacity)

    @property
    def size(self) -> int:
        """Bytes of the present memory."""
        return self._space.size

    @property
    def is_empty(self) -> bool:
        """Whether every slot has been freed."""
        return self._space.is_empty

    def allocate(self, size: int) -> SlotId | None:
        """Take room for a batch of `size` bytes; None: free a slot and ask again. With no slot in use there is room.

        Raises:
            OSError: the system gives no memory for a batch larger than the capacity.
        """
        wanted = max(self._capacity, _whole_pages(rounded(size)))
        if self._space.is_empty:
            if self.size < wanted or self.size > wanted == self._capacity:
                self._open(wanted)
        elif self.size > self._capacity:  # one large batch is in it
            return None
        offset = self._space.take(size)
        return None if offset is None else SlotId(self.number, offset, size)

    def write(self, slot: SlotId, buffers: Sequence[memoryview]) -> None:
        """Copy buffers, one after the other, into a slot of this arena; together they have its size."""
        offset = slot.offset
        for buffer in buffers:
            end = offset + buffer.nbytes
            self._bytes[offset:end] = np.frombuffer(buffer, dtype=np.uint8)  # other threads run meanwhile
            offset = end

    def free(self, slot: SlotId) -> None:
        """Make a slot's room available again.

        Raises:
            ValueError: it is not in use.
        """
        if slot.arena != self.number:
            raise ValueError(f"{slot} is not in use: the memory is number {self.number} by now")
        self._space.give(slot.offset)

    def resize(self, capacity: int) -> None:
        """Have another capacity from the time on at which every slot has been freed."""
        self._capacity = _whole_pages(max(1, capacity))

    def close(self) -> None:
        """Let go of the memory; the feed's mapping of it stays. May be repeated."""
        if self.fd < 0:
            return
        if file_identity(self.fd) == self._identity:
            os.close(self.fd)
        else:  # the job's code closed it: the numbers, the mapping's too, may be files of its own by now
            _lost_mappings.append(self._bytes)
        self.fd = -1
        del self._bytes  # the mapping ends with its last user

    def _open(self, size: int) -> None:
        self.close()  # before the new one, so that the two never take memory together
        self._space = Space(0)  # if the system gives none, the next batch asks again
        fd = os.memfd_create("hetero-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self.fd, self._identity = fd, file_identity(fd)
        self.number, self._space = next(self._numbers), Space(size)
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)


class MappedArena:
    """The feed's end: reads.

    Args:
        fd: as received from the worker; it is closed here, whatever happens.
        size: bytes, as the worker says.

    Raises:
        ValueError: the file is smaller, or could be made smaller later.
        OSError: it is no memory file, or cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        try:
            actual, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not 0 < size <= actual or not seals & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"a memory of {actual} bytes with the seals {seals:#x} cannot be one of {size} bytes")
            self._mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.size = size

    def view(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes from `offset`, read-only, without a copy. They must not be used once the slot is freed.

        Raises:
            ValueError: they do not lie within the memory.
        """
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size} bytes at {offset} do not lie within {self.size} bytes")
        return memoryview(self._mapping)[offset : offset + size]

    def close(self) -> None:
        """Unmap: at once, or when the last view is gone. May be repeated."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


_lost_mappings: list[Any] = []  # kept, because to unmap would close a file descriptor


def file_identity(fd: int) -> tuple[int, int] | None:
    """Return what tells the file behind a descriptor from all others that are open; None if it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
