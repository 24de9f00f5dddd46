"""The job of the cells that need TensorFlow: the tf_data engine, an allreduce of Horovod in each step.

Options as those of steps.py; `python` puts a Python function into the graph, which the engine cannot run.
"""

import json
import time

import hetero

job = hetero.Job("graph_steps", engine="tf_data", batch_size=8, rows=80, pieces=10, step_s=0.1, python=False)


def halve_it_in_python(row):
    return row // 2


@job.splits
def splits(ctx):
    return [[piece * ctx.params["rows"], (piece + 1) * ctx.params["rows"]] for piece in range(ctx.params["pieces"])]


@job.inputs
def inputs(ctx):
    import tensorflow as tf

    bounds = tf.data.Dataset.from_tensor_slices([list(split) for split in ctx.splits])
    rows = bounds.flat_map(
        lambda bound: tf.data.Dataset.range(tf.cast(bound[0], tf.int64), tf.cast(bound[1], tf.int64))
    )
    if ctx.params["python"]:
        rows = rows.map(lambda row: tf.py_function(halve_it_in_python, [row], tf.int64))
    return rows.map(lambda row: {"row": row, "wall_s": tf.timestamp()}).batch(ctx.batch_size)


@job.train
def train(ctx):
    from hetero.training.horovod import barrier

    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for batch in ctx.batches(epoch):
                line = {
                    "epoch": epoch,
                    "rows": batch["row"].tolist(),
                    "at_s": time.monotonic(),
                    "wall_s": time.time(),
                    "workers_wall_s": float(batch["wall_s"][-1]),
                }
                seen.write(json.dumps(line) + "\n")
                seen.flush()
                barrier()
                time.sleep(ctx.params["step_s"])
