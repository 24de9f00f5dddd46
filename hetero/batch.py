"""Batches: nested arrays, their rows, and their form on the wire.

A batch is any nesting of dict, list, tuple and named tuple over arrays whose first axis are the rows. Leaves may be numpy
arrays, TensorFlow or PyTorch tensors (read through their own buffer; neither framework is imported here) and `None`.
Dict keys are strings or integers; dicts come back with sorted keys.

On the wire a batch is a JSON header and one run of bytes in which every array starts at a multiple of 64. `decode` gives
arrays that lie in that buffer: no copy on the receiving side, none on the sending side for contiguous arrays.
"""

from __future__ import annotations

import json
import sys
from collections import namedtuple
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
_ALIGNMENT = 64
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


def rows(structure: Structure) -> int:
    """Number of rows that all components agree on.

    Raises:
        InputError: no component, a component without rows (0-d), or components that disagree; names the path.
    """
    return leaf_rows(*flatten(structure))


def leaf_rows(leaves: Sequence[Array], tree: Tree) -> int:
    """`rows` of a structure that was flattened already."""
    count = -1
    for leaf in leaves:
        if leaf.ndim == 0 or count not in (-1, leaf.shape[0]):
            raise InputError(_rows_problem(leaves, tree))
        count = leaf.shape[0]
    if count < 0:
        raise InputError("A batch holds no array at all: `inputs` must give at least one component with rows.")
    return count


def slice_rows(structure: Structure, start: int, stop: int) -> Structure:
    """Rows start..stop-1 of every component, as views."""
    leaves, tree = flatten(structure)
    return unflatten(tree, [leaf[start:stop] for leaf in leaves])


def concat_rows(structures: Sequence[Structure]) -> Structure:
    """One structure with the rows of all, in order.

    Raises:
        InputError: the structures, element types or row shapes differ; names the path and both values.
    """
    if not structures:
        raise ValueError("concat_rows needs at least one structure")
    if len(structures) == 1:
        return structures[0]
    flat = [flatten(structure) for structure in structures]
    tree = flat[0][1]
    for leaves, other in flat[1:]:
        check_same(tree, flat[0][0], other, leaves)
    return unflatten(tree, concat_leaves([leaves for leaves, _ in flat], tree))


def concat_leaves(parts: Sequence[Sequence[Array]], tree: Tree) -> list[Array]:
    """`concat_rows` of structures that were flattened already and compared by `check_same`."""
    columns = []
    for index, column in enumerate(zip(*parts, strict=True)):
        shapes = [leaf.shape[1:] for leaf in column]
        if shapes.count(shapes[0]) != len(shapes):
            other = next(shape for shape in shapes if shape != shapes[0])
            raise InputError(
                f"{leaf_paths(tree)[index]} has rows of shape {shapes[0]} in one batch and {other} in another, so their rows "
                "cannot share a batch. Pad them to one shape, or let `inputs` give batches of exactly --batch-size rows."
            )
        columns.append(np.concatenate(column))
    return columns


def check_same(tree: Tree, leaves: Sequence[Array], other_tree: Tree, other_leaves: Sequence[Array]) -> None:
    """Compare nesting and element types of two structures; row counts and row shapes may differ.

    Raises:
        InputError: they differ; names the first path at which they do.
    """
    if tree != other_tree:
        raise InputError(f"Batches differ in structure: {_difference(tree, other_tree, 'batch')}. Give every batch the same one.")
    for index, (leaf, other) in enumerate(zip(leaves, other_leaves, strict=True)):
        if leaf.dtype != other.dtype and not (leaf.dtype.kind == other.dtype.kind and leaf.dtype.kind in "US"):
            raise InputError(
                f"{leaf_paths(tree)[index]} is {leaf.dtype} in one batch and {other.dtype} in another. "
                "Cast it to one element type in `inputs`."
            )


