"""`ctx.dataset` is the stream of `ctx.batches` as a tf.data.Dataset: the same values, types and order, once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from hetero.errors import DataServiceLost, InputError
from hetero.job import TrainContext

ROWS = 2


class Labelled(NamedTuple):
    image: Any
    label: Any


class Feed:
    """Gives the batches it was made of, then raises what it was told to."""

    def __init__(self, *batches: Any, error: Exception | None = None) -> None:
        self._batches, self._error = batches, error
        self.given = 0

    def batches(self, _epoch: int) -> Iterator[Any]:
        for data in self._batches:
            self.given += 1
            yield SimpleNamespace(data=data, mask=np.array([True, False]), rows=ROWS)
        if self._error is not None:
            raise self._error

    def log(self, values: Any) -> None:
        raise AssertionError(f"nothing is logged here, but {values}")


def floats(first: int) -> np.ndarray[Any, Any]:
    return np.arange(first, first + ROWS * 3, dtype=np.float32).reshape(ROWS, 3)


def dataset(*batches: Any, with_mask: bool = False, error: Exception | None = None) -> Any:
    return TrainContext(feed=Feed(*batches, error=error)).dataset(4, with_mask=with_mask)


def same(mine: Any, theirs: Any) -> None:
    """Compare two nests of arrays, lists being read back as tuples and text as bytes."""
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            same(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        assert type(theirs) is (type(mine) if hasattr(mine, "_fields") else tuple)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
    elif mine.dtype.kind in "OSU":
        assert theirs.tolist() == [text.encode() if isinstance(text, str) else text for text in mine.tolist()]
    else:
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "make",
    [
        floats,
        lambda n: {"image": floats(n), "deep": {"label": np.array([n, n + 1])}},
        lambda n: (floats(n), np.array([n, 2], np.uint8)),
        lambda n: [floats(n), [np.array([True, False]), floats(n)]],
        lambda n: Labelled(floats(n), {"x": (np.array([n, 0], np.float64),)}),
        lambda n: {"bytes": np.array([b"a\0b", b"\xff"], object), "text": np.array(["é", str(n)])},
        lambda _n: np.array([b"fixed", b"width"]),
    ],
    ids=["array", "dict", "tuple", "list", "named tuple", "strings", "fixed width"],
)
def test_every_structure_comes_through_with_its_types(make: Any) -> None:
    batches = [make(number) for number in range(3)]
    read = list(dataset(*batches).as_numpy_iterator())
    assert len(read) == 3
    for mine, theirs in zip(batches, read, strict=True):
        same(mine, theirs)


def test_shapes_are_known_but_for_the_number_of_rows() -> None:
    spec = dataset({"image": floats(0), "name": np.array(["a", "b"])}).element_spec
    assert spec == {"image": tf.TensorSpec((None, 3), tf.float32), "name": tf.TensorSpec((None,), tf.string)}


def test_a_last_batch_with_fewer_rows_fits_in() -> None:
    read = list(dataset(floats(0), floats(0)[:1]).as_numpy_iterator())
    assert [batch.shape for batch in read] == [(2, 3), (1, 3)]


def test_the_mask_comes_beside_the_batch_if_asked_for() -> None:
    ((batch, mask),) = dataset(floats(0), with_mask=True).as_numpy_iterator()
    same(floats(0), batch)
    assert mask.tolist() == [True, False]


def test_it_can_be_iterated_once_and_a_second_time_is_an_error_and_no_empty_epoch() -> None:
    stream = dataset(floats(0), floats(6))
    assert len(list(stream)) == 2
    with pytest.raises(tf.errors.OpError, match=r"InputError: The stream of epoch 4 was read before"):
        list(stream)


def test_batches_are_taken_as_they_are_asked_for() -> None:
    feed = Feed(*(floats(number) for number in range(100)))
    iterator = iter(TrainContext(feed=feed).dataset(0))
    next(iterator)
    assert feed.given < 5
    del iterator


def test_what_ends_the_stream_comes_out_with_its_name_and_words() -> None:
    with pytest.raises(tf.errors.OpError, match="DataServiceLost: all data workers are gone"):
        list(dataset(floats(0), error=DataServiceLost("all data workers are gone")))


def test_before_the_first_batch_it_is_raised_as_it_is() -> None:
    with pytest.raises(DataServiceLost, match="gone"):
        dataset(error=DataServiceLost("gone"))


def test_an_epoch_without_a_batch_has_no_types_and_is_refused() -> None:
    with pytest.raises(InputError, match="Epoch 4 gave this rank no batch"):
        dataset()
