"""A job of the tests: TFRecords of channel `training`, which may be an address in S3; all engines read them.

Options: prepare_s (time that a batch takes to prepare; not under tf_data), step_s (time that a step takes).
"""

import json
import time

import hetero
from hetero.inputs import tfrecord

SPEC = {"row": tfrecord.scalar("int64"), "picture": tfrecord.raw("uint8", (16,))}
job = hetero.Job("records", batch_size=8, prepare_s=0.0, step_s=0.0)


@job.inputs
def inputs(ctx):
    rows = tfrecord.read(ctx.files).map(lambda record: tfrecord.parse(record, SPEC)).batch(ctx.batch_size)
    return slowly(rows, ctx.params["prepare_s"]) if ctx.params["prepare_s"] else rows


def slowly(rows, prepare_s):
    for batch in rows.as_numpy_iterator():
        time.sleep(prepare_s)
        yield batch


@job.train
def train(ctx):
    steps = 0
    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for batch, mask in ctx.batches(epoch, with_mask=True):
                assert (batch["picture"] == batch["row"][:, None] % 256).all()
                seen.write(json.dumps({"epoch": epoch, "rows": batch["row"][mask].tolist()}) + "\n")
                seen.flush()
                time.sleep(ctx.params["step_s"])
                steps += 1
    if ctx.is_chief:
        ctx.model_dir.mkdir(parents=True, exist_ok=True)
        (ctx.model_dir / "model.json").write_text(json.dumps({"steps": steps}))
