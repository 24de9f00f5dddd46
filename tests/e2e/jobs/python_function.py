"""A job of the tests that the tf_data engine cannot run: its graph calls Python."""

import hetero

job = hetero.Job("python_function", engine="tf_data")


def halve_it_in_python(row):
    return row / 2


@job.splits
def splits(_ctx):
    return [10]


@job.inputs
def inputs(ctx):
    import tensorflow as tf

    rows = tf.data.Dataset.range(ctx.splits[0])
    return rows.map(lambda row: tf.py_function(halve_it_in_python, [row], tf.float32)).batch(ctx.batch_size)


@job.train
def train(ctx):
    raise AssertionError(f"training began: {list(ctx.batches(0))}")
