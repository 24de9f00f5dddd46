"""Equal steps: a pure function of what the ranks have read."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.data.schedule import LEFTOVER, RUNNING, Schedule


@st.composite
def epochs(draw):
    size = draw(st.integers(1, 6))
    batch_size = draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    leftovers = draw(st.lists(st.integers(0, batch_size - 1), min_size=size, max_size=size))
    return size, batch_size, counts, leftovers, draw(st.booleans())


def at_once(epoch):
    size, batch_size, counts, leftovers, pad = epoch
    schedule = Schedule(size, batch_size, pad)
    return schedule, schedule.update(counts, leftovers)


def taken(step, rank, batch_size):
    """(owner, batch, row) of what a rank takes in a step."""
    if step.level is not None:
        return [(rank, step.level, row) for row in range(batch_size)]
    share = step.shares[rank]
    if not share.rows:
        return []
    return [(piece.owner, piece.batch, row) for piece in share.pieces for row in range(piece.start, piece.stop)]


@settings(max_examples=300, deadline=None)
@given(epochs())
def test_every_row_is_taken_once_but_for_less_than_a_step(epoch):
    size, batch_size, counts, leftovers, pad = epoch
    schedule, steps = at_once(epoch)
    every = {(rank, j, row) for rank in range(size) for j in range(counts[rank]) for row in range(batch_size)}
    every |= {(rank, LEFTOVER, row) for rank in range(size) for row in range(leftovers[rank])}

    seen = Counter(row for step in steps for rank in range(size) for row in taken(step, rank, batch_size))

    assert schedule.ended
    assert [step.index for step in steps] == list(range(schedule.steps))
    assert set(seen) <= every
    assert set(seen.values()) <= {1}
    assert len(every) == schedule.total_rows
    assert len(every) - len(seen) == schedule.dropped_rows < size * batch_size
    assert not (pad and schedule.dropped_rows)


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_every_batch_but_those_of_the_last_padded_step_is_full(epoch):
    size, batch_size, _, _, pad = epoch
    schedule, steps = at_once(epoch)
    for step in steps:
        rows = [len(taken(step, rank, batch_size)) for rank in range(size)]
        if step is steps[-1] and pad and schedule.total_rows % (size * batch_size):
            assert sum(rows) == schedule.total_rows % (size * batch_size)
            assert max(rows) - min(rows) <= 1
            assert all(share.pieces for share in step.shares)
        else:
            assert rows == [batch_size] * size


@settings(max_examples=200, deadline=None)
@given(epochs(), st.randoms(use_true_random=False))
def test_the_order_in_which_reports_arrive_changes_nothing(epoch, random):
    size, batch_size, counts, leftovers, pad = epoch
    _, expected = at_once(epoch)
    schedule = Schedule(size, batch_size, pad)
    now, ends, steps = [0] * size, [RUNNING] * size, []
    while not schedule.ended:
        rank = random.randrange(size)
        if now[rank] < counts[rank]:
            now[rank] += random.randint(1, counts[rank] - now[rank])
        else:
            ends[rank] = leftovers[rank]
        steps += schedule.update(now, ends)
        if random.random() < 0.2:
            assert schedule.update(now, ends) == []

    assert steps == expected


@settings(max_examples=100, deadline=None)
@given(epochs())
def test_a_rank_keeps_its_own_batch_where_a_step_has_one(epoch):
    size, *_ = epoch
    _, steps = at_once(epoch)
    for step in steps:
        if step.shares and not step.tail:
            owners = [share.pieces[0].owner for share in step.shares]
            assert all(owners[rank] == rank for rank in range(size) if rank in owners)


def test_even_ranks_move_nothing():
    schedule = Schedule(3, 4, pad=False)

    steps = schedule.update([5, 5, 5], [1, 2, 3])

    assert [step.level for step in steps] == [0, 1, 2, 3, 4]
    assert schedule.dropped_rows == 6


def test_a_level_waits_for_the_slowest_rank():
    schedule = Schedule(2, 4, pad=False)

    assert schedule.update([7, 0], [RUNNING, RUNNING]) == []
    assert [step.level for step in schedule.update([7, 2], [RUNNING, RUNNING])] == [0, 1]
    assert len(schedule.update([7, 2], [RUNNING, 0])) == 2
    assert schedule.waiting(0) == 1


def test_leftover_rows_make_whole_steps():
    schedule = Schedule(4, 4, pad=False)

    (step,) = schedule.update([1, 1, 1, 0], [3, 3, 0, 0])

    assert step.tail
    assert schedule.dropped_rows == 2
    assert [len(share.pieces) for share in step.shares] == [1, 1, 1, 2]


def test_one_row_padded_over_three_ranks_counts_once():
    schedule = Schedule(3, 4, pad=True)

    (step,) = schedule.update([0, 0, 0], [0, 1, 0])

    assert sum(share.rows for share in step.shares) == 1
    assert {share.pieces[0].owner for share in step.shares} == {1}
