"""The built-in training loop: Keras 2 and Keras 3 models on any number of ranks.

`fit` is meant to be read from top to bottom, and to be copied into a job that needs something else. Keras's own `fit`
and Horovod's Keras optimizer are not used: the latter fails with Keras 3, while gradients taken with respect to the
`tf.Variable` behind each Keras variable work with both.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hetero.errors import InputError
from hetero.training.checkpoint import FitCheckpoint


class Context(Protocol):
    """What the loop needs of a job's TrainContext."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def model_dir(self) -> Path | None:
        """Where rank 0 saves the model."""

    @property
    def checkpoint_dir(self) -> Path:
        """Where rank 0 keeps the checkpoint; only asked for where one is wanted, as is `on_stop`."""

    def on_stop(self, save: Callable[[], Any]) -> None:
        """Have `save` called on rank 0 if the job is stopped."""

    def epochs(self) -> Sequence[int]:
        """Return the epochs to train."""

    def batches(self, epoch: int, *, with_mask: bool = False) -> Iterable[Any]:
        """Yield `(batch, mask)`; mask: bool (rows,), False where a row only fills up."""

    def log(self, **values: Any) -> None:
        """Keep numbers of the job."""


def fit(
    ctx: Context,
    *,
    model: Any,
    loss: Any,
    optimizer: Any,
    metrics: Sequence[Any] = (),
    validation: Any = None,
    save: bool = True,
    checkpoint: bool = False,
    jit_compile: bool = False,
) -> dict[str, list[float]]:
    """Train a Keras model on the job's input, on all ranks together.

    Each batch of the input is `(x, y)` or `(x, y, sample_weight)`, each part an array or any nesting of arrays with
    `rows` as the first dimension. Rows that only fill up a batch (`--remainder pad`) weigh nothing.

    Args:
        ctx: The job's TrainContext.
        model: Keras 2 or Keras 3 model, called with `x`; need not be compiled or built. Equal on all ranks after the
            first step.
        loss: Name, Keras loss, or `f(y, prediction)` that returns one value a row. Mean over the rows of all ranks'
            batches.
        optimizer: Name or Keras optimizer. Its learning rate is used as it is: scale it to `ctx.size` yourself if you
            want to.
        metrics: Names, Keras metrics or functions, updated with `(y, prediction)` while training.
        validation: Evaluated at the end of each epoch; see `evaluate`. None: no evaluation.
        save: Whether rank 0 saves the model to `ctx.model_dir` at the end; see `save_model`.
        checkpoint: Whether rank 0 writes model, optimizer and number of epochs done to `ctx.checkpoint_dir` after each
            epoch and where the job is stopped, and all ranks go on from there where such a file is found: with the
            first epoch that is not done. Where all are done, nothing is trained.
        jit_compile: Whether the train step is compiled by XLA.

    Returns:
        For "loss", every metric, and "val_" + each of these with `validation`: one value an epoch, the mean over all
        rows of all ranks. Epochs of earlier runs that the checkpoint tells of come first.

    Raises:
        InputError: A batch is not `(x, y)` or `(x, y, sample_weight)`; or the checkpoint is cut off or another model's.
    """
    keras = _keras_of(model)
    optimizer = keras.optimizers.get(optimizer)
    trackers = [keras.metrics.Mean(name="loss"), *(_metric(keras, metric, loss) for metric in metrics)]
    peers = _peers(ctx)
    train_step = _train_step(model, _row_loss(keras, loss), optimizer, trackers, peers, jit_compile=jit_compile)
    kept = FitCheckpoint(ctx, type(optimizer).__name__, wanted=checkpoint, total=peers and peers.allreduce_sum)
    epochs, history, ready = ctx.epochs()[kept.epoch :], kept.history(), False
    if not epochs:
        _prepare(ctx, model, optimizer, peers, kept=kept, x=None if model.built else _any_x(ctx))
    for epoch in epochs:
        began, rows = time.perf_counter(), 0.0
        for tracker in trackers:
            tracker.reset_state()
        for batch, mask in ctx.batches(epoch, with_mask=True):
            x, y, weight = _parts(batch, mask)
            if not ready:
                _prepare(ctx, model, optimizer, peers, kept=kept, x=x)
                ready = True
            kept.step()
            train_step(x, y, weight)
            rows += float(mask.sum())
        values = _mean_over_ranks(peers, trackers, rows, "train")
        if validation is not None:
            scores = evaluate(ctx, model=model, data=validation, loss=loss, metrics=metrics)
            values |= {f"val_{name}": value for name, value in scores.items()}
        for name, value in values.items():
            history.setdefault(name, []).append(value)
        if ctx.rank == 0:
            ctx.log(**values)
            shown = " ".join(f"{name}={value:.4f}" for name, value in values.items())
            print(f"epoch {epoch + 1}/{len(ctx.epochs())}: {shown} ({time.perf_counter() - began:.1f} s)", flush=True)
        kept.epoch_done(epoch, history)
    if save and ctx.rank == 0 and ctx.model_dir is not None:
        save_model(model, ctx.model_dir)
    return history


