"""The exchange's messages: names of its calls, channel options, and batches as parcels and chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero import batch as batches
from hetero._proto import exchange_pb2 as pb

SERVICE = "hetero.v1.Exchange"
CHUNK_BYTES = 1 << 20  # 1-4 MiB a message is where Python gRPC is fastest
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the container's environment says
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 30_000),  # a host that vanished without closing its connections is noticed
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
_DATA_TAG = b"\x0a"  # field 1, length-delimited


def parcel_messages(*, epoch: int, step: int, to: int, part: int, data: Any) -> Iterator[bytes]:
    """A structure as serialised Chunk messages: one parcel, then the bytes.

    Raises:
        InputError: the structure cannot be written (`hetero.batch.encode`).
    """
    header, buffers = batches.encode(data)
    size = sum(buffer.nbytes for buffer in buffers)
    yield pb.Chunk(
        parcel=pb.Parcel(epoch=epoch, step=step, to=to, part=part, header=header, size=size)
    ).SerializeToString()
    yield from _chunks(buffers)


def read_message(message: bytes) -> memoryview | Any:
    """A serialised Chunk: its data as a view, or its `Parcel`."""
    if message[:1] != _DATA_TAG:
        return pb.Chunk.FromString(message).parcel
    start = 1
    while message[start] & 0x80:
        start += 1
    return memoryview(message)[start + 1 :]


def read_parcels(messages: Iterable[bytes]) -> Iterator[tuple[Any, Any]]:
    """Pairs of Parcel and structure from a stream of serialised Chunks."""
    parcel: Any = None
    buffer: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    filled = 0
    for message in messages:
        content = read_message(message)
        if isinstance(content, memoryview):
            buffer[filled : filled + content.nbytes] = content
            filled += content.nbytes
        else:
            parcel, filled = content, 0
            buffer = np.empty(parcel.size, dtype=np.uint8)
        if parcel is not None and filled == parcel.size:
            yield parcel, batches.decode(parcel.header, buffer)
            parcel = None


def _chunks(buffers: list[memoryview]) -> Iterator[bytes]:
    parts: list[memoryview] = []
    size = 0
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            part = buffer[start : start + CHUNK_BYTES - size]
            parts.append(part)
            size += part.nbytes
            start += part.nbytes
            if size == CHUNK_BYTES:
                yield _chunk(parts, size)
                parts, size = [], 0
    if size:
        yield _chunk(parts, size)


def _chunk(parts: list[memoryview], size: int) -> bytes:
    """Chunk(data=...).SerializeToString() with one copy instead of three."""
    prefix, rest = bytearray(_DATA_TAG), size
    while rest > 0x7F:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return b"".join((prefix, *parts))
