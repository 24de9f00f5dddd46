"""A job of the tests without a line of TensorFlow: `inputs` is a generator of ragged batches of numpy arrays."""

import numpy as np

import hetero

job = hetero.Job("generator", batch_size=4, pieces=7)


@job.splits
def splits(ctx):
    return list(range(ctx.params["pieces"]))


@job.inputs
def inputs(ctx):
    for split in ctx.splits:
        rows = np.arange(split * 10, split * 10 + 5)
        yield {"row": rows, "name": np.array([f"row {row}" for row in rows])}


@job.train
def train(ctx):
    # Every other epoch as a tf.data.Dataset: the same rows, whichever way they are read.
    for epoch in ctx.epochs():
        seen = []
        for batch in ctx.dataset(epoch).as_numpy_iterator() if epoch % 2 else ctx.batches(epoch):
            seen += batch["row"].tolist()
            assert [
                bytes(str(name, "utf-8") if isinstance(name, bytes) else name, "utf-8") for name in batch["name"]
            ] == [f"row {row}".encode() for row in batch["row"]]
        ctx.log(**{f"rows_{epoch}": seen})
