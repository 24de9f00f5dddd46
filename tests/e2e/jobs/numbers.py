"""A job of the tests for the grpc engine: rows that are only numbers, prepared by plain Python, slowly if asked to.

Options: rows (a split), pieces (splits), rows_per_batch (of what `inputs` gives), prepare_s (time that a batch takes to
prepare), step_s (time that a step takes), bad_piece (its inputs raise after two batches), deadly_piece (its inputs kill
their worker), bad_splits (listing the splits raises), fail_epoch, fail_step and fail_length (training raises there, and
how much the error has to say), size (float32 values a row carries), track (each row tells which worker prepared it).
"""

import json
import os
import signal
import time

import numpy as np

import hetero

job = hetero.Job(
    "numbers",
    engine="grpc",
    framework="torch",  # its ranks load neither TensorFlow nor Horovod's library
    batch_size=8,
    rows=50,
    pieces=8,
    rows_per_batch=8,
    prepare_s=0.0,
    step_s=0.0,
    bad_piece=-1,
    deadly_piece=-1,
    bad_splits=False,
    fail_epoch=-1,
    fail_step=-1,
    fail_length=0,
    size=16,
    track=True,
)


@job.splits
def splits(ctx):
    if ctx.params["bad_splits"]:
        raise ValueError("cannot list the pieces")
    return list(range(ctx.params["pieces"]))


@job.inputs
def inputs(ctx):
    rows, size = ctx.params["rows"], ctx.params["rows_per_batch"]
    for piece in ctx.splits:
        random = np.random.default_rng(ctx.seed_for(piece))
        for number, start in enumerate(range(piece * rows, (piece + 1) * rows, size)):
            if number == 2 and piece == ctx.params["bad_piece"]:
                raise ValueError(f"cannot read piece {piece}")
            if number == 2 and piece == ctx.params["deadly_piece"]:
                os.kill(os.getpid(), signal.SIGKILL)
            row = np.arange(start, min(start + size, (piece + 1) * rows))
            picture = np.repeat(row.astype(np.float32)[:, None], ctx.params["size"], axis=1)
            time.sleep(ctx.params["prepare_s"])
            worker = np.full(len(row), os.getpid() if ctx.params["track"] else 0)
            yield {"row": row, "picture": picture, "noise": random.integers(0, 1000, len(row)), "worker": worker}


@job.train
def train(ctx):
    steps = 0
    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for batch, mask in ctx.batches(epoch, with_mask=True):
                assert batch["picture"].shape == (ctx.batch_size, ctx.params["size"])
                assert (batch["picture"] == batch["row"][:, None]).all()
                line = {
                    "epoch": epoch,
                    "rows": batch["row"][mask].tolist(),
                    "padded": int((~mask).sum()),
                    "workers": sorted(set(batch["worker"].tolist())),
                    "noise": batch["noise"].tolist(),
                }
                seen.write(json.dumps(line) + "\n")
                seen.flush()
                if (epoch, steps) == (ctx.params["fail_epoch"], ctx.params["fail_step"]) and ctx.is_chief:
                    raise ValueError("the loss is not a number " + "!" * ctx.params["fail_length"])
                time.sleep(ctx.params["step_s"])
                steps += 1
    if ctx.is_chief:
        ctx.model_dir.mkdir(parents=True, exist_ok=True)
        (ctx.model_dir / "model.json").write_text(json.dumps({"params": dict(ctx.params), "steps": steps}))
