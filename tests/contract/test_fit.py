"""The built-in loop with one rank, which needs no Horovod."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hetero.errors import InputError
from hetero.training import evaluate, fit

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


class FakeContext:
    """One rank's TrainContext over batches that a test gives."""

    rank, size = 0, 1

    def __init__(self, data: Callable[[], Iterator[Any]], epochs: int = 1, model_dir: Path | None = None) -> None:
        self._data, self._epochs, self.model_dir = data, epochs, model_dir
        self.logged: dict[str, Any] = {}

    def epochs(self) -> range:
        return range(self._epochs)

    def batches(self, epoch: int, *, with_mask: bool = False) -> Iterator[Any]:
        assert epoch in self.epochs()
        for batch, mask in self._data():
            yield (batch, mask) if with_mask else batch

    def log(self, **values: Any) -> None:
        self.logged.update(values)


def batches_of_16() -> Iterator[Any]:
    for start in range(0, 64, 16):
        yield (X[start : start + 16], Y[start : start + 16]), np.ones(16, bool)


def linear(units: int = 2) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])


def softmax_loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_a_model_learns_is_saved_and_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context, model = FakeContext(batches_of_16, epochs=5, model_dir=tmp_path), linear()

    history = fit(
        context,
        model=model,
        loss=softmax_loss(),
        optimizer=keras.optimizers.Adam(0.1),
        metrics=["accuracy"],
        validation=lambda: (X, Y),
    )

    assert {name: len(values) for name, values in history.items()} == dict.fromkeys(
        ["loss", "accuracy", "val_loss", "val_accuracy"], 5
    )
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert history["val_accuracy"][-1] > 0.9
    assert context.logged["val_accuracy"] == history["val_accuracy"][-1]
    assert "epoch 5/5: loss=" in capsys.readouterr().out
    wanted = np.asarray(model(X))
    np.testing.assert_allclose(np.asarray(keras.models.load_model(tmp_path / "model.keras")(X)), wanted, rtol=1e-5)
    served = tf.saved_model.load(str(tmp_path / "1"))
    np.testing.assert_allclose(served.serve(X).numpy(), wanted, rtol=1e-5)


def test_rows_that_fill_up_a_batch_weigh_nothing() -> None:
    def padded() -> Iterator[Any]:
        x, y = np.concatenate([X[:8], 1e3 * X[:8]]), np.concatenate([Y[:8], 1 - Y[:8]])
        yield (x, y), np.arange(16) < 8

    def weighted() -> Iterator[Any]:
        x, y = np.concatenate([X[:8], 1e3 * X[:8]]), np.concatenate([Y[:8], 1 - Y[:8]])
        yield (x, y, (np.arange(16) < 8).astype("float32")), np.ones(16, bool)

    def short() -> Iterator[Any]:
        yield (X[:8], Y[:8]), np.ones(8, bool)

    results = []
    for data, rate in ((padded, 0.2), (weighted, 0.2), (short, 0.1)):  # a step with half the rows is half as long
        model = linear()
        history = fit(
            FakeContext(data),
            model=model,
            loss=softmax_loss(),
            optimizer=keras.optimizers.SGD(rate),
            metrics=["accuracy"],
        )
        results.append((model.get_weights()[0], history))

    for weights, history in results[:2]:
        np.testing.assert_allclose(weights, results[2][0], rtol=1e-4)
        assert history["loss"] == pytest.approx(results[2][1]["loss"], rel=1e-4)
        assert history["accuracy"] == results[2][1]["accuracy"]


def test_the_gradient_step_is_the_one_that_keras_itself_takes() -> None:
    ours, theirs = linear(), linear()
    fit(FakeContext(batches_of_16), model=ours, loss=softmax_loss(), optimizer=keras.optimizers.SGD(0.1))
    theirs.compile(loss=softmax_loss(), optimizer=keras.optimizers.SGD(0.1))
    theirs.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], rtol=1e-4)


def test_a_subclassed_model_with_nested_input_and_own_functions() -> None:
    class Sum(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = keras.layers.Dense(1, kernel_regularizer="l2"), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.left(x["left"]) + self.right(x["right"])

    def nested() -> Iterator[Any]:
        for (x, y), mask in batches_of_16():
            yield ({"left": x[:, :2], "right": x[:, 2:]}, y.astype("float32")[:, None]), mask

    def squares(y: Any, prediction: Any) -> Any:
        return tf.square(y - prediction)  # (rows, 1): averaged over what is not the batch

    def error(y: Any, prediction: Any) -> Any:
        return tf.abs(y - prediction)

    history = fit(FakeContext(nested, epochs=3), model=Sum(), loss=squares, optimizer="adam", metrics=[error, "mse"])

    assert set(history) == {"loss", "error", "mse"}
    assert history["loss"][-1] < history["loss"][0]
    assert history["loss"] == pytest.approx(history["mse"], rel=1e-5)


def test_accuracy_is_the_one_that_fits_the_loss() -> None:
    model, context = linear(units=1), FakeContext(batches_of_16, epochs=8)
    loss, metrics = "binary_crossentropy", ["accuracy"]
    fit(context, model=model, loss=loss, optimizer="sgd", metrics=metrics)
    scores = evaluate(context, model=model, data=(X, Y), loss=loss, metrics=metrics)
    assert scores["accuracy"] == pytest.approx(float(((model.predict(X, verbose=0)[:, 0] > 0.5) == Y).mean()))


def test_evaluation_takes_arrays_datasets_and_functions_alike() -> None:
    model, context = linear(), FakeContext(batches_of_16)
    forms = [
        (X, Y),
        lambda: (X, Y),
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(10),
        [(X[:50], Y[:50]), (X[50:], Y[50:])],
    ]
    scores = [evaluate(context, model=model, data=data, loss=softmax_loss(), metrics=["accuracy"]) for data in forms]
    for score in scores[1:]:
        assert score == pytest.approx(scores[0], rel=1e-5)


@pytest.mark.parametrize(
    ("batch", "message"),
    [({"x": X}, "dict of 1"), (X, "ndarray"), ((X,), "tuple of 1")],
    ids=["dict", "array", "single"],
)
def test_a_batch_that_is_no_pair_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"a batch that is a {message}.*needs \\(x, y\\)"):
        fit(
            FakeContext(lambda: iter([(batch, np.ones(64, bool))])),
            model=linear(),
            loss=softmax_loss(),
            optimizer="sgd",
        )


def test_an_epoch_without_batches_and_a_loss_without_rows_are_refused() -> None:
    with pytest.raises(InputError, match="no batch at all"):
        fit(FakeContext(lambda: iter(())), model=linear(), loss=softmax_loss(), optimizer="sgd")
    with pytest.raises(InputError, match="one value a row"):
        fit(FakeContext(batches_of_16), model=linear(), loss=lambda y, p: tf.reduce_sum(p), optimizer="sgd")
    with pytest.raises(InputError, match="needs a Keras model"):
        fit(FakeContext(batches_of_16), model=object(), loss=softmax_loss(), optimizer="sgd")


def test_the_package_loads_neither_tensorflow_nor_horovod_before_fit_is_used() -> None:
    code = (
        "import sys, hetero.training, hetero.training.horovod, hetero.inputs.digits\n"
        "print([name for name in ('tensorflow', 'keras', 'horovod', 'sklearn') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
