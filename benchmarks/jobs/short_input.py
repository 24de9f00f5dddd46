"""Jobs of local_workers.py and tuning.py: on a data host a batch takes a while and no CPU; on a trainer host it may.

`plain` runs Python under `grpc`, `graph` TensorFlow under `tf_data`. Options: batch_s (what a batch takes), seconds
(how long to train; 0 without end), steps (how many to take; 0 without end), work (of a step: rounds of a loop), burn
(of a batch on a trainer host: rounds of that loop). A file `enough` in the run folder ends them too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hetero

PIECES, BATCHES = 200, 50

plain = hetero.Job("plain", engine="grpc", framework="torch", batch_size=64, epochs=1, batch_s=0.05, seconds=0.0,
                   steps=0, work=0, burn=0)  # fmt: skip
graph = hetero.Job("graph", engine="tf_data", batch_size=64, epochs=1, batch_s=0.05, seconds=0.0, steps=0, work=0)


def spin(rounds: int) -> int:
    """Keep a CPU busy for a fixed amount of work, whatever time that takes."""
    total = 0
    for number in range(rounds):
        total += number & 7
    return total


@plain.splits
@graph.splits
def splits(_ctx: hetero.InputContext) -> list[int]:
    """Return the numbers of the splits: more than a run comes through."""
    return list(range(PIECES))


@plain.inputs
def python_inputs(ctx: hetero.InputContext) -> Iterator[Any]:
    """Yield batches of one column, each after a wait or a spin."""
    burn = ctx.params["burn"] if os.environ.get("HETERO_HOST", "").startswith("trainer") else 0
    for split in ctx.splits:
        for number in range(BATCHES):
            if burn:
                spin(burn)
            else:
                time.sleep(ctx.params["batch_s"])
            first = (split * BATCHES + number) * ctx.batch_size
            yield {"row": np.arange(first, first + ctx.batch_size)}


@graph.inputs
def tensorflow_inputs(ctx: hetero.InputContext) -> Any:
    """Return batches of one column, each after a wait."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    rows = BATCHES * ctx.batch_size
    firsts = tf.data.Dataset.from_tensor_slices(tf.constant([split * rows for split in ctx.splits], tf.int64))
    batches = firsts.flat_map(lambda first: tf.data.Dataset.range(first, first + rows).batch(ctx.batch_size))
    return batches.map(lambda row: {"row": row}).apply(sleep(int(1e6 * ctx.params["batch_s"])))


@plain.train
@graph.train
def train(ctx: hetero.TrainContext) -> None:
    """Take steps for so long, or so many."""
    end_s, enough = None, Path(ctx.run_dir or ".") / "enough"
    for step, _ in enumerate(ctx.batches(0), 1):
        end_s = end_s or time.monotonic() + (ctx.params["seconds"] or 1e9)
        spin(ctx.params["work"])
        if step == ctx.params["steps"] or time.monotonic() > end_s or enough.exists():
            return
