"""Fences: before a split is handed out again every rank refuses its old batches and says which it has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetero import bitmap
from hetero.control.split_epoch import Fence

FENCE_SPLITS = 256
"""Splits in one fence; what has arrived of them must fit into one answer."""


@dataclass
class Pending:
    """A fence, the ranks that have not answered it, and by split the union of the answers."""

    fence: Fence
    waiting: set[int]
    arrived: dict[int, bytes] = field(default_factory=dict)


class Fences:
    """The fences that not all ranks have answered.

    Args:
        first_id: Ids begin above it; no earlier coordinator may have used them.
    """

    def __init__(self, first_id: int) -> None:
        self._id = first_id
        self._pending: dict[int, Pending] = {}

    def raise_(self, epoch: int, attempt: int, splits: Sequence[int], ranks: Iterable[int]) -> list[Pending]:
        """Begin fences for splits; each waits for the given ranks."""
        begun = []
        for start in range(0, len(splits), FENCE_SPLITS):
            self._id += 1
            fence = Fence(self._id, epoch, attempt, splits[start : start + FENCE_SPLITS])
            self._pending[self._id] = Pending(fence, set(ranks))
            begun.append(self._pending[self._id])
        return begun

    def unanswered(self, rank: int) -> list[Fence]:
        """Return the fences that wait for a rank."""
        return [pending.fence for pending in self._pending.values() if rank in pending.waiting]

    def answer(self, rank: int, fence_id: int, arrived: Mapping[int, bytes]) -> None:
        """Take a rank's answer; one to a fence that is over is ignored."""
        pending = self._pending.get(fence_id)
        if pending is None or rank not in pending.waiting:
            return
        pending.waiting.discard(rank)
        for split, batches in arrived.items():
            pending.arrived[split] = bitmap.union(pending.arrived.get(split, b""), batches)

    def excuse(self, rank: int) -> None:
        """Wait for a rank no longer."""
        for pending in self._pending.values():
            pending.waiting.discard(rank)

    def drop(self, epoch: int) -> None:
        """Forget the fences of an epoch that is over."""
        for fence_id in [i for i, pending in self._pending.items() if pending.fence.epoch == epoch]:
            del self._pending[fence_id]

    def take_answered(self) -> list[Pending]:
        """Return, and forget, the fences that all ranks have answered."""
        answered = [i for i, pending in self._pending.items() if not pending.waiting]
        return [self._pending.pop(fence_id) for fence_id in answered]
