"""Sets of small whole numbers, such as the batches of a split that have arrived, as bytes.

Bit s is s % 8 of byte s // 8; a bitmap is as long as its greatest member needs, or longer.
"""

from __future__ import annotations

Bitmap = bytes | bytearray


def has(bitmap: Bitmap, number: int) -> bool:
    """Return whether `number` is in the set."""
    index = number >> 3
    return index < len(bitmap) and bool(bitmap[index] >> (number & 7) & 1)


def add(bitmap: bytearray, number: int) -> None:
    """Put `number` into the set."""
    index = number >> 3
    if index >= len(bitmap):
        bitmap.extend(bytes(index + 1 - len(bitmap)))
    bitmap[index] |= 1 << (number & 7)


def union(one: Bitmap, other: Bitmap) -> bytes:
    """Return the members of either."""
    length = max(len(one), len(other))
    return (int.from_bytes(one, "little") | int.from_bytes(other, "little")).to_bytes(length, "little")


def count(bitmap: Bitmap) -> int:
    """Return the number of members."""
    return int.from_bytes(bitmap, "little").bit_count()
