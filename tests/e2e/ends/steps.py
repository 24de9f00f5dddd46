"""The job of most cells: the grpc engine, ranks without TensorFlow, a few steps a second, and mishaps on demand.

A rank whose run folder gets a file `raise` raises; one that finds `eat` allocates memory until something stops it. Each
step is noted with the times of both clocks, each row carries the wall clock of the worker that prepared it.

Options: rows (a split), pieces (splits), prepare_s (time that a batch takes to prepare), step_s (time a step takes).
"""

import json
import time

import numpy as np

import hetero

CHUNK_BYTES = 8 * 2**20

job = hetero.Job("steps", engine="grpc", framework="torch", batch_size=8, rows=80, pieces=10, prepare_s=0.1, step_s=0.1)


def eat():
    """Allocate and touch memory, for ever."""
    eaten = []
    while True:
        eaten.append(np.ones(CHUNK_BYTES, np.uint8))
        time.sleep(0.005)


def suffer(folder):
    """Do what the rank's folder asks for."""
    if (folder / "raise").exists():
        raise ValueError("the loss is not a number")
    if (folder / "eat").exists():
        eat()


@job.splits
def splits(ctx):
    return list(range(ctx.params["pieces"]))


@job.inputs
def inputs(ctx):
    rows, size = ctx.params["rows"], ctx.batch_size
    for piece in ctx.splits:
        for start in range(piece * rows, (piece + 1) * rows, size):
            row = np.arange(start, min(start + size, (piece + 1) * rows))
            time.sleep(ctx.params["prepare_s"])
            yield {"row": row, "wall_s": np.full(len(row), time.time())}


@job.train
def train(ctx):
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
                suffer(ctx.run_dir)
                time.sleep(ctx.params["step_s"])
