"""A job of the tests for `fit` with a checkpoint: a small Keras model on rows that are only numbers.

Options: rows (of a split), pieces (splits), pause_s (in each step).
"""

import json
import time

import hetero

job = hetero.Job("fitted", batch_size=8, rows=40, pieces=8, pause_s=0.0)


@job.splits
def splits(ctx):
    return [piece * ctx.params["rows"] for piece in range(ctx.params["pieces"])]


@job.inputs
def inputs(ctx):
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices([int(split) for split in ctx.splits]).flat_map(
        lambda first: tf.data.Dataset.range(tf.cast(first, tf.int64), tf.cast(first, tf.int64) + ctx.params["rows"])
    )
    return rows.map(lambda row: (tf.fill([3], tf.cast(row, tf.float32) / 320.0), row % 2)).batch(ctx.batch_size)


class Seen:
    """The TrainContext, which writes down what was read."""

    def __init__(self, ctx):
        self._ctx, self._file = ctx, (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w")

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    def batches(self, epoch, *, with_mask=False):
        for batch, mask in self._ctx.batches(epoch, with_mask=True):
            rows = [round(float(row)) for row in batch[0][:, 0] * 320.0]
            self._file.write(json.dumps({"epoch": epoch, "rows": rows}) + "\n")
            self._file.flush()
            time.sleep(self._ctx.params["pause_s"])
            yield (batch, mask) if with_mask else batch


@job.train
def train(ctx):
    import keras

    from hetero.training import fit

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    history = fit(Seen(ctx), model=model, loss=loss, optimizer="adam", checkpoint=True)
    ctx.log(epochs_in_history=len(history["loss"]))
