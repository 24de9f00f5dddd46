"""A running digest of the batches that training is given: two runs with the same one had the same input."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hetero import batch as batches
from hetero.data.engine import Batch
from hetero.structure import LEAF


class Digest:
    """BLAKE2b over batches in order: nesting, element types, shapes, contents and mask of each.

    It depends on nothing else, such as how rows reached the rank or where a named tuple's class was defined.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)

    def add(self, batch: Batch) -> None:
        """Take the next batch.

        Raises:
            InputError: it holds Python objects other than str, bytes and None; names the path.
        """
        leaves, tree = batches.flatten(batch.data)
        specs, buffers, _ = batches.encode_leaves(leaves, tree)
        head = json.dumps([batch.rows, _nesting(tree), [[*spec] for spec in specs]], separators=(",", ":")).encode()
        self._hash.update(len(head).to_bytes(8, "little") + head)  # specs tell the lengths of the buffers
        for buffer in buffers:
            self._hash.update(buffer)
        self._hash.update(batch.mask.tobytes())

    def hexdigest(self) -> str:
        """Return the digest of all batches so far, 64 characters."""
        return self._hash.hexdigest()


def _nesting(tree: Any) -> Any:
    if tree == LEAF or tree is None:
        return tree
    kind, detail, children = tree
    if kind == "named":
        detail = [detail.__name__, *detail._fields]
    return [kind, detail, [_nesting(child) for child in children]]
