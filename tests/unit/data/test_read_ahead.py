"""How far an InputStream reads ahead in bytes, and what it does not copy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from epoch_ranks import DEADLINE_S, Ranks, check_epochs, opener, take_epochs, uneven
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.data.epoch import InputStream
from hetero.data.local import local_opener


@pytest.mark.parametrize(("limit", "ahead"), [(10_000, 8), (400, 4), (399, 3), (100, 1), (1, 1)])
def test_read_ahead_is_bounded_in_bytes_but_is_at_least_one_batch(limit, ahead):
    given, asked = [], threading.Semaphore(0)

    def inputs(_):
        for i in range(50):
            given.append(i)
            asked.release()
            text = np.array(["x" * 34] * 2, dtype=object)  # 84 bytes with their pointers
            yield {"id": np.full(2, i), "text": text}

    stream = InputStream(local_opener(inputs), 2, prefetch_batches=8, prefetch_bytes=limit)
    iterator = stream.batches(0)
    for taken in (1, 2, 3):
        assert next(iterator).data["id"].tolist() == [taken - 1] * 2
        while len(given) < taken + ahead + 1:  # those taken, those ahead, one in the reader's hand
            assert asked.acquire(timeout=DEADLINE_S)
    while asked.acquire(timeout=0.2):
        pass
    assert len(given) == 3 + ahead + 1
    stream.close()


@settings(max_examples=15, deadline=None)
@given(uneven(), st.integers(1, 500))
def test_a_bound_in_bytes_never_keeps_ranks_from_their_steps(case, limit):
    cuts, batch_size, pad, prefetch = case
    ranks = Ranks(len(cuts))

    results = ranks.run(
        take_epochs(len(cuts[0])),
        lambda rank: opener(cuts[rank], rank),
        batch_size=batch_size,
        remainder="pad" if pad else "drop",
        prefetch_batches=prefetch,
        prefetch_bytes=limit,
        ordered=False,
        epochs=len(cuts[0]),
    )

    assert ranks.errors == [None] * len(cuts)
    check_epochs(results, cuts, batch_size, pad)


def test_one_short_batch_costs_no_copies_where_order_does_not_matter():
    arrays = [np.zeros((2, 3)), *(np.zeros((4, 3)) for _ in range(10)), np.zeros((2, 3))]
    stream = InputStream(local_opener(lambda _: arrays), 4, ordered=False)

    taken = [batch.data for batch in stream.batches(0)]
    stream.close()

    assert [data is array for data, array in zip(taken, arrays[1:], strict=True)] == [True] * 10 + [False]
