"""The checkpoint of `fit`, with one rank, which needs no Horovod: a job that is cut short goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hetero.errors import HeteroError, InputError
from hetero.training import fit
from hetero.training.checkpoint import NAME

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


class Cut(Exception):
    """Ends a training as a stop does: nothing of it is run any more."""


class FakeContext:
    """One rank's TrainContext, which can be stopped before a step."""

    rank, size = 0, 1

    def __init__(self, folder: Path, epochs: int, stop_before: tuple[int, int] | None = None) -> None:
        self.checkpoint_dir, self.model_dir = folder, folder / "model"
        self._epochs, self._stop_before = epochs, stop_before
        self.save: Callable[[], None] = lambda: None
        self.read: list[tuple[int, int]] = []
        self.logged: dict[str, Any] = {}

    def epochs(self) -> range:
        return range(self._epochs)

    def on_stop(self, save: Callable[[], None]) -> None:
        self.save = save

    def batches(self, epoch: int, *, with_mask: bool = False) -> Iterator[Any]:
        assert with_mask
        for step, start in enumerate(range(0, 64, 16)):
            if (epoch, step) == self._stop_before:
                self.save()
                raise Cut
            self.read.append((epoch, step))
            yield (X[start : start + 16], Y[start : start + 16]), np.ones(16, bool)

    def log(self, **values: Any) -> None:
        self.logged.update(values)


