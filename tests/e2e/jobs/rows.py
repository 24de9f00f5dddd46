"""A job of the tests: rows that are only numbers, and a train function that writes down which ones it saw.

Options: rows (per split), pieces (number of splits), step_s (time that a step takes), fail_epoch and fail_step (raise
there), exit_step (sys.exit(0) there), linger_rank (never ends), collective (allreduce in each step), hold_step (waits
there until the file "go" is in the run folder, so that a fault finds training).
"""

import json
import os
import sys
import time

import hetero

job = hetero.Job(
    "rows",
    batch_size=8,
    rows=50,
    pieces=8,
    step_s=0.0,
    fail_epoch=-1,
    fail_step=-1,
    exit_step=-1,
    collective=True,
    linger_rank=-1,
    vanish_step=-1,
    hold_step=-1,
)


def linger(path):
    """Make Horovod's shutdown, which a rank calls last, never return."""
    from hetero.training import horovod

    def shutdown():
        path.touch()
        time.sleep(1000)

    horovod.shutdown = shutdown


@job.splits
def splits(ctx):
    return [[index * ctx.params["rows"], (index + 1) * ctx.params["rows"]] for index in range(ctx.params["pieces"])]


@job.inputs
def inputs(ctx):
    import tensorflow as tf

    bounds = tf.data.Dataset.from_tensor_slices([list(split) for split in ctx.splits])
    rows = bounds.flat_map(
        lambda bound: tf.data.Dataset.range(tf.cast(bound[0], tf.int64), tf.cast(bound[1], tf.int64))
    )
    return rows.map(lambda row: {"row": row, "picture": tf.fill([16], tf.cast(row, tf.float32))}).batch(ctx.batch_size)


@job.train
def train(ctx):
    steps = 0
    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for step, (batch, mask) in enumerate(ctx.batches(epoch, with_mask=True)):
                assert batch["picture"].shape == (ctx.batch_size, 16)
                assert (batch["picture"][:, 0] == batch["row"]).all()
                line = {"epoch": epoch, "rows": batch["row"][mask].tolist(), "padded": int((~mask).sum())}
                seen.write(json.dumps(line) + "\n")
                seen.flush()
                if ctx.params["collective"]:
                    from hetero.training.horovod import barrier

                    barrier()
                if (epoch, step) == (ctx.params["fail_epoch"], ctx.params["fail_step"]) and ctx.is_chief:
                    raise ValueError("the loss is not a number")
                if step == ctx.params["vanish_step"]:
                    os._exit(0)
                if step == ctx.params["exit_step"]:
                    sys.exit(0)
                time.sleep(ctx.params["step_s"])
                while steps == ctx.params["hold_step"] and not (ctx.run_dir / "go").exists():
                    time.sleep(0.01)
                steps += 1
    if ctx.rank == ctx.params["linger_rank"]:
        linger(ctx.run_dir / "lingering")
    controller = os.environ.get("HOROVOD_CONTROLLER")
    ctx.log(steps_seen=steps, pid=os.getpid(), python=sys.version_info[0], controller=controller)
    if ctx.is_chief:
        ctx.model_dir.mkdir(parents=True, exist_ok=True)
        (ctx.model_dir / "model.json").write_text(json.dumps({"params": dict(ctx.params), "steps": steps}))
