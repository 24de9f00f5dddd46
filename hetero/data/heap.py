"""How the C library treats memory that messages and batches gave back."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
_KEPT_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Have the C library of this process reuse freed memory instead of giving it back to the system at once.

    Each message of a stream would otherwise be laid into new pages, which the system has to clear first: that costs
    more CPU than to send it. At most `_KEPT_BYTES` more are kept, in each of the library's arenas.
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library that is not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
