"""The feed's messages (feed.proto), written and read by hand where bytes of batches travel.

Payload stays out of protobuf's own encoder, which copies it several times. Headers of batches are put together from
layouts that are made once: the pure Python protobuf takes longer for one than a small batch does on the wire.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero import batch as batches
from hetero._proto import feed_pb2 as pb

SERVICE = "hetero.v1.Feed"
CHUNK_BYTES = 2 << 20  # of payload in one reply: 1 to 2 MiB a message is where Python gRPC is fastest
_ALIGNMENT = 16  # of the contents of a bytes object in memory
# Tags of ReadReply and BatchHeader: number << 3 | type, with type 0 a varint and 2 length-delimited.
_BATCH, _PADDING, _DATA = b"\x12", b"\x72", b"\x7a"
_EPOCH, _SPLIT, _SEQUENCE, _ATTEMPT, _ROWS, _BYTES, _LAYOUT = 0x08, 0x10, 0x18, 0x20, 0x28, 0x30, b"\x3a"


class BatchId(NamedTuple):
    """What a batch is known by, and in which attempt at its split it was prepared."""

    epoch: int
    split: int
    sequence: int
    attempt: int


class Encoded(NamedTuple):
    """A batch ready to be laid into memory.

    Attributes:
        layout: a serialised `Layout`.
        rows: number of rows.
        size: bytes of all buffers.
        buffers: to be laid one after the other; they share memory with the batch's arrays.
    """

    layout: bytes
    rows: int
    size: int
    buffers: list[memoryview]


class Arrived(NamedTuple):
    """A batch that has arrived complete; `data` is a structure of arrays that share one buffer of `size` bytes."""

    batch: BatchId
    rows: int
    size: int
    data: Any


def encode(structure: Any) -> Encoded:
    """Lay out a batch.

    Args:
        structure: nested arrays; the first axis of each are the rows.

    Raises:
        InputError: it cannot be sent, or its arrays disagree in rows; names the path.
    """
    leaves, tree = batches.flatten(structure)
    rows = batches.leaf_rows(leaves, tree)
    specs, buffers, size = batches.encode_leaves(leaves, tree)
    return Encoded(_layout(tree, tuple(specs)), rows, size, buffers)


def messages(batch: BatchId, rows: int, layout: bytes, payload: memoryview) -> Iterator[bytes]:
    """Give one batch as serialised ReadReply messages, with one copy of its payload.

    The payload's pieces lie at a multiple of 16 bytes in the messages, so that arrays can be views of a message.
    """
    size, head = payload.nbytes, header_message(batch, rows, layout, payload.nbytes)
    for start in range(0, size, CHUNK_BYTES):
        piece = payload[start : start + CHUNK_BYTES]
        tail = _DATA + _varint(piece.nbytes)
        yield b"".join((_padded(head, len(tail)), tail, piece))
        head = b""
    if head:
        yield head


def header_message(batch: BatchId, rows: int, layout: bytes, size: int) -> bytes:
    """Return the serialised ReadReply that begins a batch of `size` bytes, without any of them."""
    numbers = ((_EPOCH, batch.epoch), (_SPLIT, batch.split), (_SEQUENCE, batch.sequence), (_ATTEMPT, batch.attempt))
    header = bytearray()
    for tag, number in (*numbers, (_ROWS, rows), (_BYTES, size)):
        header.append(tag)
        header += _varint(number)
    header += _LAYOUT + _varint(len(layout)) + layout
    return bytes(_BATCH + _varint(len(header)) + header)


def batch_header(message: bytes) -> Header | None:
    """Return the header in a serialised ReadReply, None if it has none. Raises ValueError if it makes no sense."""
    return _split(message)[0] if message[:1] == _BATCH else None


def reply(**fields: Any) -> bytes:
    """Return a serialised ReadReply without payload, such as `reply(welcome=pb.Welcome(feed_id="x"))`."""
    return bytes(pb.ReadReply(**fields).SerializeToString())


class ReplyReader:
    """Puts batches together from the replies of one stream."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._filled = 0

    def read(self, message: bytes) -> Any:
        """Take one serialised ReadReply.

        Returns:
            An `Arrived` batch once it is complete; a Welcome, SplitEnd or EpochEnd; None if more is to come.

        Raises:
            ValueError: the message is no such reply, or does not fit what came before.
        """
        try:
            return self._read(message)
        except ValueError:
            raise
        except Exception as error:  # protobuf, JSON and NumPy each have their own way to say that bytes make no sense
            raise ValueError(f"a reply that makes no sense: {error!r}") from error

    def _read(self, message: bytes) -> Any:
        if message[:1] not in (_BATCH, _PADDING, _DATA):
            content = pb.ReadReply.FromString(message)
            kind = next((name for name in ("welcome", "split_end", "epoch_end") if content.HasField(name)), None)
            if kind is None:
                raise ValueError("an empty reply")
            return getattr(content, kind)
        header, piece = _split(message)
        if header is not None:
            if self._header is not None:
                raise ValueError("a batch began before the last one was complete")
            if header.size == len(piece):
                return header.arrived(piece)
            self._header, self._filled = header, 0
            self._buffer = np.empty(header.size, dtype=np.uint8)
        return self._take(piece)

    def _take(self, piece: memoryview) -> Arrived | None:
        header, end = self._header, self._filled + len(piece)
        if header is None or end > header.size or not piece:
            raise ValueError("payload that belongs to no batch")
        self._buffer[self._filled : end] = piece
        self._filled = end
        if end < header.size:
            return None
        buffer, self._header = self._buffer, None
        self._buffer = np.empty(0, dtype=np.uint8)
        return header.arrived(buffer)


