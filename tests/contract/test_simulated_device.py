"""Whichever loop a job has, the simulated accelerator takes one step for each batch of the rank's feed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hetero.channels import Channels
from hetero.job import TrainContext
from hetero.rank import RankFeed
from hetero.stopping import Stopping
from hetero.training import fit
from hetero.training.device import SimulatedDevice
from hetero.training.meter import StepMeter

EPOCHS, BATCHES, ROWS = 2, 3, 4
STEP_S, WAIT_S = 0.5, 0.125


class Stream:
    """An input stream whose clock only goes on while it is waited for, or a device is."""

    def __init__(self) -> None:
        self.now_s = 10.0

    def batches(self, _epoch: int) -> Iterator[Any]:
        for number in range(BATCHES):
            self.now_s += WAIT_S
            data = (np.full((ROWS, 2), number, np.float32), np.arange(ROWS) % 2)
            yield SimpleNamespace(data=data, mask=np.ones(ROWS, bool), rows=ROWS)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Rank:
    """What a rank puts together, with a clock of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.stream, self.metrics = Stream(), folder / "metrics.jsonl"
        self.device = SimulatedDevice(STEP_S, clock=lambda: self.stream.now_s, sleep=self.stream.sleep)
        self.printed: list[str] = []
        self.meter = StepMeter(
            metrics=self.metrics,
            clock=lambda: self.stream.now_s,
            emit=self.printed.append,
            device=self.device.describe,
        )
        nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
        stopping = Stopping(0, 1.0, order=nothing, lost=nothing, follows_from_a_peer=nothing, report=nothing)
        self.feed = RankFeed(self.stream, self.meter, stopping, Channels.of({}), self.device)  # type: ignore[arg-type]
        self.context = TrainContext(feed=self.feed, number_of_epochs=EPOCHS, batch_size=ROWS)

    def train(self, loop: Callable[[TrainContext], object]) -> list[dict[str, Any]]:
        """Run a loop to its end; return the lines of its steps."""
        loop(self.context)
        self.feed.finish_step()
        self.meter.close()
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [line for line in lines if "step" in line]


def over_batches(ctx: TrainContext) -> None:
    for epoch in ctx.epochs():
        for images, labels in ctx.batches(epoch):
            assert images.shape == (len(labels), 2)


def over_datasets(ctx: TrainContext) -> None:
    for epoch in ctx.epochs():
        assert len(list(ctx.dataset(epoch))) == BATCHES


def over_a_loader(ctx: TrainContext) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from hetero.torch import BatchStream

    for epoch in ctx.epochs():
        assert len(list(DataLoader(BatchStream(ctx, epoch), batch_size=None))) == BATCHES


def fitted(ctx: TrainContext) -> None:
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit(ctx, model=model, loss=loss, optimizer="sgd", save=False)


@pytest.mark.parametrize("loop", [over_batches, over_datasets, over_a_loader, fitted])
def test_each_batch_is_a_step_of_the_device_in_any_loop(tmp_path: Path, loop: Callable[[TrainContext], None]) -> None:
    rank, threads = Rank(tmp_path), threading.active_count()
    lines = rank.train(loop)
    steps = EPOCHS * BATCHES
    assert (rank.device.busy_s, rank.device.idle_s) == ((steps - 1) * STEP_S, (steps - 1) * WAIT_S)
    assert [line.get("device_idle_ms") for line in lines] == [None] + [1000 * WAIT_S] * (steps - 1)
    waits_ms = [1000 * WAIT_S] * (steps - 1) + [0.0]  # the last one waits for nothing
    assert [line["wait_ms"] for line in lines] == waits_ms
    assert [line["step_ms"] for line in lines] == [1000 * STEP_S + wait_ms for wait_ms in waits_ms]
    assert rank.printed[-1].endswith(f"step={BATCHES} simulated_device_ms=500 simulated_stall=0.2000")
    if loop is over_batches:
        assert threading.active_count() == threads


def test_an_epoch_that_is_left_early_has_the_devices_time_in_its_last_step(tmp_path: Path) -> None:
    def leaving(ctx: TrainContext) -> None:
        for epoch in ctx.epochs():
            for batch in ctx.batches(epoch):
                if batch[0][0, 0] == 1:
                    break

    rank = Rank(tmp_path)
    lines = rank.train(leaving)
    assert [line["step_ms"] for line in lines] == [625.0, 625.0, 625.0, 500.0]
    assert rank.device.busy_s == 3 * STEP_S
    assert rank.stream.now_s == 10.0 + 4 * (WAIT_S + STEP_S)