def encode(structure: Structure) -> tuple[bytes, list[memoryview]]:
    """Write a structure as a header and buffers.

    Returns:
        header: bytes for `decode`; buffers: to be sent one after the other. They share memory with the arrays.

    Raises:
        InputError: an array of Python objects other than str, bytes and None; names the path.
    """
    leaves, tree = flatten(structure)
    buffers: list[memoryview] = []
    specs: list[list[Any]] = []
    offset = 0
    for index, leaf in enumerate(leaves):
        gap = -offset % _ALIGNMENT
        if gap:
            buffers.append(memoryview(bytes(gap)))
        parts = _leaf_buffers(leaf, tree, index)
        size = sum(part.nbytes for part in parts)
        specs.append([_dtype_text(leaf.dtype), list(leaf.shape), offset + gap, size])
        buffers.extend(part for part in parts if part.nbytes)
        offset += gap + size
    header = json.dumps({"tree": _tree_to_json(tree), "leaves": specs, "bytes": offset}, separators=(",", ":"))
    return header.encode(), buffers


def encoded_bytes(header: bytes) -> int:
    """Length of the buffer that belongs to a header."""
    return int(json.loads(header)["bytes"])


def decode(header: bytes, buffer: Any) -> Structure:
    """Read a structure back.

    Args:
        header: what `encode` gave.
        buffer: its buffers joined: bytes, bytearray, memoryview or uint8 array. The arrays are views of it and writable
            where it is; arrays of str and bytes objects are new.
    """
    content = json.loads(header)
    flat = np.frombuffer(buffer, dtype=np.uint8)
    leaves = [_decode_leaf(flat[start : start + size], text, tuple(shape)) for text, shape, start, size in content["leaves"]]
    return unflatten(_tree_from_json(content["tree"]), leaves)


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
    if str(tensor.dtype) != "torch.bfloat16":
        plain: Array = tensor.numpy()
        return plain
    bits: Array = tensor.contiguous().view(sys.modules["torch"].int16).numpy()
    return bits.view(_dtype_from_text("bfloat16"))


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


def _difference(tree: Tree, other: Tree, path: str) -> str:
    if tree in (LEAF, None) or other in (LEAF, None) or tree[0] != other[0]:
        return f"{path} is {_tree_text(tree)} in one and {_tree_text(other)} in another"
    keys, other_keys = _child_keys(tree), _child_keys(other)
    for key in (*keys, *other_keys):
        if (key in keys) != (key in other_keys):
            return f"{path}{key} is in one and missing in another"
    if tree[1] != other[1]:
        return f"{path} is {_tree_text(tree)} in one and {_tree_text(other)} in another"
    key, child, other_child = next((k, a, b) for k, a, b in zip(keys, tree[2], other[2], strict=True) if a != b)
    return _difference(child, other_child, path + key)


def _tree_text(tree: Tree) -> str:
    if tree == LEAF:
        return "an array"
    if tree is None:
        return "None"
    return f"a named tuple {tree[1].__name__}" if tree[0] == "named" else f"a {tree[0]}"


def _rows_problem(leaves: Sequence[Array], tree: Tree) -> str:
    named = list(zip(leaf_paths(tree), leaves, strict=True))
    for path, leaf in named:
        if leaf.ndim == 0:
            return (
                f"{path} has no rows (it is 0-d, {leaf.dtype}): every component of a batch needs one entry a row. "
                "Batch the input (`dataset.batch(n)`), or give an array of one value a row."
            )
    first_path, first = named[0]
    path, leaf = next((path, leaf) for path, leaf in named if leaf.shape[0] != first.shape[0])
    return f"{path} has {leaf.shape[0]} rows but {first_path} has {first.shape[0]}: all components of a batch need the same number."


def _dtype_text(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "V" and dtype.names is None and dtype.type is not np.void:
        return dtype.name  # bfloat16, float8_*: known by name to ml_dtypes
    return dtype.str if dtype.names is None else {"descr": np.lib.format.dtype_to_descr(dtype)}


@lru_cache(maxsize=64)
def _dtype_from_text(text: str) -> np.dtype[Any]:
    if text[0].isalpha():
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, text))
    return np.dtype(text)


