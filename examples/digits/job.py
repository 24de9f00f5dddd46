"""Handwritten digits: the job of `hetero demo`, and a tutorial.

Preparing a row costs about as much CPU as training on it, so data hosts can take half of the work off the trainers.

    hetero run --job examples/digits/job.py:job --data-hosts 2 --trainer-hosts 1 --ranks-per-host 2
"""

import keras
import numpy as np
import tensorflow as tf

import hetero
from hetero.inputs import digits, tfrecord
from hetero.training import evaluate, fit

# A job is a name and its own defaults, which flags override (`--epochs 3`). They are literals, because the launcher
# reads them without running this file: it never imports TensorFlow.
job = hetero.Job("digits", engine="tf_data", batch_size=64, epochs=12)

SIDE = 32  # pixels of the pictures the network sees; the digits come with 8
WIDTHS = 4  # every picture is drawn with four stroke widths, its channels
OFFSETS = np.hypot(*np.mgrid[-WIDTHS : WIDTHS + 1, -WIDTHS : WIDTHS + 1])  # distance from the centre, 9x9
PENS = np.where(OFFSETS[..., None] <= np.arange(1, WIDTHS + 1), 0, -9).astype("float32")  # discs with radius 1, 2, 3, 4
BELL = np.exp(-(np.arange(-5, 6) ** 2) / 2.0)
BLUR = np.tile(np.outer(BELL, BELL)[..., None, None] / BELL.sum() ** 2, (1, 1, WIDTHS, 1)).astype("float32")  # 11x11


# The pieces of the input that workers share out: here files, all of them on every call.
@job.splits
def splits(ctx):
    return ctx.channel_files("training") if "training" in ctx.channels else digits.files("train")


# One epoch's input, as batches. It runs on the data hosts; in a homogeneous job in the ranks. The rows are the same.
@job.inputs
def inputs(ctx):
    def augmented(record):
        row = tfrecord.parse(record, digits.SPEC)
        # Randomness depends on the epoch (in ctx.seed) and on the row, never on the worker that happens to prepare it.
        turn, size = tf.unstack(tf.random.stateless_uniform([2], [ctx.seed, row["row"]], -1.0, 1.0))
        return picture(row["image"], angle=0.3 * turn, zoom=1.0 + 0.15 * size), row["label"]

    rows = tfrecord.read(ctx.files).map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
    return rows.batch(ctx.batch_size).prefetch(2)


def picture(image, angle=0.0, zoom=1.0):
    """Draw uint8 (8, 8) as float32 (32, 32, 4): enlarged, in four stroke widths, turned, zoomed, blurred."""
    image = tf.image.resize(tf.cast(image, tf.float32)[None, :, :, None] / 16.0, [SIDE, SIDE])
    image = tf.tile(image, [1, 1, 1, WIDTHS])
    image = tf.nn.dilation2d(image, PENS, [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1])
    cos, sin, middle = tf.cos(angle) / zoom, tf.sin(angle) / zoom, (SIDE - 1) / 2
    about = [cos, -sin, middle * (1 - cos + sin), sin, cos, middle * (1 - sin - cos), 0.0, 0.0]
    image = tf.raw_ops.ImageProjectiveTransformV3(
        images=image, transforms=[about], output_shape=[SIDE, SIDE], fill_value=0.0, interpolation="BILINEAR"
    )
    return tf.nn.depthwise_conv2d(image, BLUR, [1, 1, 1, 1], "SAME")[0]


# Called once in every rank. `fit` is a loop to read in one go; your own loop over ctx.batches(epoch) does as well.
@job.train
def train(ctx):
    keras.utils.set_random_seed(ctx.seed)
    layers = [keras.Input((SIDE, SIDE, WIDTHS))]
    for channels in (32, 32, 64):
        layers += [keras.layers.Conv2D(channels, 3, padding="same", activation="relu"), keras.layers.MaxPool2D()]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit(ctx, model=model, loss=loss, optimizer=keras.optimizers.Adam(3e-3), metrics=["accuracy"], checkpoint=True)

    def plain(record):
        row = tfrecord.parse(record, digits.SPEC)
        return picture(row["image"]), row["label"]

    test = tfrecord.read(digits.files("test")).map(plain).batch(60)  # each rank takes every second batch of two
    scores = evaluate(ctx, model=model, data=test, metrics=["accuracy"], loss=loss)
    ctx.log(test_accuracy=scores["accuracy"])  # goes to metrics.jsonl and summary.json
