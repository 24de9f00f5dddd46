"""Read idx files, the format of MNIST and its successors: http://yann.lecun.com/exdb/mnist, "the IDX file format".

Two zero bytes, one for the element type, one for the number of axes, the length of each axis as big-endian uint32, then
the elements, big-endian, the last axis fastest.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.errors import InputError
from hetero.inputs import s3

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def read(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Return the array in a file, gzip-compressed or not.

    Args:
        path: The file, or its address (`s3://bucket/key`). Whether it is compressed is seen from its content, not from
            its name.

    Returns:
        Array of the file's shape, in the machine's own byte order.

    Raises:
        InputError: The file cannot be read, is no idx file, or is shorter or longer than its header says.
    """
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise InputError(
            f"{str(path)!r} is no idx file: it starts with {content[:4].hex(' ') or 'nothing'}, not with 00 00 and the "
            "code of an element type. Name a file such as train-images-idx3-ubyte.gz."
        )
    dtype, axes = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * axes
    if len(content) < start:
        raise InputError(_cut(path, start, len(content)))
    shape = struct.unpack_from(f">{axes}I", content, 4)
    size = start + math.prod(shape) * dtype.itemsize
    if len(content) != size:
        raise InputError(_cut(path, size, len(content)))
    array = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        raw = s3.read_bytes(str(path)) if s3.is_address(path) else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}. Put the file there.") from error
    if not raw.startswith(_GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{str(path)!r} is a damaged gzip file: {error}. Fetch it again.") from error


def _cut(path: str | os.PathLike[str], wanted: int, found: int) -> str:
    return f"{str(path)!r} has {found} bytes but its header promises {wanted}: it is damaged. Fetch it again."
