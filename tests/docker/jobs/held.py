"""A job of the tests in containers: it trains to a step, and goes on when it is told to. Imports no TensorFlow.

Options: hold_step (step of rank 0 at which it waits for a file `go` in its run folder; 0: it does not wait), pieces
(splits), rows (of a split), fails (training raises at its end), deaf (ranks take no notice of SIGTERM).
"""

import signal
import time

import numpy as np

import hetero

job = hetero.Job(
    "held", engine="grpc", framework="torch", batch_size=4, pieces=10, rows=40, hold_step=0, fails=False, deaf=False
)


@job.splits
def splits(ctx):
    return list(range(ctx.params["pieces"]))


@job.inputs
def inputs(ctx):
    for split in ctx.splits:
        first = split * ctx.params["rows"]
        for row in range(first, first + ctx.params["rows"], ctx.batch_size):
            yield {"row": np.arange(row, row + ctx.batch_size)}


@job.train
def train(ctx):
    if ctx.params["deaf"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    steps, total = 0, 0
    for epoch in ctx.epochs():
        for batch in ctx.batches(epoch):
            steps, total = steps + 1, total + int(batch["row"].sum())
            if ctx.rank == 0 and steps == ctx.params["hold_step"]:
                print("the job holds", flush=True)
                while not (ctx.run_dir / "go").exists():
                    time.sleep(0.05)
    if ctx.params["fails"]:
        raise ValueError("training has failed on purpose")
    if ctx.rank == 0:
        ctx.log(sum_of_rows=total)