class Header(NamedTuple):
    """What begins a batch; `size` bytes follow, laid out as `layout` says."""

    batch: BatchId
    rows: int
    size: int
    layout: bytes

    def arrived(self, buffer: Any) -> Arrived:
        """Return the batch, whose arrays are views of its bytes. Raises ValueError if they cannot be."""
        tree, specs = _read_layout(self.layout)
        if specs and specs[-1].start + specs[-1].size > self.size:
            raise ValueError("arrays beyond the end of their batch")
        return Arrived(self.batch, self.rows, self.size, batches.decode_leaves(tree, specs, buffer))


@lru_cache(maxsize=256)
def _layout(tree: Any, specs: tuple[batches.LeafSpec, ...]) -> bytes:
    arrays = [
        pb.Array(path=path, dtype=spec.dtype, shape=spec.shape, offset=spec.start, bytes=spec.size)
        for path, spec in zip(batches.leaf_paths(tree), specs, strict=True)
    ]
    text = json.dumps(batches.tree_to_json(tree), separators=(",", ":"))
    return bytes(pb.Layout(arrays=arrays, tree=text).SerializeToString())


@lru_cache(maxsize=256)
def _read_layout(layout: bytes) -> tuple[Any, tuple[batches.LeafSpec, ...]]:
    content = pb.Layout.FromString(layout)
    specs = (batches.LeafSpec(array.dtype, tuple(array.shape), array.offset, array.bytes) for array in content.arrays)
    return batches.tree_from_json(json.loads(content.tree)), tuple(specs)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a position, and where it ends."""
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _padded(head: bytes | bytearray, tail: int) -> bytes | bytearray:
    """Fill up what stands before the payload to a multiple of the alignment, with the field that means nothing."""
    gap = -(len(head) + tail) % _ALIGNMENT
    if gap == 0:
        return head
    gap += _ALIGNMENT if gap == 1 else 0  # tag and length take two bytes
    return head + _PADDING + bytes((gap - 2,)) + bytes(gap - 2)


def _split(message: bytes) -> tuple[Header | None, memoryview]:
    """Return the batch header of a reply, if it has one, and its piece of payload."""
    header, at, end = None, 0, len(message)
    try:
        while at < end:
            tag = message[at : at + 1]
            size, start = _read_varint(message, at + 1)
            at = start + size
            if at > end:
                raise ValueError("a field beyond the end of its reply")
            if tag == _DATA:
                return header, memoryview(message)[start:at]
            if tag == _BATCH:
                header = _read_header(message, start, at)
    except IndexError as error:
        raise ValueError("a reply that is cut off") from error
    return header, memoryview(b"")


def _read_header(message: bytes, at: int, end: int) -> Header:
    numbers = {_EPOCH: 0, _SPLIT: 0, _SEQUENCE: 0, _ATTEMPT: 0, _ROWS: 0, _BYTES: 0}
    layout = b""
    while at < end:
        tag = message[at]
        value, at = _read_varint(message, at + 1)
        if tag == _LAYOUT[0]:
            layout, at = message[at : at + value], at + value
        elif tag in numbers:
            numbers[tag] = value
        else:
            raise ValueError(f"an unknown field in a batch header: {tag}")
    epoch, split, sequence, attempt, rows, size = numbers.values()
    return Header(BatchId(epoch, split, sequence, attempt), rows, size, layout)
