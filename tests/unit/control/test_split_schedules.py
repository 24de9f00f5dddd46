"""Random histories of feeds, ranks and coordinators: every batch reaches exactly one rank, and every epoch ends."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from split_world import World

worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "ranks": st.integers(1, 3),
        "hosts": st.integers(1, 3),
        "workers": st.integers(1, 2),
        "splits": st.integers(0, 7),
        "epochs": st.integers(1, 3),
        "deterministic": st.booleans(),
        "sharded": st.booleans(),
    }
)


def all_batches(world: World) -> list[tuple[int, int, int]]:
    return [
        (epoch, split, sequence)
        for epoch in range(world.last + 1)
        for split, length in enumerate(world.lengths)
        for sequence in range(length)
    ]


@settings(max_examples=400, deadline=None)
@example(
    {"seed": 12538, "ranks": 2, "hosts": 2, "workers": 2, "splits": 6, "epochs": 3, "deterministic": True}, 491, 0.02
)  # a split was taken from a feed whose worker had ended it already, and no other one
@given(worlds, st.integers(0, 600), st.sampled_from([0.0, 0.02, 0.1, 0.3]))
def test_every_batch_arrives_exactly_once_and_every_epoch_ends(options, steps, fault_rate):
    world = World(**options)
    world.run(steps, fault_rate)
    if world.book.loss is None:
        assert sorted(world.accepted) == all_batches(world)
    else:
        assert world.book.loss.host in world.gone
        assert len(set(world.accepted)) == len(world.accepted)
