"""How this process treats memory that was freed, by settings of glibc; with another C library nothing happens."""

from __future__ import annotations

import contextlib
import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MOST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
_KEPT_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10


def keep_freed_memory() -> None:
    """Reuse freed memory instead of giving it back to the system at once; for a process that streams batches.

    Each message of a stream would otherwise be laid into new pages, which the system has to clear first: that costs
    more CPU than to send it. At most `_KEPT_BYTES` more are kept, in each of the library's arenas.
    """
    _set(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
    _set(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Give large pieces of memory back at once; for a service that large requests should not make large for good."""
    _set(_M_MMAP_THRESHOLD, _SMALL_BYTES)
    _set(_M_TRIM_THRESHOLD, _SMALL_BYTES)


def share_one_heap() -> None:
    """Let all threads use one heap; for a service with many threads that do little: heaps never shrink much."""
    _set(_M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(parameter, value)
