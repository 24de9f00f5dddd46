"""Nested structures over arrays: taken apart, put together, compared.

A structure is any nesting of dict, list, tuple and named tuple over numpy arrays, TensorFlow or PyTorch tensors (read
through their own buffer; neither framework is imported here) and `None`. Dict keys are strings or integers; they are
taken in sorted order, so dicts come back sorted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.errors import InputError

Array: TypeAlias = npt.NDArray[Any]
Structure: TypeAlias = Any
# A tree is LEAF, None, or (kind, detail, children): comparable with ==, so that two structures compare in one step.
Tree: TypeAlias = Any

LEAF = "*"
_SCALARS = (bool, int, float, complex, np.generic)
_RAGGED = ("SparseTensor", "SparseTensorValue", "RaggedTensor", "RaggedTensorValue")


def flatten(structure: Structure) -> tuple[list[Array], Tree]:
    """Take a nested structure apart.

    Returns:
        The leaves as numpy arrays that share memory with the originals, in a fixed order, and the tree without them.

    Raises:
        InputError: a leaf is no array, or a dict has keys other than strings and integers; names the path.
    """
    leaves: list[Array] = []
    return leaves, _flatten(structure, leaves, ())


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Structure:
    """Put together what `flatten` took apart."""
    return _unflatten(tree, iter(leaves))


def as_arrays(structure: Structure) -> Structure:
    """The same structure over numpy arrays, without copying."""
    leaves, tree = flatten(structure)
    return unflatten(tree, leaves)


def leaf_paths(tree: Tree) -> list[str]:
    """Where each leaf is, written as Python: `batch['image'][0]`."""
    return list(_paths(tree, "batch"))


def difference(tree: Tree, other: Tree, path: str) -> str:
    """The first path at which two unequal trees differ, and how; a clause."""
    if tree in (LEAF, None) or other in (LEAF, None) or tree[0] != other[0]:
        return f"{path} is {_tree_text(tree)} in one and {_tree_text(other)} in another"
    keys, other_keys = _child_keys(tree), _child_keys(other)
    for key in (*keys, *other_keys):
        if (key in keys) != (key in other_keys):
            return f"{path}{key} is in one and missing in another"
    if tree[1] != other[1]:
        return f"{path} is {_tree_text(tree)} in one and {_tree_text(other)} in another"
    key, child, other_child = next((k, a, b) for k, a, b in zip(keys, tree[2], other[2], strict=True) if a != b)
    return difference(child, other_child, path + key)


@lru_cache(maxsize=64)
def dtype_from_text(text: str) -> np.dtype[Any]:
    """An element type by its numpy text, or its name where it is one of ml_dtypes' (bfloat16, float8_*)."""
    if text[0].isalpha():
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, text))
    return np.dtype(text)


def _flatten(node: Structure, leaves: list[Array], path: tuple[object, ...]) -> Tree:
    if type(node) is np.ndarray:
        leaves.append(node)
        return LEAF
    if node is None:
        return None
    if isinstance(node, dict):
        keys = sorted(node, key=_sort_key)
        if any(type(key) not in (str, int) for key in keys):
            raise InputError(f"{_path_text(path)} has the keys {keys!r}: a batch's keys must be strings or integers.")
        return "dict", tuple(keys), tuple([_flatten(node[key], leaves, (*path, key)) for key in keys])
    if isinstance(node, (list, tuple)) and type(node).__name__ not in _RAGGED:
        kind: object = type(node) if hasattr(node, "_fields") else None
        name = "named" if kind else "list" if isinstance(node, list) else "tuple"
        return name, kind, tuple([_flatten(child, leaves, (*path, i)) for i, child in enumerate(node)])
    leaves.append(_leaf_array(node, path))
    return LEAF


def _sort_key(key: object) -> tuple[str, str]:
    return type(key).__name__, str(key) if not isinstance(key, int) else f"{key:+021d}"


def _unflatten(tree: Tree, leaves: Iterator[Any]) -> Structure:
    if tree == LEAF:
        return next(leaves)
    if tree is None:
        return None
    kind, detail, children = tree
    values = [_unflatten(child, leaves) for child in children]
    if kind == "dict":
        return dict(zip(detail, values, strict=True))
    if kind == "named":
        return detail(*values)
    return values if kind == "list" else tuple(values)


def _leaf_array(value: Any, path: tuple[object, ...]) -> Array:
    if isinstance(value, (str, bytes)):  # numpy would cut trailing NUL bytes off
        boxed = np.empty((), dtype=object)
        boxed[()] = value
        return boxed
    framework, name = type(value).__module__.partition(".")[0], type(value).__name__
    if name in _RAGGED:
        raise InputError(
            f"{_path_text(path)} is a {name}: its rows cannot be cut apart. "
            "Make it dense in `inputs` (tf.sparse.to_dense, RaggedTensor.to_tensor)."
        )
    if framework == "torch":
        return _torch_array(value)
    if isinstance(value, _SCALARS) or hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        # asanyarray first tries the buffer protocol, which is how an EagerTensor shares its memory.
        array: Array = np.asarray(value)
        return array.astype(object) if array.dtype.kind == "T" else array
    if isinstance(value, (memoryview, bytearray)):
        return np.asarray(value)
    raise InputError(
        f"{_path_text(path)} is a {type(value).__qualname__}, which is no array. "
        "A batch is a nesting of dict, list, tuple over numpy arrays or TensorFlow or PyTorch tensors."
    )


def _torch_array(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8_"):
        plain: Array = tensor.numpy()
        return plain
    torch = sys.modules["torch"]  # types that NumPy does not know are read through their bits
    bits: Array = tensor.contiguous().view(torch.int16 if name == "bfloat16" else torch.uint8).numpy()
    return bits.view(dtype_from_text(name))


def _path_text(path: tuple[object, ...]) -> str:
    return "batch" + "".join(f"[{part!r}]" for part in path)


def _paths(tree: Tree, path: str) -> Iterator[str]:
    if tree == LEAF:
        yield path
    elif tree is not None:
        for key, child in zip(_child_keys(tree), tree[2], strict=True):
            yield from _paths(child, path + key)


def _child_keys(tree: Tree) -> list[str]:
    kind, detail, children = tree
    if kind == "dict":
        return [f"[{key!r}]" for key in detail]
    if kind == "named":
        return [f".{field}" for field in detail._fields]
    return [f"[{index}]" for index in range(len(children))]


def _tree_text(tree: Tree) -> str:
    if tree == LEAF:
        return "an array"
    if tree is None:
        return "None"
    return f"a named tuple {tree[1].__name__}" if tree[0] == "named" else f"a {tree[0]}"
