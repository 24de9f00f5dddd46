"""The text in which a launcher says why it ended, for which room on the disk is kept from the start.

A full disk is one of the things that end a job, or come together with what does; and an empty file is worse than none:
SageMaker's toolkit leaves alone what is there, and the job fails for no reason at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_ROOM_BYTES = 4096  # more than 1,024 characters take in UTF-8


class LastWords:
    """A file that may be written though the disk is full.

    Args:
        path: The file. It is not made before there is something to say.
        reserve: Where room is kept until then; must be on the same file system.
    """

    def __init__(self, path: Path, reserve: Path) -> None:
        self._path, self._reserve = path, reserve
        with contextlib.suppress(OSError):
            reserve.write_bytes(b" " * _ROOM_BYTES)

    @property
    def said(self) -> bool:
        """Whether the file is there, whoever wrote it."""
        return self._path.exists()

    def write(self, text: str) -> None:
        """Write the text, or replace it.

        Raises:
            OSError: It cannot be written, and the file is as it was before.
        """
        content = text.encode()[:_ROOM_BYTES]
        with contextlib.suppress(OSError):
            _overwrite(self._path, content)  # what is there has room, which is not given back before
            return
        with contextlib.suppress(OSError):
            _overwrite(self._reserve, content)
            self._reserve.replace(self._path)
            return
        try:
            self._path.write_bytes(content)
        except OSError:
            if self.said and not self._path.stat().st_size:
                self._path.unlink()
            raise

    def close(self) -> None:
        """Give the room back, if it was not needed."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> None:
    """Write a file in the blocks that it has."""
    handle = os.open(path, os.O_WRONLY)
    try:
        if os.pwrite(handle, content, 0) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.ftruncate(handle, len(content))
    finally:
        os.close(handle)
