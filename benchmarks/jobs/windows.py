"""A job whose batches cost nothing to make, for data_plane.py and feed_memory.py.

Options: rows, count (of every epoch); or windows, a folder in which N.json has both for epoch N.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hetero

SPLITS = 8

job = hetero.Job("windows", engine="grpc", rows=8192, count=100, windows="")


@job.splits
def splits(_ctx: hetero.InputContext) -> list[int]:
    """Return a few, so that their ends are part of what is measured."""
    return list(range(SPLITS))


@job.inputs
def inputs(ctx: hetero.InputContext) -> Iterator[Any]:
    """Yield the same array again and again."""
    window = ctx.params
    if window["windows"]:
        window = json.loads((Path(window["windows"]) / f"{ctx.epoch}.json").read_text(encoding="utf-8"))
    batch = np.random.default_rng(0).random((window["rows"], 28, 28), dtype=np.float32)
    for split in ctx.splits:
        for _ in range(window["count"] // SPLITS + (split < window["count"] % SPLITS)):
            yield batch


@job.train
def train(_ctx: hetero.TrainContext) -> None:
    """Do nothing: the benchmark's own process reads the stream."""
