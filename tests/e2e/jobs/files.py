"""A job of the tests that reads files: each line of a file of channel `training` is a row, which is a number.

Options: graph (`inputs` gives a tf.data.Dataset; else it is a generator), prepare_s (time that a batch takes to
prepare), step_s (time that a step takes), splits ("files": the default list; "names": names instead of paths; "raise":
listing them fails where there are files), validation (`train` counts the lines of that channel, on its own host).
"""

import json
import time
from pathlib import Path

import numpy as np

import hetero

job = hetero.Job(
    "files",
    framework="torch",  # its ranks need no Horovod
    batch_size=5,
    graph=False,
    prepare_s=0.0,
    step_s=0.0,
    splits="files",
    validation=False,
)


@job.splits
def splits(ctx):
    if ctx.params["splits"] == "names":
        return sorted(path.name for path in Path(ctx.channel("training")).iterdir())
    files = ctx.channel_files("training")
    if ctx.params["splits"] == "raise":
        raise ValueError(f"cannot make splits of {len(files)} files")
    return files


def numbers(ctx, paths):
    for path in paths:
        rows = np.array([int(line) for line in (Path(ctx.channel("training")) / path).read_text().split()])
        for start in range(0, len(rows), ctx.batch_size):
            time.sleep(ctx.params["prepare_s"])
            yield {"row": rows[start : start + ctx.batch_size]}


@job.inputs
def inputs(ctx):
    if not ctx.params["graph"]:
        return numbers(ctx, ctx.files)
    import tensorflow as tf

    lines = tf.data.Dataset.from_tensor_slices(list(ctx.files)).flat_map(tf.data.TextLineDataset)
    return lines.map(lambda line: {"row": tf.strings.to_number(line, tf.int64)}).batch(ctx.batch_size)


@job.train
def train(ctx):
    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for batch, mask in ctx.batches(epoch, with_mask=True):
                seen.write(json.dumps({"epoch": epoch, "rows": batch["row"][mask].tolist()}) + "\n")
                seen.flush()
                time.sleep(ctx.params["step_s"])
    if ctx.params["validation"]:
        files = Path(ctx.channel("validation")).iterdir()
        ctx.log(validation=sum(len(path.read_text().split()) for path in files))