class Unbuilt(keras.Model):  # type: ignore[misc, name-defined]
    """A model that has no variables before its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def linear(units: int = 2, dtype: str | None = None) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, dtype=dtype)])


def run(context: FakeContext, model: Any = None, optimizer: Any = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    model = linear() if model is None else model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.05) if optimizer is None else optimizer
    history = fit(context, model=model, loss=loss, optimizer=optimizer, checkpoint=True, **options)
    return model, history


@pytest.mark.slow
@pytest.mark.parametrize("make", [linear, Unbuilt], ids=["built", "unbuilt"])
def test_epochs_in_two_runs_are_the_same_training_as_in_one(tmp_path: Path, make: Callable[[], Any]) -> None:
    whole = FakeContext(tmp_path / "whole", epochs=4)
    keras.utils.set_random_seed(0)
    wanted, wanted_history = run(whole, make())
    keras.utils.set_random_seed(0)
    run(FakeContext(tmp_path / "parts", epochs=2), make())
    keras.utils.set_random_seed(7)  # what the model begins with here is of no account
    rest = FakeContext(tmp_path / "parts", epochs=4)
    got, history = run(rest, make())

    assert [epoch for epoch, step in rest.read if step == 0] == [2, 3]
    for ours, theirs in zip(got.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert history == wanted_history


def test_an_epoch_that_was_cut_short_is_trained_again_from_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = FakeContext(tmp_path, epochs=3, stop_before=(1, 2))
    model = linear()
    with pytest.raises(Cut):
        run(cut, model)
    at_the_cut = model.get_weights()

    class Looking(FakeContext):
        def batches(self, epoch: int, *, with_mask: bool = False) -> Iterator[Any]:
            for batch in super().batches(epoch, with_mask=with_mask):
                yield batch
                if len(self.read) == 1:
                    self.after_one_step = other.get_weights()

    context, other = Looking(tmp_path, epochs=3), linear()
    _, history = run(context, other, keras.optimizers.Adam(0.05))
    assert context.read == [(epoch, step) for epoch in (1, 2) for step in range(4)]
    assert len(history["loss"]) == 3
    assert f"going on from {tmp_path / NAME}: 1 of 3 epochs are done" in capsys.readouterr().out
    # One step of Adam at 0.05 from the saved weights, and not from fresh ones.
    for ours, theirs in zip(context.after_one_step, at_the_cut, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.06)


def test_the_file_has_what_was_there_when_the_job_was_stopped(tmp_path: Path) -> None:
    cut, model = FakeContext(tmp_path, epochs=1, stop_before=(0, 3)), linear()
    with pytest.raises(Cut):
        run(cut, model)
    with np.load(tmp_path / NAME) as saved:
        np.testing.assert_array_equal(saved["v0"], model.get_weights()[0])


@pytest.mark.slow
def test_a_training_that_was_complete_is_not_trained_again_but_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for make in (linear, Unbuilt):
        folder = tmp_path / make.__name__
        first, history = run(FakeContext(folder, epochs=2), make())
        (folder / "model" / "model.keras").unlink()
        again = FakeContext(folder, epochs=2)
        second, same = run(again, make())
        assert same == history
        assert again.logged["loss"] == history["loss"][-1]
        assert len(again.read) <= 1, "more than the batch that an unbuilt model needs"
        for ours, theirs in zip(second.get_weights(), first.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert (folder / "model" / "model.keras").exists()
        assert "training was complete already" in capsys.readouterr().out


def test_a_file_that_was_cut_off_or_is_something_else_is_refused(tmp_path: Path) -> None:
    model, _ = run(FakeContext(tmp_path, epochs=1), save=False)
    whole = (tmp_path / NAME).read_bytes()
    rotten = bytearray(whole)
    rotten[whole.index(model.get_weights()[0].tobytes()) + 5] ^= 1
    for data in (whole[: len(whole) // 2], whole[:-1], b"", b"not a checkpoint at all", bytes(rotten)):
        (tmp_path / NAME).write_bytes(data)
        with pytest.raises(InputError, match=r"is no whole checkpoint .* Remove it to begin anew"):
            run(FakeContext(tmp_path, epochs=1))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    run(FakeContext(tmp_path, epochs=1))
    for model, optimizer, problem in (
        (linear(units=3), None, r"it has .*kernel.*, float32 \(4, 2\), where this has .*\(4, 3\)"),
        (linear(), keras.optimizers.SGD(0.1), "written with Adam, and this is SGD"),
        (linear(), keras.optimizers.Adam(0.1, amsgrad=True), "variables, and these are"),
        (linear(dtype="float16"), None, r"float32 \(4, 2\), where this has .*float16"),
    ):
        with pytest.raises(InputError, match=f"another model or optimizer: .*{problem}.*--checkpoint-dir"):
            run(FakeContext(tmp_path, epochs=2), model, optimizer)


def test_types_that_numpy_does_not_know_are_kept(tmp_path: Path) -> None:
    first, _ = run(FakeContext(tmp_path, epochs=1), linear(dtype="bfloat16"), save=False)
    second, _ = run(FakeContext(tmp_path, epochs=1), linear(dtype="bfloat16"), save=False)
    assert first.get_weights()[0].dtype.name == "bfloat16"
    for ours, theirs in zip(second.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nothing_is_written_where_no_checkpoint_is_wanted(tmp_path: Path) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit(FakeContext(tmp_path, epochs=1), model=linear(), loss=loss, optimizer="sgd", save=False)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_and_a_stop_after_an_epoch_writes_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.1.2.part").write_bytes(b"half")
    context = FakeContext(tmp_path, epochs=1)
    run(context)
    assert not list(tmp_path.glob(".*"))
    before = (tmp_path / NAME).stat()
    context.save()
    assert (tmp_path / NAME).stat().st_ino == before.st_ino


def test_a_file_that_cannot_be_read_and_a_full_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Cannot read the checkpoint .*file/fit.npz: Not a directory"):
        run(FakeContext(tmp_path / "file", epochs=1), save=False)
    run(FakeContext(tmp_path, epochs=1), save=False)
    before = (tmp_path / NAME).read_bytes()

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HeteroError, match=r"Cannot write the checkpoint .*fit.npz: No space left on device"):
        run(FakeContext(tmp_path, epochs=2), save=False)
    assert (tmp_path / NAME).read_bytes() == before
    assert not list(tmp_path.glob(".*"))
