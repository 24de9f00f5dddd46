"""scaling.py's job: every batch takes a while and no CPU, so that many workers fit on a machine with few."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import hetero

job = hetero.Job("waiting", engine="grpc", batch_size=64, pieces=100, batches=4, batch_s=0.02)


@job.splits
def splits(ctx: hetero.InputContext) -> list[int]:
    """Return the numbers of the splits."""
    return list(range(ctx.params["pieces"]))


@job.inputs
def inputs(ctx: hetero.InputContext) -> Iterator[Any]:
    """Yield batches of a few small columns, each after a wait."""
    rows = ctx.batch_size
    for split in ctx.splits:
        for number in range(ctx.params["batches"]):
            time.sleep(ctx.params["batch_s"])
            first = (split * ctx.params["batches"] + number) * rows
            yield {"row": np.arange(first, first + rows), "x": np.zeros((rows, 16), np.float32)}


@job.train
def train(_ctx: hetero.TrainContext) -> None:
    """Do nothing: the benchmark's own process reads the stream."""
