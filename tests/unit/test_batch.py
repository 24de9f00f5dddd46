"""Nested arrays: rows, cuts and the wire."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hetero import batch as batches
from hetero.errors import InputError


class Pair(NamedTuple):
    left: object
    right: object


DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.unicode_string_dtypes(max_len=5),
    hnp.byte_string_dtypes(max_len=5),
)
OBJECTS = hnp.arrays(
    object,
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
    elements=st.one_of(st.text(), st.binary(), st.none()),
)
ARRAYS = st.one_of(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)), OBJECTS)
STRUCTURES = st.recursive(
    st.one_of(ARRAYS, st.none()),
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(-5, 5)), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def assert_same(left, right):
    left_leaves, left_tree = batches.flatten(left)
    right_leaves, right_tree = batches.flatten(right)
    assert left_tree == right_tree
    for a, b in zip(left_leaves, right_leaves, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tolist() == b.tolist() or a.tobytes() == b.tobytes()


def round_trip(structure):
    header, buffers = batches.encode(structure)
    joined = bytearray(b"".join(buffers))
    assert batches.encoded_bytes(header) == len(joined)
    return batches.decode(header, joined)


@settings(max_examples=150, deadline=None)
@given(STRUCTURES)
def test_encode_and_decode_give_the_same_structure(structure):
    assert_same(structure, round_trip(structure))


def test_named_tuples_and_lists_keep_their_types():
    decoded = round_trip(Pair([np.arange(3)], {"a": (np.zeros(2), None)}))

    assert isinstance(decoded, Pair)
    assert isinstance(decoded.left, list)
    assert decoded.right["a"][1] is None


def test_named_tuple_unknown_to_the_receiver_gets_a_stand_in():
    header, buffers = batches.encode(Pair(np.arange(2), np.arange(2)))
    content = json.loads(header)
    content["tree"][1][0] = "a_module_that_is_not_loaded"

    decoded = batches.decode(json.dumps(content).encode(), b"".join(buffers))

    assert type(decoded).__name__ == "Pair"
    assert decoded.right.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes_survive(name):
    import ml_dtypes

    array = np.arange(6, dtype=np.float32).astype(getattr(ml_dtypes, name)).reshape(2, 3)

    decoded = round_trip({"x": array})["x"]

    assert decoded.dtype == array.dtype
    assert decoded.astype(np.float32).tolist() == array.astype(np.float32).tolist()


def test_structured_and_big_endian_arrays_survive():
    records = np.array([(1, 2.5, b"ab")], dtype=[("a", "<i4"), ("b", ">f8"), ("c", "S2")])

    assert_same([records, np.arange(3, dtype=">i2")], round_trip([records, np.arange(3, dtype=">i2")]))


def test_read_only_and_strided_arrays_survive():
    frozen = np.arange(6)
    frozen.flags.writeable = False

    assert_same([frozen, np.arange(12).reshape(3, 4).T[::2]], round_trip([frozen, np.arange(12).reshape(3, 4).T[::2]]))


def test_contiguous_arrays_are_sent_and_received_without_a_copy():
    array = np.arange(1000, dtype=np.float32)
    header, buffers = batches.encode({"x": array})
    received = np.frombuffer(bytearray(b"".join(buffers)), dtype=np.uint8)

    decoded = batches.decode(header, received)["x"]

    assert np.shares_memory(np.frombuffer(buffers[0], dtype=np.uint8), array)
    assert np.shares_memory(decoded, received)
    assert decoded.flags.writeable


def test_bytes_with_trailing_zeros_survive():
    decoded = round_trip({"key": np.array([b"a\0", "ü", None], dtype=object), "one": b"b\0"})

    assert decoded["key"].tolist() == [b"a\0", "ü", None]
    assert decoded["one"][()] == b"b\0"


def test_arrays_of_other_objects_are_refused_with_their_path():
    with pytest.raises(InputError, match=r"batch\['a'\]\[0\].*Fraction|batch\['a'\]\[0\].*complex"):
        batches.encode({"a": [np.array([1j, "x"], dtype=object)]})


def test_rows_are_counted():
    assert batches.rows({"x": np.zeros((5, 2)), "y": (np.zeros(5), np.array([b"a"] * 5, dtype=object))}) == 5
    assert batches.rows([np.zeros((0, 3))]) == 0


def test_disagreeing_components_are_named():
    with pytest.raises(InputError, match=r"batch\['y'\]\[1\] has 4 rows but batch\['x'\] has 5"):
        batches.rows({"x": np.zeros(5), "y": [np.zeros(5), np.zeros(4)]})


def test_unbatched_components_are_named():
    with pytest.raises(InputError, match=r"batch\.right has no rows.*dataset\.batch"):
        batches.rows(Pair(np.zeros(5), 3))


def test_a_batch_without_arrays_is_refused():
    with pytest.raises(InputError, match="no array at all"):
        batches.rows({})


def test_things_that_are_no_arrays_are_named():
    with pytest.raises(InputError, match=r"batch\['a'\] is a set"):
        batches.flatten({"a": {1, 2}})
    with pytest.raises(InputError, match=r"batch has the keys"):
        batches.flatten({1.5: np.zeros(1)})


def test_sparse_tensors_are_refused_with_advice():
    class SparseTensorValue(NamedTuple):
        indices: object
        values: object
        dense_shape: object

    sparse = SparseTensorValue(np.zeros((1, 2)), np.zeros(1), np.ones(2))

    with pytest.raises(InputError, match=r"batch\['a'\] is a SparseTensorValue.*to_dense"):
        batches.flatten({"a": sparse})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_concat_undoes_slices(cuts):
    total = sum(cuts)
    whole = {"x": np.arange(total * 2).reshape(total, 2), "s": np.array([str(i) for i in range(total)], dtype=object)}
    ends = np.cumsum(cuts).tolist()

    parts = [batches.slice_rows(whole, end - count, end) for count, end in zip(cuts, ends, strict=True)]

    assert_same(batches.concat_rows(parts), whole)


def test_concat_names_what_differs():
    with pytest.raises(InputError, match=r"batch\['x'\] has rows of shape \(2,\) in one batch and \(3,\)"):
        batches.concat_rows([{"x": np.zeros((1, 2))}, {"x": np.zeros((1, 3))}])
    with pytest.raises(InputError, match=r"batch\['x'\] is float64 in one batch and int64"):
        batches.concat_rows([{"x": np.zeros(1)}, {"x": np.zeros(1, dtype=np.int64)}])
    with pytest.raises(InputError, match=r"batch\['y'\] is in one and missing"):
        batches.concat_rows([{"x": np.zeros(1), "y": np.zeros(1)}, {"x": np.zeros(1)}])
    with pytest.raises(InputError, match=r"batch\['x'\] is an array in one and a tuple"):
        batches.concat_rows([{"x": np.zeros(1)}, {"x": (np.zeros(1),)}])


def test_text_of_different_widths_is_one_type():
    assert batches.concat_rows([np.array(["a"]), np.array(["long"])]).tolist() == ["a", "long"]


def test_torch_bfloat16_is_read_through_its_bits(monkeypatch):
    """Stands in for PyTorch, which the project does not install; the calls are those of torch.Tensor."""

    class Tensor:
        __module__ = "torch"
        dtype = "torch.bfloat16"

        def __init__(self, array):
            self.array = array

        def detach(self):
            return self

        cpu = contiguous = detach

        def view(self, dtype):
            assert dtype == "int16"
            return self

        def numpy(self):
            return self.array

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(int16="int16"))

    leaves, _ = batches.flatten(Tensor(np.array([0x3F80, 0x4000], dtype=np.int16)))

    assert leaves[0].dtype.name == "bfloat16"
    assert leaves[0].astype(np.float32).tolist() == [1.0, 2.0]


def test_no_framework_is_imported():
    code = "import sys, hetero.batch; assert not {'tensorflow', 'torch', 'ml_dtypes', 'grpc'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