def _leaf_buffers(leaf: Array, tree: Tree, index: int) -> list[memoryview]:
    if leaf.dtype.kind == "O":
        return _object_buffers(leaf, tree, index)
    if leaf.dtype.hasobject:
        raise InputError(f"{leaf_paths(tree)[index]} has the element type {leaf.dtype}: Python objects cannot be sent.")
    flat = np.ascontiguousarray(leaf).reshape(-1)
    return [memoryview(flat.view(np.uint8))] if leaf.nbytes else []


def _object_buffers(leaf: Array, tree: Tree, index: int) -> list[memoryview]:
    """Lengths (int64), then kinds (0 bytes, 1 str, 2 None), then the contents."""
    items = leaf.reshape(-1).tolist()
    kinds = bytearray(len(items))
    for position, item in enumerate(items):
        if isinstance(item, str):
            kinds[position] = 1
            items[position] = item.encode("utf-8", "surrogatepass")
        elif item is None:
            kinds[position] = 2
            items[position] = b""
        elif not isinstance(item, bytes):
            raise InputError(
                f"{leaf_paths(tree)[index]} is an array of Python objects and holds a {type(item).__qualname__}: "
                "only str, bytes and None can be sent. Use a numeric element type."
            )
    lengths = np.fromiter((len(item) for item in items), dtype="<i8", count=len(items))
    return [memoryview(lengths.tobytes()), memoryview(kinds), memoryview(b"".join(items))]


def _decode_leaf(raw: npt.NDArray[np.uint8], text: Any, shape: tuple[int, ...]) -> Array:
    if text == "|O":
        return _decode_objects(raw, shape)
    dtype = _dtype_from_text(text) if isinstance(text, str) else np.lib.format.descr_to_dtype(_tupled(text["descr"]))
    if not raw.size:
        return np.empty(shape, dtype=dtype)
    return raw.view(dtype).reshape(shape)


def _decode_objects(raw: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> Array:
    leaf = np.empty(shape, dtype=object)
    count = leaf.size
    ends = np.cumsum(raw[: 8 * count].view("<i8")).tolist()
    kinds, content = raw[8 * count : 9 * count].tolist(), raw[9 * count :].tobytes()
    flat, start = leaf.reshape(-1), 0
    for position, (kind, end) in enumerate(zip(kinds, ends, strict=True)):
        item = content[start:end]
        flat[position] = item if kind == 0 else item.decode("utf-8", "surrogatepass") if kind == 1 else None
        start = end
    return leaf


def _tupled(descr: Any) -> Any:
    """JSON has turned the tuples of a dtype description into lists."""
    if isinstance(descr, str):
        return descr
    return [(field[0], _tupled(field[1]), *(tuple(part) for part in field[2:])) for field in descr]


def _tree_to_json(tree: Tree) -> Any:
    if tree == LEAF or tree is None:
        return tree
    kind, detail, children = tree
    if kind == "named":
        detail = [detail.__module__, detail.__qualname__, list(detail._fields)]
    return [kind, detail, [_tree_to_json(child) for child in children]]


def _tree_from_json(node: Any) -> Tree:
    if node == LEAF or node is None:
        return node
    kind, detail, children = node
    if kind == "named":
        detail = _named_type(detail[0], detail[1], tuple(detail[2]))
    elif kind == "dict":
        detail = tuple(detail)
    return kind, detail, tuple(_tree_from_json(child) for child in children)


@lru_cache(maxsize=64)
def _named_type(module: str, qualname: str, fields: tuple[str, ...]) -> Any:
    """The job's own class where this process has it loaded (nothing is imported for a peer), else a stand-in."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return namedtuple(qualname.rpartition(".")[2], fields)  # type: ignore[misc]
