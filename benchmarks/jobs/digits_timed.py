"""The demo's job (examples/digits/job.py), unchanged, with the moments of its start written down.

Each moment is one JSON line `{"moment": ..., "time_s": seconds since 1970}` in the file that BENCHMARK_MOMENTS names.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hetero
from hetero.training import horovod

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits" / "job.py"
job = hetero.Job("digits", engine="tf_data", batch_size=32, epochs=1)


def note(moment: str) -> None:
    """Write down that a moment has come."""
    with Path(os.environ["BENCHMARK_MOMENTS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"moment": moment, "time_s": time.time()}) + "\n")


class NotingFeed:
    """A rank's feed that notes when the first batch is asked for and when it comes."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield the feed's batches."""
        if epoch > 0:
            yield from self._feed.batches(epoch)
            return
        note("rank: model built, first batch asked for")
        for number, batch in enumerate(self._feed.batches(epoch)):
            if number < 2:
                note(("rank: first batch", "rank: first step done")[number])
            yield batch

    def log(self, values: Mapping[str, Any]) -> None:
        """Log as the feed does."""
        self._feed.log(values)


def noted(function: Any, moment: str) -> Any:
    """Return `function` with notes when it begins and when it ends."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(f"{moment} begins")
        result = function(*args, **kwargs)
        note(f"{moment} done")
        return result

    return call


note("rank: job file begins (hetero imported)")
spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
note("rank: TensorFlow and job imported")
horovod.init_rank = noted(horovod.init_rank, "rank: Horovod's init")
job.splits(example.splits)
job.inputs(noted(example.inputs, "rank: dataset of an epoch"))


@job.train
def train(ctx: hetero.TrainContext) -> None:
    """Train as the example does."""
    note("rank: train() called")
    example.train(replace(ctx, feed=NotingFeed(ctx.feed)))
