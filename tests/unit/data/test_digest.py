"""The digest of what training was given: the same on every machine, another for every difference."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from hetero.data.epoch import InputStream
from hetero.data.local import local_opener
from hetero.errors import InputError

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024


def digest(*raws, batch_size=2, epochs=1, **options):
    stream = InputStream(local_opener(lambda _: list(raws)), batch_size, digest=True, **options)
    for epoch in range(epochs):
        for _ in stream.batches(epoch):
            pass
    stream.close()
    return stream.digest


def sample():
    return {
        "x": np.arange(8, dtype=np.float32).reshape(4, 2),
        "text": np.array(["a", b"a", None, ""], dtype=object),
        "name": np.array(["one", "two", "three", "four"]),
        "nested": (np.arange(4), [np.arange(4) > 1, None]),
    }


def test_it_is_known_beforehand():
    """Whoever changes what is hashed changes this: digests of older runs compare no longer."""
    assert digest(sample()) == "1154deded7469b58156b63119a0d9c623526837a832eb282a90b653903f177f8"


def test_it_does_not_depend_on_how_rows_reached_the_rank():
    whole = sample()
    pieces = [
        {
            "x": np.asfortranarray(whole["x"][rows]),
            "text": whole["text"][rows],
            "name": whole["name"][rows],
            "nested": (whole["nested"][0][rows], [whole["nested"][1][0][rows], None]),
        }
        for rows in (slice(0, 1), slice(1, 4))
    ]

    assert digest(*pieces) == digest(whole)


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.zeros((4, 1))},
        {"x": np.zeros(4, dtype=np.float32)},
        {"y": np.zeros(4)},
        [np.zeros(4)],
        (np.zeros(4),),
        np.zeros(4),
        {"x": np.array([0, 0, 0, 1.0])},
    ],
    ids=["shape", "dtype", "key", "list", "tuple", "bare", "content"],
)
def test_any_difference_shows(other):
    assert digest(other) != digest({"x": np.zeros(4)})


def test_text_and_bytes_and_where_one_ends_show():
    columns = [[b"ab", b"c"], [b"a", b"bc"], ["ab", "c"], [None, "abc"], ["", "abc"]]

    assert len({digest(np.array(column, dtype=object)) for column in columns}) == 5


def test_order_epochs_and_mask_show():
    one, two = np.zeros(2), np.ones(2)

    assert digest(one, two) != digest(two, one)
    assert digest(one, epochs=2) == digest(one, one) != digest(one)
    assert digest(np.zeros(3), remainder="pad") != digest(np.zeros(4), remainder="pad")


def test_named_tuples_count_by_name_and_fields_wherever_their_class_is():
    other_class = namedtuple("Pair", ["x", "y"], module="elsewhere")  # noqa: PYI024
    renamed = namedtuple("Pair", ["x", "z"])  # noqa: PYI024
    values = np.zeros(2), np.ones(2)

    assert digest(Pair(*values)) == digest(other_class(*values))
    assert digest(Pair(*values)) != digest(renamed(*values))
    assert digest(Pair(*values)) != digest(values)


def test_only_batches_that_were_handed_out_count_and_none_is_kept_unless_asked_for():
    stream = InputStream(local_opener(lambda _: [np.zeros(2)] * 9), 2, digest=True)
    next(stream.batches(0))
    stream.close()
    assert stream.digest == digest(np.zeros(2))

    stream = InputStream(local_opener(lambda _: [np.zeros(2)]), 2)
    list(stream.batches(0))
    stream.close()
    assert stream.digest is None


def test_python_objects_are_refused_by_path():
    with pytest.raises(InputError, match=r"batch\['x'\]"):
        digest({"x": np.array([{1}, {2}], dtype=object)})
