"""Batches of one exact size from raw batches of any sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from hetero import batch as batches
from hetero.errors import InputError


class Rebatcher:
    """Cuts and joins raw batches into batches of `batch_size` rows.

    A raw batch that has the size already is handed on as it is; larger ones are cut as views; only rows from several
    raw batches are copied, once. Memory: less than one batch, plus the raw batch at hand.

    Args:
        batch_size: rows of every batch that `feed` gives.
        ordered: keep the rows in order. Otherwise a raw batch that has the size is handed on although rows of earlier
            ones are pending: in order, one short batch would have all that follow cut and joined, and so copied.
    """

    def __init__(self, batch_size: int, *, ordered: bool = True) -> None:
        self.batch_size = batch_size
        self.ordered = ordered
        self._pieces: deque[tuple[list[batches.Array], int, int]] = deque()  # leaves, first row, rows
        self._pending = 0
        self._tree: batches.Tree = None
        self._sample: list[batches.Array] | None = None
        self._dtypes: list[Any] = []

    def feed(self, raw: Any) -> Iterator[Any]:
        """Take one raw batch and give the full batches that it completes.

        Raises:
            InputError: components disagree in rows, or the structure differs from the first batch's; names the path.
        """
        leaves, tree = batches.flatten(raw)
        count = batches.leaf_rows(leaves, tree)
        self._check(leaves, tree)
        if count == self.batch_size and not (self.ordered and self._pending):
            yield batches.unflatten(tree, leaves)
            return
        if count:
            self._pieces.append((leaves, 0, count))
            self._pending += count
        while self._pending >= self.batch_size:
            yield self._take(self.batch_size)

    def leftover(self) -> tuple[Any, int]:
        """The rows that fill no batch, and how many; (None, 0) if there are none. Ends the use of this object."""
        count = self._pending
        return (self._take(count), count) if count else (None, 0)

    def _take(self, count: int) -> Any:
        parts: list[list[batches.Array]] = []
        self._pending -= count
        while count:
            leaves, start, have = self._pieces.popleft()
            used = min(have, count)
            parts.append([leaf[start : start + used] for leaf in leaves])
            if used < have:
                self._pieces.appendleft((leaves, start + used, have - used))
            count -= used
        return batches.unflatten(self._tree, parts[0] if len(parts) == 1 else batches.concat_leaves(parts, self._tree))

    def _check(self, leaves: list[batches.Array], tree: batches.Tree) -> None:
        dtypes = [leaf.dtype for leaf in leaves]
        if self._sample is None:
            self._tree, self._dtypes = tree, dtypes
            self._sample = [leaf[:0] for leaf in leaves]
        elif tree != self._tree or dtypes != self._dtypes:
            batches.check_same(self._tree, self._sample, tree, leaves)


def fill(structure: Any, rows: int, batch_size: int) -> Any:
    """Repeat the first `rows` rows of a structure, in turn, until it has `batch_size`."""
    leaves, tree = batches.flatten(structure)
    index = [row % rows for row in range(batch_size)]
    return batches.unflatten(tree, [leaf[index] for leaf in leaves])


def joined(parts: list[Any]) -> Any:
    """The rows of parts that may come from several ranks.

    Raises:
        InputError: the ranks' structures differ.
    """
    try:
        return batches.concat_rows(parts)
    except InputError as error:
        raise InputError(f"The last rows of several ranks do not fit together. {error}") from error
