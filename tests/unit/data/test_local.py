"""The local engine over what `inputs` may return."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hetero.data.local import LocalSource, local_opener
from hetero.errors import InputError


def test_iterables_and_generators_give_their_batches():
    assert list(LocalSource([1, 2])) == [1, 2]
    assert list(local_opener(lambda epoch: (epoch + i for i in range(2)))(5)) == [5, 6]


def test_datasets_are_read_as_numpy():
    class FakeDataset:
        def __iter__(self):
            raise AssertionError

        def as_numpy_iterator(self):
            return iter([np.zeros(2)])

    assert len(list(LocalSource(FakeDataset()))) == 1


@pytest.mark.parametrize("wrong", [None, 5, "path", {"x": np.zeros(2)}])
def test_anything_else_is_refused_with_advice(wrong):
    with pytest.raises(InputError, match=rf"returned a {type(wrong).__name__}.*tf\.data\.Dataset"):
        LocalSource(wrong)


def test_close_runs_the_finally_of_a_generator_once():
    ended = []

    def inputs():
        try:
            yield 1
        finally:
            ended.append(True)

    source = LocalSource(inputs())
    next(iter(source))
    source.close()
    source.close()

    assert ended == [True]


def test_close_from_another_thread_does_not_raise_while_the_generator_runs():
    running, release = threading.Event(), threading.Event()

    def inputs():
        running.set()
        release.wait(10)
        yield 1

    source = LocalSource(inputs())
    reader = threading.Thread(target=lambda: list(source))
    reader.start()
    assert running.wait(10)
    source.close()
    release.set()
    reader.join(10)

    assert not reader.is_alive()
    assert not source.is_stuck(ended_elsewhere=True)
