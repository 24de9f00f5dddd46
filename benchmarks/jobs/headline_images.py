"""headline.py's job: small pictures, prepared at a price. The accelerator is `--device-step-ms`; training does nothing.

A picture is enlarged to 56 x 56, dilated, blurred by a Gaussian of 11 x 11, turned and zoomed at random: about 0.7
ms of a CPU. `graph` does that in TensorFlow, for `tf_data`; `python` with SciPy, for `grpc`. Both run as `local` too.

Channel `training` has files of records that `headline_data.py` wrote. They are read over and over, so that an epoch is
longer than any run; in each pass the pictures are turned and zoomed otherwise. Ends when `enough` is in the run folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import hetero

ROWS_AN_EPOCH = 1_000_000
ROW_BYTES, LABEL_BYTES, SIDE = 4, 1, 28
RECORD_BYTES = ROW_BYTES + LABEL_BYTES + SIDE * SIDE
LARGE, BLUR_SIDE, BLUR_SIGMA = 56, 11, 2.0
MOST_TURN, MOST_ZOOM = math.radians(15), 0.15

graph = hetero.Job("headline-graph", engine="tf_data", framework="torch", batch_size=128, epochs=1)
python = hetero.Job("headline-python", engine="grpc", framework="torch", batch_size=128, epochs=1)


def blur() -> npt.NDArray[np.float32]:
    """Return the Gaussian, float32 (11, 11)."""
    one = np.exp(-((np.arange(BLUR_SIDE) - BLUR_SIDE // 2) ** 2) / (2 * BLUR_SIGMA**2))
    both = np.outer(one, one)
    return np.asarray(both / both.sum(), np.float32)


@graph.splits
@python.splits
def splits(ctx: hetero.InputContext) -> list[list[Any]]:
    """Return the files again and again, each with the number of the pass."""
    files = [Path(file) for file in ctx.channel_files("training")]
    rows = sum(file.stat().st_size for file in files) // RECORD_BYTES
    return [[number, str(file)] for number in range(math.ceil(ROWS_AN_EPOCH / rows)) for file in files]


@python.inputs
def python_inputs(ctx: hetero.InputContext) -> Iterator[dict[str, Any]]:
    """Yield batches made with SciPy."""
    for number, file in ctx.splits:
        random = np.random.default_rng(ctx.seed_for([number, file]))
        records = np.fromfile(file, np.uint8).reshape(-1, RECORD_BYTES)
        for first in range(0, len(records), ctx.batch_size):
            some = records[first : first + ctx.batch_size]
            pictures = some[:, ROW_BYTES + LABEL_BYTES :].reshape(-1, SIDE, SIDE)
            yield {
                "picture": np.stack([augmented(picture, random) for picture in pictures]),
                "label": some[:, ROW_BYTES].astype(np.int64),
            }


def augmented(picture: npt.NDArray[np.uint8], random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return a picture, uint8 (28, 28), as the job trains on it, float32 (56, 56)."""
    from scipy import ndimage

    large = picture.repeat(LARGE // SIDE, axis=0).repeat(LARGE // SIDE, axis=1).astype(np.float32) / 255
    blurred = ndimage.convolve(ndimage.grey_dilation(large, size=(3, 3)), BLUR, mode="constant")
    turn, zoom = random.uniform(-MOST_TURN, MOST_TURN), 1 + random.uniform(-MOST_ZOOM, MOST_ZOOM)
    turned = ndimage.rotate(blurred, math.degrees(turn), reshape=False, order=1)
    middle = (LARGE - 1) / 2
    zoomed = ndimage.affine_transform(turned, np.array([zoom, zoom]), offset=middle - zoom * middle, order=1)
    return np.asarray(zoomed, np.float32)


@graph.inputs
def graph_inputs(ctx: hetero.InputContext) -> Any:
    """Return batches made with TensorFlow's operations."""
    import tensorflow as tf

    kernel = tf.constant(BLUR[:, :, None, None])

    def transformed(picture: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        middle = (LARGE - 1) / 2  # which stays where it is
        numbers = [a, b, middle - (a + b) * middle, c, d, middle - (c + d) * middle, 0.0, 0.0]
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=picture,
            transforms=tf.stack(numbers)[None],
            output_shape=[LARGE, LARGE],
            fill_value=0.0,
            interpolation="BILINEAR",
            fill_mode="CONSTANT",
        )

    def prepared(number: Any, record: Any) -> Any:
        row = tf.io.decode_raw(tf.strings.substr(record, 0, ROW_BYTES), tf.int32)[0]
        values = tf.io.decode_raw(tf.strings.substr(record, ROW_BYTES, -1), tf.uint8)
        picture = tf.reshape(tf.cast(values[LABEL_BYTES:], tf.float32) / 255, [1, SIDE, SIDE, 1])
        large = tf.repeat(tf.repeat(picture, LARGE // SIDE, axis=1), LARGE // SIDE, axis=2)
        dilated = tf.nn.dilation2d(large, tf.zeros([3, 3, 1]), [1] * 4, "SAME", "NHWC", [1] * 4)
        blurred = tf.nn.depthwise_conv2d(dilated, kernel, [1] * 4, "SAME")
        random = tf.random.stateless_uniform([2], [row + number * ROWS_AN_EPOCH, ctx.seed], minval=-1.0)
        turn, zoom = random[0] * MOST_TURN, 1 + random[1] * MOST_ZOOM
        turned = transformed(blurred, tf.cos(turn), -tf.sin(turn), tf.sin(turn), tf.cos(turn))
        zoomed = transformed(turned, zoom, 0.0, 0.0, zoom)
        return {"picture": zoomed[0, :, :, 0], "label": tf.cast(values[0], tf.int64)}

    def records(number: Any, file: Any) -> Any:
        rows = tf.data.FixedLengthRecordDataset(file, RECORD_BYTES)
        return rows.map(lambda record: (number, record))

    numbers, files = zip(*ctx.splits, strict=True)
    sources = tf.data.Dataset.from_tensor_slices((tf.constant(numbers, tf.int32), tf.constant(files)))
    rows = sources.flat_map(records).map(prepared, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return rows.batch(ctx.batch_size)


@graph.train
@python.train
def train(ctx: hetero.TrainContext) -> None:
    """Take batches, and note when each came, until there are enough."""
    assert ctx.run_dir is not None
    enough = ctx.run_dir / "enough"
    for epoch in ctx.epochs():
        for _ in ctx.batches(epoch):
            ctx.log(at_s=time.monotonic())
            if enough.exists():
                return


BLUR = blur()
