"""Exact batches from raw batches of any sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.data.rebatch import Rebatcher, fill
from hetero.errors import InputError


def raw(start, count):
    return {
        "id": np.arange(start, start + count),
        "text": np.array([str(i) for i in range(start, start + count)], dtype=object),
    }


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 17), max_size=12), st.integers(1, 9))
def test_any_cuts_give_exact_batches_in_order(cuts, batch_size):
    rebatcher = Rebatcher(batch_size)
    starts = np.cumsum([0, *cuts]).tolist()

    full = [out for start, count in zip(starts, cuts, strict=False) for out in rebatcher.feed(raw(start, count))]
    leftover, rows = rebatcher.leftover()

    assert all(len(out["id"]) == len(out["text"]) == batch_size for out in full)
    assert rows == sum(cuts) % batch_size
    seen = [row for out in [*full, *([leftover] if rows else [])] for row in out["id"].tolist()]
    assert seen == list(range(sum(cuts)))


def test_exact_batches_are_handed_on_as_they_are():
    batch = {"x": np.zeros((4, 2)), "y": np.zeros(4)}

    (out,) = Rebatcher(4).feed(batch)

    assert out["x"] is batch["x"]


def test_large_batches_are_cut_without_copying():
    batch = np.zeros((8, 2))

    outs = list(Rebatcher(4).feed(batch))

    assert len(outs) == 2
    assert all(np.shares_memory(out, batch) for out in outs)


def test_exact_batches_overtake_pending_rows_where_order_does_not_matter():
    rebatcher = Rebatcher(4, ordered=False)
    short, exact = raw(0, 3), [raw(start, 4) for start in (10, 20, 30)]

    assert list(rebatcher.feed(short)) == []
    outs = [out for batch in exact for out in rebatcher.feed(batch)]
    assert [out["id"] is batch["id"] for out, batch in zip(outs, exact, strict=True)] == [True] * 3
    (joined,) = rebatcher.feed(raw(40, 2))
    assert joined["id"].tolist() == [0, 1, 2, 40]
    assert rebatcher.leftover()[0]["id"].tolist() == [41]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 17), max_size=12), st.integers(1, 9))
def test_without_order_no_row_is_lost_or_comes_twice(cuts, batch_size):
    rebatcher = Rebatcher(batch_size, ordered=False)
    starts = np.cumsum([0, *cuts]).tolist()

    full = [out for start, count in zip(starts, cuts, strict=False) for out in rebatcher.feed(raw(start, count))]
    leftover, rows = rebatcher.leftover()

    assert all(len(out["id"]) == batch_size for out in full)
    assert rows == sum(cuts) % batch_size
    assert sorted(row for out in [*full, *([leftover] if rows else [])] for row in out["id"]) == list(range(sum(cuts)))


def test_row_shapes_may_change_while_batches_are_exact():
    rebatcher = Rebatcher(2)

    assert [out.shape for size in (3, 5) for out in rebatcher.feed(np.zeros((2, size)))] == [(2, 3), (2, 5)]


def test_a_change_of_structure_is_named():
    rebatcher = Rebatcher(4)
    list(rebatcher.feed({"x": np.zeros(2), "y": (np.zeros(2),)}))

    with pytest.raises(InputError, match=r"batch\['y'\]\[0\] is float64 in one batch and float32"):
        list(rebatcher.feed({"x": np.zeros(2), "y": (np.zeros(2, dtype=np.float32),)}))
    with pytest.raises(InputError, match=r"batch\['y'\]\[1\] is in one and missing"):
        list(rebatcher.feed({"x": np.zeros(2), "y": (np.zeros(2), np.zeros(2))}))


def test_empty_batches_are_checked_and_skipped():
    rebatcher = Rebatcher(2)

    assert list(rebatcher.feed(np.zeros((0, 3)))) == []
    with pytest.raises(InputError, match="int64"):
        list(rebatcher.feed(np.zeros((2, 3), dtype=np.int64)))


def test_fill_repeats_rows_in_turn():
    assert fill(np.array([7, 8, 9]), 2, 5).tolist() == [7, 8, 7, 8, 7]
