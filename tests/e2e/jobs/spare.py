"""Jobs of the tests for local workers: input that takes a while to prepare and tells who prepared it.

`slow` runs plain Python under grpc, `graph` a TensorFlow graph under tf_data. Options: rows (a split), pieces (splits),
prepare_s (time that a batch of `rows_per_batch` takes a worker, without using a CPU), burn_ms (CPU time that it takes
as well, about), step_s (time that a step takes), gate (a file: the first step waits for it), only_on (hosts whose name
begins so can read the splits), turns (a file: with it all workers together prepare one batch in prepare_s). Where
SPARE_BROKEN names a file that is there, data hosts cannot import this one.
"""

import fcntl
import json
import os
import time
from pathlib import Path

import numpy as np

import hetero

HOST = os.environ.get("HETERO_HOST", "")
if HOST.startswith("data") and Path(os.environ.get("SPARE_BROKEN", "/none")).exists():
    raise ImportError("no module of this name any more")

slow = hetero.Job(
    "slow",
    engine="grpc",
    framework="torch",  # its ranks load neither TensorFlow nor Horovod's library
    batch_size=10,
    rows=100,
    pieces=12,
    rows_per_batch=5,
    prepare_s=0.0,
    burn_ms=0,
    step_s=0.0,
    gate="",
    only_on="",
    turns="",
)
graph = hetero.Job(
    "graph",
    engine="tf_data",
    batch_size=10,
    rows=100,
    pieces=12,
    rows_per_batch=5,
    prepare_s=0.0,
    burn_ms=0,
    step_s=0.0,
    gate="",
)


@slow.splits
@graph.splits
def splits(ctx):
    return [[piece * ctx.params["rows"], (piece + 1) * ctx.params["rows"]] for piece in range(ctx.params["pieces"])]


@slow.inputs
def python_inputs(ctx):
    size = ctx.params["rows_per_batch"]
    if not HOST.startswith(ctx.params["only_on"]):
        raise FileNotFoundError(f"no such split here: {ctx.splits}")
    for first, end in ctx.splits:
        for start in range(first, end, size):
            if ctx.params["turns"]:
                wait_for_turn(Path(ctx.params["turns"]), ctx.params["prepare_s"])
            else:
                time.sleep(ctx.params["prepare_s"])
            burnt_s = time.thread_time() + ctx.params["burn_ms"] / 1000
            while time.thread_time() < burnt_s:
                pass
            row = np.arange(start, min(start + size, end))
            yield {"row": row, "worker": np.full(len(row), os.getpid())}


def wait_for_turn(path, turn_s):
    """Let one batch of all workers pass in each turn, however many workers there are."""
    with path.open("a+") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX)
        turns.seek(0)
        due_s = max(float(turns.read() or 0) + turn_s, time.time() - 2 * turn_s)  # late ones are made up for
        time.sleep(max(0.0, due_s - time.time()))
        turns.truncate(0)
        turns.write(str(due_s))


@graph.inputs
def tensorflow_inputs(ctx):
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    def with_worker(row):
        pid = tf.strings.split(tf.io.read_file("/proc/self/stat"))[0]  # of the process that runs the graph
        burnt = tf.fill((256, 256), 1.0 + tf.cast(row[0] % 2, tf.float32))  # nothing to be known beforehand
        for _ in range(ctx.params["burn_ms"]):  # each takes about a millisecond
            burnt = tf.matmul(burnt, burnt) / 512
        with tf.control_dependencies([tf.debugging.assert_non_negative(burnt)]):
            row = tf.identity(row)
        return {"row": row, "worker": tf.fill(tf.shape(row), tf.strings.to_number(pid, tf.int64))}

    bounds = tf.data.Dataset.from_tensor_slices(tf.constant(list(ctx.splits), tf.int64))
    rows = bounds.flat_map(lambda bound: tf.data.Dataset.range(bound[0], bound[1]))
    batches = rows.batch(ctx.params["rows_per_batch"]).map(with_worker)
    return batches.apply(sleep(int(1e6 * ctx.params["prepare_s"])))


@slow.train
@graph.train
def train(ctx):
    gate = ctx.params["gate"]
    while gate and not Path(gate).exists():
        time.sleep(0.02)
    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for batch, mask in ctx.batches(epoch, with_mask=True):
                line = {"epoch": epoch, "rows": batch["row"][mask].tolist()}
                line["workers"] = batch["worker"][mask].tolist()
                seen.write(json.dumps(line) + "\n")
                seen.flush()
                time.sleep(ctx.params["step_s"])
