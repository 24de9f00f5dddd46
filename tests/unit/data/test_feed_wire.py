"""Batches as the feed's messages: what comes out equals what went in, and a plain protobuf client reads the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hetero import batch as batches
from hetero._proto import feed_pb2 as pb
from hetero.data import feed_wire as wire
from hetero.errors import InputError

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.unicode_string_dtypes(max_len=5),
    hnp.byte_string_dtypes(max_len=5),
    hnp.array_dtypes(hnp.integer_dtypes(), max_size=3),
)
FIRST = wire.BatchId(1, 2, 3, 4)
IDS = st.builds(wire.BatchId, *(st.integers(0, 2**40) for _ in range(4)))


@st.composite
def structures(draw):
    """Nested arrays that agree in rows."""
    rows = draw(st.integers(0, 4))
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3).map(lambda shape: (rows, *shape))
    texts = st.one_of(st.text(), st.binary(), st.none())
    arrays = st.one_of(hnp.arrays(DTYPES, shapes), hnp.arrays(object, shapes, elements=texts))
    return draw(
        st.recursive(
            arrays,
            lambda inner: st.one_of(
                st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
                st.lists(inner, min_size=1, max_size=3),
                st.tuples(inner, inner),
            ),
            max_leaves=5,
        )
    )


def sent(structure, batch=FIRST):
    encoded = wire.encode(structure)
    payload = memoryview(b"".join(encoded.buffers))
    assert payload.nbytes == encoded.size
    return list(wire.messages(batch, encoded.rows, encoded.layout, payload))


def received(messages):
    reader = wire.ReplyReader()
    found = [arrived for arrived in map(reader.read, messages) if arrived is not None]
    assert len(found) == 1
    return found[0]


def assert_same(left, right):
    left_leaves, left_tree = batches.flatten(left)
    right_leaves, right_tree = batches.flatten(right)
    assert left_tree == right_tree
    for a, b in zip(left_leaves, right_leaves, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tolist() == b.tolist() or a.tobytes() == b.tobytes()


@settings(max_examples=200, deadline=None)
@given(structures(), IDS, st.sampled_from([1, 7, 64, 1 << 20]))
def test_what_arrives_is_what_was_sent_however_it_is_cut(structure, batch, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK_BYTES", chunk)
        arrived = received(sent(structure, batch))

    assert arrived.batch == batch
    assert arrived.rows == batches.rows(structure)
    assert_same(structure, arrived.data)


@settings(max_examples=50, deadline=None)
@given(structures())
def test_a_client_generated_from_the_proto_reads_the_same(structure):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK_BYTES", 100)
        replies = [pb.ReadReply.FromString(message) for message in sent(structure)]

    header, payload = replies[0].batch, b"".join(reply.data for reply in replies)
    assert (header.epoch, header.split, header.sequence, header.attempt) == (1, 2, 3, 4)
    assert header.rows == batches.rows(structure)
    assert header.bytes == len(payload)
    leaves, tree = batches.flatten(structure)
    assert [array.path for array in header.layout.arrays] == batches.leaf_paths(tree)
    assert json.loads(header.layout.tree) == json.loads(json.dumps(batches.tree_to_json(tree)))
    for leaf, array in zip(leaves, header.layout.arrays, strict=True):
        assert tuple(array.shape) == leaf.shape
        assert array.offset % 64 == 0
        if leaf.dtype.kind not in "OV":
            assert np.dtype(array.dtype) == leaf.dtype
            assert payload[array.offset : array.offset + array.bytes] == leaf.tobytes()


def test_replies_without_payload_arrive_as_they_are():
    reader = wire.ReplyReader()

    assert reader.read(wire.reply(welcome=pb.Welcome(feed_id="f"))).feed_id == "f"
    assert reader.read(wire.reply(split_end=pb.SplitEnd(epoch=1, split=2, attempt=3, batches=4))).batches == 4
    assert reader.read(wire.reply(epoch_end=pb.EpochEnd(epoch=5))).epoch == 5


def test_a_batch_in_one_message_is_not_copied_and_lies_aligned():
    (message,) = sent({"a": np.arange(1000, dtype=np.float64)})

    array = received([message]).data["a"]

    assert np.shares_memory(array, np.frombuffer(message, dtype=np.uint8))
    assert array.flags.aligned


def test_a_large_batch_is_cut_and_arrives_writable():
    pictures = np.arange(3 * wire.CHUNK_BYTES // 4, dtype=np.float32).reshape(3, -1)

    messages = sent(pictures)

    assert len(messages) == 3
    assert all(len(message) <= wire.CHUNK_BYTES + 200 for message in messages)
    arrived = received(messages).data
    arrived[0, 0] = 7
    assert arrived[0, 1:5].tolist() == [1, 2, 3, 4]


def test_batches_that_disagree_in_rows_are_refused_with_their_paths():
    with pytest.raises(InputError, match=r"batch\['b'\] has 2 rows but batch\['a'\] has 3"):
        wire.encode({"a": np.zeros(3), "b": np.zeros(2)})


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400))
def test_garbage_is_refused_and_never_taken_for_a_batch(garbage, cut):
    (message,) = sent({"a": np.arange(20)})
    for broken in (garbage, message[: min(cut, len(message) - 1)] + garbage):
        try:
            result = wire.ReplyReader().read(broken)
        except ValueError:
            continue
        assert not isinstance(result, wire.Arrived) or result.data is not None


def test_payload_without_a_header_and_a_batch_within_a_batch_are_refused():
    messages = sent(np.zeros(1 << 19))
    with pytest.raises(ValueError, match="belongs to no batch"):
        wire.ReplyReader().read(messages[1])
    reader = wire.ReplyReader()
    reader.read(messages[0])
    with pytest.raises(ValueError, match="before the last one was complete"):
        reader.read(messages[0])
