"""Sets of numbers as bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero import bitmap

NUMBERS = st.sets(st.integers(0, 200))


def of(numbers: set[int]) -> bytearray:
    made = bytearray()
    for number in numbers:
        bitmap.add(made, number)
    return made


@given(NUMBERS, NUMBERS)
def test_a_bitmap_holds_what_was_added_and_a_union_holds_both(one: set[int], other: set[int]) -> None:
    joined = bitmap.union(of(one), of(other))

    assert {number for number in range(300) if bitmap.has(joined, number)} == one | other
    assert bitmap.count(joined) == len(one | other)
    assert {number for number in range(300) if bitmap.has(of(one), number)} == one
