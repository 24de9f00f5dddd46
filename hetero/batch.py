"""Batches: nested arrays, their rows, and their form on the wire.

A batch is a structure (`hetero.structure`) in which the first axis of every array are the rows.

On the wire it is a JSON header and one run of bytes in which every array starts at a multiple of 64. `decode` gives
arrays that lie in that buffer: no copy on the receiving side, none on the sending side for contiguous arrays.
"""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.errors import InputError
from hetero.structure import (
    LEAF,
    Array,
    Structure,
    Tree,
    as_arrays,
    difference,
    dtype_from_text,
    flatten,
    leaf_paths,
    unflatten,
)

__all__ = [
    "Array",
    "LeafSpec",
    "Structure",
    "Tree",
    "as_arrays",
    "check_same",
    "concat_leaves",
    "concat_rows",
    "decode",
    "decode_leaves",
    "encode",
    "encode_leaves",
    "encoded_bytes",
    "flatten",
    "leaf_paths",
    "leaf_rows",
    "rows",
    "slice_rows",
    "tree_from_json",
    "tree_to_json",
    "unflatten",
]

_ALIGNMENT = 64
_FROM_A_LIBRARY = 2  # what numpy.dtype.isbuiltin says of types that are not NumPy's own


class LeafSpec(NamedTuple):
    """One array on the wire: `dtype` as text, and where its bytes lie in the buffer."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


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
                f"{leaf_paths(tree)[index]} has rows of shape {shapes[0]} in one batch and {other} in another, so "
                "they cannot share a batch. Pad them to one shape, or let `inputs` give batches of --batch-size rows."
            )
        columns.append(np.concatenate(column))
    return columns


def check_same(tree: Tree, leaves: Sequence[Array], other_tree: Tree, other_leaves: Sequence[Array]) -> None:
    """Compare nesting and element types of two structures; row counts and row shapes may differ.

    Raises:
        InputError: they differ; names the first path at which they do.
    """
    if tree != other_tree:
        raise InputError(
            f"Batches differ in structure: {difference(tree, other_tree, 'batch')}. Give every batch the same one."
        )
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
    specs, buffers, size = encode_leaves(leaves, tree)
    header = json.dumps({"tree": tree_to_json(tree), "leaves": specs, "bytes": size}, separators=(",", ":"))
    return header.encode(), buffers


def encode_leaves(leaves: Sequence[Array], tree: Tree) -> tuple[list[LeafSpec], list[memoryview], int]:
    """`encode` of a structure that was flattened already.

    Returns:
        One spec an array; the buffers, to be sent one after the other; how many bytes they have together.
    """
    buffers: list[memoryview] = []
    specs: list[LeafSpec] = []
    offset = 0
    for index, leaf in enumerate(leaves):
        gap = -offset % _ALIGNMENT
        if gap:
            buffers.append(memoryview(bytes(gap)))
        parts = _leaf_buffers(leaf, tree, index)
        size = sum(part.nbytes for part in parts)
        specs.append(LeafSpec(_dtype_text(leaf.dtype), leaf.shape, offset + gap, size))
        buffers.extend(part for part in parts if part.nbytes)
        offset += gap + size
    return specs, buffers, offset


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
    specs = [LeafSpec(text, tuple(shape), start, size) for text, shape, start, size in content["leaves"]]
    return decode_leaves(tree_from_json(content["tree"]), specs, buffer)


def decode_leaves(tree: Tree, specs: Sequence[LeafSpec], buffer: Any) -> Structure:
    """`decode` with a header that was read already."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    return unflatten(tree, [_decode_leaf(flat[spec.start : spec.start + spec.size], spec) for spec in specs])


def _rows_problem(leaves: Sequence[Array], tree: Tree) -> str:
    named = list(zip(leaf_paths(tree), leaves, strict=True))
    for path, leaf in named:
        if leaf.ndim == 0:
            return (
                f"{path} has no rows (it is 0-d, {leaf.dtype}): every component of a batch needs one entry a row. "
                "Batch the input (`dataset.batch(n)`), or give an array of one value a row; a Python list is taken for "
                "a nesting of components, so make it an array (np.asarray)."
            )
    first_path, first = named[0]
    path, leaf = next((path, leaf) for path, leaf in named if leaf.shape[0] != first.shape[0])
    return (
        f"{path} has {leaf.shape[0]} rows but {first_path} has {first.shape[0]}: "
        "all components of a batch need the same number. Pad rows of different lengths to one array; a Python list is "
        "taken for a nesting of components."
    )


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if dtype.isbuiltin == _FROM_A_LIBRARY:
        return dtype.name  # bfloat16, float8_*: known by name to ml_dtypes
    if dtype.names is None:
        return dtype.str
    return json.dumps(np.lib.format.dtype_to_descr(dtype))  # type: ignore[no-untyped-call]


def _leaf_buffers(leaf: Array, tree: Tree, index: int) -> list[memoryview]:
    if leaf.dtype.kind == "O":
        return _object_buffers(leaf, tree, index)
    if leaf.dtype.hasobject:
        raise InputError(f"{leaf_paths(tree)[index]} has the element type {leaf.dtype}: Python objects cannot be sent.")
    flat = np.ascontiguousarray(leaf).reshape(-1)
    return [flat.view(np.uint8).data] if leaf.nbytes else []


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


def _decode_leaf(raw: npt.NDArray[np.uint8], spec: LeafSpec) -> Array:
    if spec.dtype == "|O":
        return _decode_objects(raw, spec.shape)
    dtype = _structured_dtype(spec.dtype) if spec.dtype.startswith("[") else dtype_from_text(spec.dtype)
    if not raw.size:
        return np.empty(spec.shape, dtype=dtype)
    return raw.view(dtype).reshape(spec.shape)


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


@lru_cache(maxsize=64)
def _structured_dtype(text: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_tupled(json.loads(text)))  # type: ignore[no-untyped-call]
    return dtype


def _tupled(descr: Any) -> Any:
    """JSON has turned the tuples of a dtype description into lists."""
    if isinstance(descr, str):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _tupled(inner), *(tuple(part) for part in shape))
        for name, inner, *shape in descr  # a name is a pair if the field has a title
    ]


def tree_to_json(tree: Tree) -> Any:
    """Return a tree as JSON values; named tuples by module, name and fields."""
    if tree == LEAF or tree is None:
        return tree
    kind, detail, children = tree
    if kind == "named":
        detail = [detail.__module__, detail.__qualname__, list(detail._fields)]
    return [kind, detail, [tree_to_json(child) for child in children]]


def tree_from_json(node: Any) -> Tree:
    """Return the tree that `tree_to_json` wrote."""
    if node == LEAF or node is None:
        return node
    kind, detail, children = node
    if kind == "named":
        detail = _named_type(detail[0], detail[1], tuple(detail[2]))
    elif kind == "dict":
        detail = tuple(detail)
    return kind, detail, tuple(tree_from_json(child) for child in children)


@lru_cache(maxsize=64)
def _named_type(module: str, qualname: str, fields: tuple[str, ...]) -> Any:
    """The job's own class where this process has it loaded (nothing is imported for a peer), else a stand-in."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return namedtuple(qualname.rpartition(".")[2], fields)  # noqa: PYI024 - the fields are known only now
