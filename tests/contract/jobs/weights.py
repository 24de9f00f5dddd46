"""A job of the tests: trains a small network on rows that are the same in each run; every rank leaves its weights."""

from __future__ import annotations

import json
import os

import hetero

job = hetero.Job("weights", batch_size=16, epochs=2)


@job.splits
def splits(_ctx):
    return list(range(8))


@job.inputs
def inputs(ctx):
    import numpy as np

    for split in ctx.splits:
        random = np.random.default_rng(split)
        for _ in range(4):
            x = random.normal(size=(16, 8)).astype("float32")
            yield x, (x.sum(axis=1) > 0).astype("int64")


@job.train
def train(ctx):
    import keras

    from hetero.training import fit

    keras.utils.set_random_seed(ctx.rank)  # other weights on each rank, before they are given rank 0's
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit(ctx, model=model, loss=loss, optimizer=keras.optimizers.SGD(0.05), metrics=["accuracy"])
    facts = {
        "place": [ctx.rank, ctx.size, ctx.local_rank, ctx.local_size],
        "controller": os.environ["HOROVOD_CONTROLLER"],
        "weights": [weight.tolist() for weight in model.get_weights()],
    }
    (ctx.run_dir / f"weights-{ctx.rank}.json").write_text(json.dumps(facts))
