"""How one thread takes elements out of a dataset so that another can wake it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hetero.errors import EngineError


class Ended(Exception):
    """The epoch's last element was taken."""


def tensorflow() -> Any:
    """Import TensorFlow, or raise EngineError with what to do."""
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise EngineError(
            f"The tf_data engine needs TensorFlow on every host, and importing it failed: {error}. "
            "Install tensorflow-cpu (or your own build), or use --engine grpc."
        ) from error


def cancellation_manager() -> Any:
    """TensorFlow's means to wake a thread that waits for an element; None where this TensorFlow has none."""
    try:
        return importlib.import_module("tensorflow.python.eager.cancellation").CancellationManager()
    except (ImportError, AttributeError):
        return None


def reader(dataset: Any, cancellation: Any) -> Callable[[], Any]:
    """Return a function that gives the next element as read-only numpy arrays, or raises `Ended`.

    It is `as_numpy_iterator`, but for the wait in TensorFlow's runtime that `cancellation` can end. Without it a
    thread in a dead epoch would be there until the process ends.
    """
    tf = tensorflow()
    iterator = iter(dataset)  # once: a second time would be a second pass over the data
    wait = _cancellable(iterator, cancellation) or (lambda: next(iterator))

    def take() -> Any:
        try:
            element = wait()
        except (StopIteration, tf.errors.OutOfRangeError):
            raise Ended from None
        return tf.nest.map_structure(_to_numpy, element)

    return take


def raise_ended() -> Any:
    """Be the reader of an epoch that was left before it opened."""
    raise Ended


def _cancellable(iterator: Any, cancellation: Any) -> Callable[[], Any] | None:
    """Return what `next(iterator)` does, in a form that can be woken; None where this TensorFlow has none."""
    if cancellation is None:
        return None
    try:
        tf = tensorflow()
        execute = importlib.import_module("tensorflow.python.eager.execute").execute_with_cancellation
        context = importlib.import_module("tensorflow.python.eager.context").context()
        assemble = importlib.import_module("tensorflow.python.data.util.structure").from_compatible_tensor_list
        types = [int(component.as_datatype_enum) for component in iterator._flat_output_types]  # noqa: SLF001
        flat_shapes = iterator._flat_output_shapes  # noqa: SLF001
        shapes = [None if shape.rank is None else shape.as_list() for shape in flat_shapes]
        attributes = ("output_types", types, "output_shapes", shapes)
        resource = iterator._iterator_resource  # noqa: SLF001
    except (ImportError, AttributeError):
        return None

    def wait() -> Any:
        with tf.device("/cpu:0"):
            flat = execute("IteratorGetNext", len(types), [resource], attributes, context, cancellation)
        return assemble(iterator.element_spec, list(flat))  # `iterator` owns the resource: it must live as long

    return wait


def _to_numpy(tensor: Any) -> Any:
    array = tensor._numpy() if hasattr(tensor, "_numpy") else tensor.numpy()  # noqa: SLF001 - numpy() copies
    if hasattr(array, "setflags"):
        array.setflags(write=False)
    return array
