"""Every batch is accepted once, and none of an attempt that was given up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import bitmap
from hetero.data.arrivals import Arrivals

batches = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 20), st.integers(1, 4))
fences = st.tuples(st.integers(0, 2), st.integers(0, 4), st.sets(st.integers(0, 3)))


@settings(max_examples=300, deadline=None)
@given(st.lists(batches | fences, max_size=60))
def test_any_history_is_as_that_of_sets(history):
    arrivals, accepted, floors = Arrivals(), set(), {}
    for entry in history:
        if len(entry) == 3:
            epoch, attempt, splits = entry
            answer = arrivals.fence(epoch, attempt, sorted(splits))
            for split in splits:
                floors[epoch, split] = max(attempt, floors.get((epoch, split), 0))
                told = {q for q in range(30) if bitmap.has(answer.get(split, b""), q)}
                assert told == {q for e, s, q in accepted if (e, s) == (epoch, split)}
        else:
            epoch, split, sequence, attempt = entry
            expected = attempt > floors.get((epoch, split), 0) and (epoch, split, sequence) not in accepted
            assert arrivals.accept(epoch, split, sequence, attempt) == expected
            if expected:
                accepted.add((epoch, split, sequence))
        assert all(arrivals.has(*known_by) for known_by in accepted)
    assert arrivals.highest_attempt == max((entry[3] if len(entry) == 4 else entry[1] for entry in history), default=0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_split_replayed_by_what_the_rank_said_arrives_exactly_once(data):
    """Its first host sends some, is fenced, and goes on sending; the second sends what the rank did not have."""
    arrivals, count = Arrivals(), data.draw(st.integers(1, 12))
    before = data.draw(st.lists(st.integers(0, count - 1)))
    late = data.draw(st.lists(st.integers(0, count - 1)))
    taken = [q for q in before if arrivals.accept(0, 5, q, 1)]

    arrived = arrivals.fence(0, 1, [5]).get(5, b"")
    replay = [(q, 2) for q in range(count) if not bitmap.has(arrived, q)]
    for q, attempt in data.draw(st.permutations([*replay, *((q, 1) for q in late)])):
        if arrivals.accept(0, 5, q, attempt):
            taken.append(q)

    assert sorted(taken) == list(range(count))


def test_the_end_of_a_split_is_known_unless_its_attempt_is_refused():
    arrivals = Arrivals()
    assert arrivals.end(0, 1) is None
    arrivals.fence(0, 3, [1])

    assert not arrivals.accept_end(0, 1, 3, 10)
    assert arrivals.end(0, 1) is None
    assert arrivals.accept_end(0, 1, 4, 9)
    assert arrivals.end(0, 1) == 9


def test_splits_of_which_nothing_arrived_are_left_out_of_the_answer():
    arrivals = Arrivals()
    arrivals.accept(0, 1, 0, 1)

    assert arrivals.fence(0, 1, [0, 1, 2]) == {1: b"\x01"}


def test_only_the_newest_epochs_are_remembered():
    arrivals = Arrivals()
    for epoch in range(50):
        arrivals.accept(epoch, 0, 0, 1)

    assert arrivals.has(49, 0, 0)
    assert arrivals.has(47, 0, 0)
    assert not arrivals.has(10, 0, 0)
