"""A job whose epochs are cases: what epoch N gives is CASES[N % len(CASES)]. Every engine can run it."""

from typing import Any, NamedTuple

import tensorflow as tf

import hetero

CASES = ("rows", "rows", "structures", "ragged", "empty", "few", "raises")
SPLITS = [[0, 13], [13, 30], [30, 30], [30, 31], [31, 64], [64, 70], [70, 101], [101, 103]]
ROWS = SPLITS[-1][1]
FEW = 6
RAW = 5  # rows of a raw batch; no split but one is a multiple of it
MISSING = "/nowhere/shard.tfrecord"

job = hetero.Job("cases")


class Pair(NamedTuple):
    left: Any
    right: Any


@job.splits
def splits(_ctx):
    return SPLITS


def structure(row):
    """Return a row as a nest of many types."""
    number = tf.cast(row, tf.float32)
    return {
        "row": row,
        "pair": Pair(tf.fill([2, 3], number), (tf.cast(row, tf.uint8), row % 2 == 0)),
        "deep": {
            "text": tf.strings.join(["row ", tf.strings.as_string(row)]),
            "words": tf.fill([2], tf.strings.as_string(row)),
            "half": tf.cast(number / 2, tf.float16),
            "brain": tf.cast(number, tf.bfloat16),
            "nothing": tf.zeros([0, 4], tf.int32),
        },
    }


@job.inputs
def inputs(ctx):
    bounds = tf.data.Dataset.from_tensor_slices(tf.constant(ctx.splits, tf.int64))
    rows = bounds.flat_map(lambda bound: tf.data.Dataset.range(bound[0], bound[1]))
    case = CASES[ctx.epoch % len(CASES)]
    if case == "structures":
        return rows.map(structure).batch(RAW)
    if case == "empty":
        return rows.filter(lambda row: row < 0).batch(RAW)
    if case == "few":
        return rows.filter(lambda row: row < FEW).batch(RAW)
    if case == "ragged":  # each raw batch is regular, but not like the one before
        return rows.batch(1).map(lambda row: {"row": row, "x": tf.zeros([1, row[0] % 2 + 1])})
    if case == "raises":
        return rows.batch(RAW).map(lambda row: (row, tf.repeat(tf.io.read_file(MISSING), tf.size(row))))
    # Raw batches of their own within each split, so that short ones are in the middle of the stream.
    return bounds.flat_map(lambda bound: tf.data.Dataset.range(bound[0], bound[1]).batch(RAW)).map(
        lambda row: {"row": row, "twice": 2 * row}
    )


@job.train
def train(_ctx):
    raise AssertionError("these tests read the streams themselves")