def _prepare(ctx: Context, model: Any, optimizer: Any, peers: Any, *, kept: FitCheckpoint, x: Any) -> None:
    """Make all variables exist, as the checkpoint has them if there is one, and equal on all ranks."""
    _build(model, optimizer, x)
    variables = _state(model, optimizer)
    kept.attach(variables)
    if kept.wanted:
        ctx.on_stop(kept.save)
    if peers is not None:
        peers.broadcast_variables(variables)


def _any_x(ctx: Context) -> Any:
    """Return the input of one batch, to build a model with that will not be trained."""
    batch, mask = next(iter(ctx.batches(ctx.epochs()[-1], with_mask=True)))
    return _parts(batch, mask)[0]


def _train_step(
    model: Any,
    row_loss: Callable[[Any, Any], tf.Tensor],
    optimizer: Any,
    trackers: Sequence[Any],
    peers: Any,
    *,
    jit_compile: bool,
) -> Callable[[Any, Any, Any], None]:
    """Return the graph of one step: forward, backward, average over the ranks, apply, update the metrics."""

    def update(tape: Any, total: tf.Tensor) -> None:
        variables = [_tf_variable(variable) for variable in model.trainable_variables]
        if peers is not None:
            tape = peers.distributed_tape(tape, variables)
        gradients = _unscale(optimizer, tape.gradient(total, variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # Nothing in it depends on the values of tensors, and converting Horovod and the optimizer costs seconds of tracing.
    update = tf.autograph.experimental.do_not_convert(update)

    def step(x: Any, y: Any, weight: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            losses = row_loss(y, prediction)  # (rows,)
            # Divided by all rows, padding included: a row weighs the same in a padded step as in a full one.
            total = tf.reduce_sum(losses * tf.cast(weight, losses.dtype)) / tf.cast(tf.size(weight), losses.dtype)
            for extra in model.losses:  # regularisers
                total += tf.cast(extra, total.dtype)
            scaled = _scale_loss(optimizer, total)
        update(tape, scaled)
        trackers[0].update_state(losses, sample_weight=weight)
        for tracker in trackers[1:]:
            tracker.update_state(y, prediction, sample_weight=weight)

    return tf.function(step, reduce_retracing=True, jit_compile=jit_compile)  # type: ignore[no-any-return]


def evaluate(
    ctx: Context, *, model: Any, data: Any, loss: Any = None, metrics: Sequence[Any] = (), batch_size: int = 256
) -> dict[str, float]:
    """Evaluate a model; each rank takes its share of the batches. All ranks must call it.

    Args:
        ctx: The job's TrainContext.
        model: Keras model.
        data: The same on all ranks: a tuple of arrays `(x, y)` or `(x, y, sample_weight)`; or an iterable of such
            batches; or a function that returns one of these, called at each evaluation.
        loss: As for `fit`; None leaves it out.
        metrics: As for `fit`.
        batch_size: Rows a batch, where `data` is a tuple of arrays.

    Returns:
        "loss" and each metric: the mean over all rows.

    Raises:
        InputError: There are no batches at all, or a batch has the wrong form.
    """
    keras = _keras_of(model)
    row_loss = None if loss is None else _row_loss(keras, loss)
    trackers = [_metric(keras, metric, loss) for metric in metrics]
    if row_loss is not None:
        trackers.insert(0, keras.metrics.Mean(name="loss"))
    predict = _predict_function(model)
    rows = 0.0
    for number, batch in enumerate(_batches_of(data, batch_size)):
        if number % ctx.size != ctx.rank:
            continue
        x, y, weight = _parts(batch, None)
        prediction = predict(x)
        y = tf.nest.map_structure(tf.convert_to_tensor, y)
        for tracker in trackers:
            if tracker.name == "loss" and row_loss is not None:
                tracker.update_state(row_loss(y, prediction), sample_weight=weight)
            else:
                tracker.update_state(y, prediction, sample_weight=weight)
        rows += weight.shape[0]
    return _mean_over_ranks(_peers(ctx), trackers, rows, "evaluate")


def save_model(model: Any, model_dir: Path) -> None:
    """Save a model: `model.keras`, and a SavedModel in `1/` as TensorFlow Serving wants it.

    A model that cannot be exported for serving (an unusual signature) is still saved; the reason is printed.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    model.save(str(model_dir / "model.keras"))
    try:
        quiet = {"verbose": False} if _major(_keras_of(model)) >= 3 else {}
        model.export(str(model_dir / "1"), **quiet)
    except Exception as error:  # whatever it is, the model itself is safe
        print(
            f"hetero: {model_dir / 'model.keras'} is saved, but the model cannot be exported for serving: {error}",
            flush=True,
        )


def _parts(data: Any, mask: Any) -> tuple[Any, Any, np.ndarray[Any, Any]]:
    """Return x, y and float32 weights (rows,) of a batch; masked rows weigh 0."""
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        found = (
            f"{type(data).__name__} of {len(data)}" if isinstance(data, (tuple, list, dict)) else type(data).__name__
        )
        raise InputError(
            f"fit got a batch that is a {found}; it needs (x, y) or (x, y, sample_weight). Return such tuples from the "
            "job's inputs, or write the loop yourself over ctx.batches(epoch)."
        )
    y = tf.nest.flatten(data[1])[0]
    weight = np.asarray(data[2], np.float32).reshape(-1) if len(data) == 3 else np.ones(len(y), np.float32)
    return data[0], data[1], weight if mask is None else weight * np.asarray(mask, np.float32)


def _batches_of(data: Any, batch_size: int) -> Iterator[Any]:
    """Yield the batches of evaluation data in any of its forms."""
    if callable(data) and not hasattr(data, "__iter__"):
        data = data()
    if not isinstance(data, tuple):
        yield from data.as_numpy_iterator() if isinstance(data, tf.data.Dataset) else data
        return
    for start in range(0, len(tf.nest.flatten(data)[0]), batch_size):
        rows = slice(start, start + batch_size)
        yield tf.nest.map_structure(lambda part, rows=rows: part[rows], data)


def _row_loss(keras: Any, loss: Any) -> Callable[[Any, Any], tf.Tensor]:
    """Return `f(y, prediction)` -> losses (rows,) for a name, a Keras loss or a function."""
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    per_row = found.call if isinstance(found, keras.losses.Loss) else found

    def losses(y: Any, prediction: Any) -> tf.Tensor:
        if _is_column(y, prediction):
            y = tf.expand_dims(y, -1)
        values = tf.convert_to_tensor(per_row(y, prediction))
        if values.shape.rank == 0:
            raise InputError(f"the loss {loss!r} returns one number for the whole batch; fit needs one value a row")
        return tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))  # over what is not the batch

    return losses


def _is_column(y: Any, prediction: Any) -> bool:
    """Say whether y is (rows,) but the prediction (rows, 1), which would broadcast to (rows, rows)."""
    if not isinstance(y, tf.Tensor) or not isinstance(prediction, tf.Tensor) or y.shape.rank is None:
        return False
    return bool(prediction.shape.rank == y.shape.rank + 1 and prediction.shape[-1] == 1)


def _metric(keras: Any, metric: Any, loss: Any) -> Any:
    """Return a fresh metric; "accuracy" is the one that fits the loss, as in Keras's own compile()."""
    if isinstance(metric, keras.metrics.Metric):
        return type(metric).from_config(metric.get_config())
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
    if metric in ("accuracy", "acc"):
        kind = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")
        metric = next(
            (
                f"{prefix}_accuracy"
                for prefix in ("sparse_categorical", "categorical", "binary")
                if str(kind).startswith(prefix)
            ),
            "accuracy",
        )
    found = keras.metrics.get(metric)
    if isinstance(found, keras.metrics.Metric):
        return type(found)(name=name)
    return keras.metrics.MeanMetricWrapper(found, name=name)


def _mean_over_ranks(peers: Any, trackers: Sequence[Any], rows: float, name: str) -> dict[str, float]:
    """Return the mean of each metric over the ranks, weighted by their rows."""
    names = [str(tracker.name) for tracker in trackers]
    own = np.array([float(np.mean(tracker.result())) for tracker in trackers], np.float64)
    sums = np.append(own * rows if rows > 0 else np.zeros_like(own), rows)  # a rank without rows has no say
    if peers is not None:
        sums = peers.allreduce_sum(sums, name)
    if sums[-1] == 0:
        raise InputError("fit or evaluate got no batch at all in an epoch, on any rank; check the input's files")
    return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))


def _predict_function(model: Any) -> Callable[[Any], Any]:
    """Return the model's inference as a graph, traced once a model."""
    known = getattr(model, "_hetero_predict", None)
    if known is None:
        known = tf.function(lambda x: model(x, training=False), reduce_retracing=True)
        object.__setattr__(model, "_hetero_predict", known)  # past Keras's attribute tracking
    return known  # type: ignore[no-any-return]


def _build(model: Any, optimizer: Any, x: Any) -> None:
    """Make all variables exist before the first step: they can be broadcast then, and the step is traced only once."""
    if not model.built or not model.weights:
        with warnings.catch_warnings():  # Keras 3 tries without AutoGraph first, and says so
            warnings.simplefilter("ignore")
            model(x, training=False)
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    elif hasattr(optimizer, "_create_all_weights"):  # Keras 2's legacy ones
        optimizer._create_all_weights(model.trainable_variables)  # noqa: SLF001


def _state(model: Any, optimizer: Any) -> list[tf.Variable]:
    """Return every variable that must be equal on all ranks."""
    own = optimizer.variables
    return [_tf_variable(variable) for variable in [*model.weights, *(own() if callable(own) else own)]]


def _tf_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` behind a Keras 3 variable; Keras 2 variables are one."""
    return variable if isinstance(variable, tf.Variable) else variable._value  # noqa: SLF001  `value` may be a cast copy


def _scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """Scale a loss for mixed precision: Keras 3 unscales when it applies, Keras 2 in `_unscale`."""
    scale = getattr(optimizer, "scale_loss", None) or getattr(optimizer, "get_scaled_loss", None)
    return loss if scale is None else scale(loss)


def _unscale(optimizer: Any, gradients: list[Any]) -> list[Any]:
    unscale = getattr(optimizer, "get_unscaled_gradients", None)
    return gradients if unscale is None else list(unscale(gradients))


def _keras_of(model: Any) -> Any:
    """Return the Keras package that a model's class comes from: keras 2, keras 3 or tf_keras."""
    for kind in type(model).__mro__:
        package = kind.__module__.split(".")[0]
        if package in ("keras", "tf_keras"):
            return importlib.import_module(package)
    raise InputError(f"fit got a {type(model).__name__} as model; it needs a Keras model")


def _major(keras: Any) -> int:
    return int(str(keras.__version__).split(".")[0])


def _peers(ctx: Context) -> Any:
    """Return the Horovod module of this package, or None for a single rank, which needs no Horovod."""
    if ctx.size == 1:
        return None
    from hetero.training import horovod

    return horovod
