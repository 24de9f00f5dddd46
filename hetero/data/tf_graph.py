"""What the engines cannot do with a `tf.data.Dataset`, said before training starts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hetero.errors import EngineError, InputError

_PYTHON_OPS = {"PyFunc": "tf.numpy_function", "PyFuncStateless": "tf.numpy_function", "EagerPyFunc": "tf.py_function"}
_WARN_ABOUT_STATE = 0


def check_dataset(dataset: Any, engine: str = "tf_data") -> None:
    """Raise in one sentence what would fail, hang or run empty later.

    Args:
        dataset: What the job's `inputs` returned.
        engine: "tf_data", "local" or "grpc"; only under "tf_data" must it be a graph that other hosts can run.

    Raises:
        EngineError: The engine cannot run this input, another one can.
        InputError: No engine can: the epoch never ends or is empty, or a component cannot be a batch of arrays.
    """
    if not _is_dataset(dataset):
        if engine == "tf_data":
            kind = type(dataset).__name__
            raise EngineError(
                f"--engine tf_data ships a tf.data.Dataset to the data hosts, but `inputs` returned a {kind}: "
                "return a tf.data.Dataset, or use --engine grpc, which runs any Python, or no data hosts."
            )
        return
    _check_length(dataset, may_be_empty=engine != "tf_data")
    for path, spec in _components(dataset.element_spec, ""):
        _check_component(path, spec)
    if engine == "tf_data":
        _check_graph(dataset)


def _is_dataset(value: Any) -> bool:
    """Tell whether it is a dataset, without importing TensorFlow for a job that does not use it."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and hasattr(tf, "data") and isinstance(value, tf.data.Dataset)


def _check_length(dataset: Any, *, may_be_empty: bool) -> None:
    """Refuse an endless epoch, and an empty one unless it is only a share of the input."""
    tf = importlib.import_module("tensorflow")
    length = int(dataset.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        raise InputError(
            "The dataset that `inputs` returned never ends, but hetero counts epochs by its end: "
            "remove .repeat() and set --epochs."
        )
    if length == 0 and not may_be_empty:
        raise InputError(
            "The dataset that `inputs` returned is empty: see that its channel has files and its filters pass rows."
        )


def _components(spec: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, spec) of every leaf: `['image']`, `[0].label`; the path of a lone component is empty."""
    if isinstance(spec, Mapping):
        for key, value in spec.items():
            yield from _components(value, f"{path}[{key!r}]")
    elif isinstance(spec, tuple) and hasattr(spec, "_fields"):
        for name in spec._fields:
            yield from _components(getattr(spec, name), f"{path}.{name}")
    elif isinstance(spec, tuple | list):
        for index, value in enumerate(spec):
            yield from _components(value, f"{path}[{index}]")
    else:
        yield path, spec


def _check_component(path: str, spec: Any) -> None:
    tf = importlib.import_module("tensorflow")
    name = f"Component {path} of the dataset" if path else "The dataset's element"
    if isinstance(spec, tf.RaggedTensorSpec):
        raise InputError(f"{name} is ragged, but a batch is made of arrays: pad it (.padded_batch or .to_tensor()).")
    if isinstance(spec, tf.SparseTensorSpec):
        raise InputError(f"{name} is sparse, but a batch is made of arrays: use tf.sparse.to_dense.")
    if not isinstance(spec, tf.TensorSpec):
        raise InputError(f"{name} is a {type(spec).__name__}, but a batch is made of arrays: return tensors only.")
    if spec.shape.rank == 0:
        raise InputError(
            f"{name} is a scalar, but its first dimension must be the rows of a batch: end the dataset with .batch(n)."
        )


def _check_graph(dataset: Any) -> None:
    """Find Python in the graph and in the functions that it calls."""
    tf = importlib.import_module("tensorflow")
    graph_pb2 = importlib.import_module("tensorflow.core.framework.graph_pb2")
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=_WARN_ABOUT_STATE
        )
    except tf.errors.OpError as error:
        reason = str(error.message).splitlines()[0][:300]
        raise EngineError(
            f"--engine tf_data cannot ship this dataset to the data hosts: {reason}. Use --engine grpc."
        ) from error
    graph = graph_pb2.GraphDef.FromString(serialized.numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    python = [node for node in nodes if node.op in _PYTHON_OPS]
    if any(node.op == "GeneratorDataset" for node in nodes):
        names = sorted({name for node in python if (name := _generator_name(_function(node)))})
        raise EngineError(
            f"--engine tf_data cannot run Dataset.from_generator({', '.join(names) or '...'}) on the data hosts, "
            "because a graph does not carry Python code: use --engine grpc, which runs any Python, or no data hosts."
        )
    if python:
        calls = sorted({f"{_PYTHON_OPS[node.op]}({_name(_function(node))})" for node in python})
        raise EngineError(
            f"--engine tf_data cannot run {', '.join(calls)} on the data hosts, because a graph does not carry Python "
            "code: write it with TensorFlow ops, or use --engine grpc, which runs any Python, or no data hosts."
        )


def _function(node: Any) -> Any:
    """Return the Python function behind a node; None where TensorFlow keeps it elsewhere."""
    try:
        script_ops = importlib.import_module("tensorflow.python.ops.script_ops")
        registry = script_ops._py_funcs._funcs  # noqa: SLF001
        function = registry.get(node.attr["token"].s) or registry.get(node.attr["token"].s.decode())
    except (ImportError, AttributeError):
        return None
    return getattr(function, "_func", function)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or "a Python function").replace("<locals>.", "")


def _generator_name(function: Any) -> str:
    """Name the user's generator, which TensorFlow keeps in the closure of a function of its own."""
    for cell in getattr(function, "__closure__", None) or ():
        state = getattr(cell.cell_contents, "__self__", cell.cell_contents)
        generator = getattr(state, "_generator", None)
        if callable(generator):
            return _name(generator)
    return ""
