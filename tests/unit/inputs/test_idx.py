"""idx files are read as they were written, and damaged ones are refused in words."""

from __future__ import annotations

import contextlib
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import InputError
from hetero.inputs import idx

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def written(array: np.ndarray[Any, Any]) -> bytes:
    kind = array.dtype.str[1:]
    header = bytes([0, 0, CODES[kind], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(f">{kind}").tobytes()


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 28, 28), ()])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_was_written_is_read(tmp_path: Path, kind: str, shape: tuple[int, ...], pack) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    path = tmp_path / "array"
    path.write_bytes(pack(written(array)))
    found = idx.read(path)
    assert found.dtype == np.dtype(kind)
    assert found.shape == shape
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


@given(st.binary(max_size=64))
def test_no_content_whatever_raises_anything_but_an_input_error(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        idx.read(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is no idx file: it starts with nothing"),
        (b"PNG\0", "is no idx file: it starts with 50 4e 47 00"),
        (b"\0\0\x0a\x01\0\0\0\0", "is no idx file"),
        (b"\0\0\x08\x03\0\0\0\x02", "has 8 bytes but its header promises 16"),
        (written(np.zeros((2, 3), "u1"))[:-1], "has 17 bytes but its header promises 18"),
        (written(np.zeros((2, 3), "u1")) + b"x", "has 19 bytes but its header promises 18"),
        (gzip.compress(written(np.zeros((50, 3), "i4")), mtime=0)[:-9], "is a damaged gzip file"),
        (b"\x1f\x8bnonsense that is no deflate stream", "is a damaged gzip file"),
        (gzip.compress(written(np.arange(9).astype("i4")), mtime=0)[:-8] + b"\0" * 8, "is a damaged gzip file"),
    ],
)
def test_a_wrong_or_damaged_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        idx.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.gz' cannot be read: No such file"):
        idx.read(tmp_path / "absent.gz")
