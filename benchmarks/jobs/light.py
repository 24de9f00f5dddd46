"""A job that costs next to nothing, so that what is measured is hetero: numbers as input, and a pause as a step.

Options: rows (per split), pieces (number of splits), step_s (time that a step takes).
"""

from __future__ import annotations

import time
from typing import Any

import hetero

job = hetero.Job("light", engine="tf_data", batch_size=8, epochs=3, rows=40, pieces=8, step_s=0.01)


@job.splits
def splits(ctx: hetero.InputContext) -> list[list[int]]:
    """Return each split as its first row and the one after its last."""
    rows = ctx.params["rows"]
    return [[index * rows, (index + 1) * rows] for index in range(ctx.params["pieces"])]


@job.inputs
def inputs(ctx: hetero.InputContext) -> Any:
    """Return batches of row numbers."""
    import tensorflow as tf

    bounds = tf.data.Dataset.from_tensor_slices([list(split) for split in ctx.splits])
    rows = bounds.flat_map(
        lambda bound: tf.data.Dataset.range(tf.cast(bound[0], tf.int64), tf.cast(bound[1], tf.int64))
    )
    return rows.batch(ctx.batch_size)


@job.train
def train(ctx: hetero.TrainContext) -> None:
    """Take all steps, in step with the other ranks."""
    from hetero.training import horovod

    for epoch in ctx.epochs():
        for _ in ctx.batches(epoch):
            time.sleep(ctx.params["step_s"])
            if ctx.size > 1:
                horovod.barrier()
