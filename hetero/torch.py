"""PyTorch's door for a job's `train`: an epoch's batches as tensors, for a DataLoader or a loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero.errors import HeteroError, InputError
from hetero.structure import Array, flatten, leaf_paths, unflatten

_missing: ImportError | None = None
try:
    import torch
    from torch.utils.data import IterableDataset
except ImportError as error:
    _missing, torch, IterableDataset = error, None, object

if TYPE_CHECKING:
    from hetero.job import TrainContext

__all__ = ["BatchStream"]

_BITS = {1: np.uint8, 2: np.int16}


class BatchStream(IterableDataset):  # type: ignore[misc]
    """This rank's batches of one epoch as nested tensors; the same rows in the same order as `ctx.batches(epoch)`.

    Tensors share memory with the arrays that came in; only read-only and scattered arrays and other byte orders are
    copied. Arrays of text or bytes stay numpy arrays. A DataLoader needs `batch_size=None`, as the batches are made
    already, and turns tuples into lists, as it always does.

    Args:
        ctx: What `train` was called with.
        epoch: Counts from 0; epochs are read in order.
        with_mask: Yield `(batch, mask)`; mask: bool (batch_size,), False for rows that `--remainder pad` repeated.
        device: Where to put the tensors; None leaves them on the CPU. Copies to a GPU go through pinned memory and do
            not wait.

    Raises:
        HeteroError: PyTorch cannot be imported.
        InputError: While iterating: an epoch is read twice or from a worker of a DataLoader, or an array's element type
            is none of PyTorch's. As `ctx.batches` otherwise.

    Example:
        >>> stream = hetero.torch.BatchStream(ctx, epoch)
        >>> for images, labels in DataLoader(stream, batch_size=None, pin_memory=True): ...
    """

    def __init__(self, ctx: TrainContext, epoch: int, *, with_mask: bool = False, device: Any = None) -> None:
        if _missing is not None:
            raise HeteroError(f"PyTorch cannot be used ({_missing}): pip install torch") from _missing
        super().__init__()
        self._batches: Iterator[Any] | None = ctx.batches(epoch, with_mask=with_mask)
        self._epoch = epoch
        self._device = None if device is None else torch.device(device)
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        if os.getpid() != self._pid:
            raise InputError(_ONE_PROCESS)
        batches, self._batches = self._batches, None
        if batches is None:
            raise InputError(
                f"The stream of epoch {self._epoch} was read before; an epoch can be read once. "
                "Make a BatchStream(ctx, epoch) for each epoch."
            )
        return map(self._tensors, batches)

    def __reduce__(self) -> Any:
        raise InputError(_ONE_PROCESS)  # how a DataLoader hands it to workers that are no forks

    def _tensors(self, structure: Any) -> Any:
        leaves, tree = flatten(structure)
        try:
            return unflatten(tree, [self._placed(_tensor(leaf)) for leaf in leaves])
        except TypeError:
            for path, leaf in zip(leaf_paths(tree), leaves, strict=True):
                _check(path, leaf)
            raise

    def _placed(self, leaf: Any) -> Any:
        if self._device is None or isinstance(leaf, np.ndarray):
            return leaf
        if self._device.type == "cuda":
            leaf = leaf.pin_memory()
        return leaf.to(self._device, non_blocking=True)


_ONE_PROCESS = (
    "A BatchStream lives in the rank's process and cannot be read from a DataLoader's workers. Use num_workers=0: the "
    "data hosts do the work."
)


def _tensor(array: Array) -> Any:
    """A tensor over the array's memory where that is writable and PyTorch can read it, else over a copy."""
    if array.dtype.kind in "OSU":
        return array
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.require(array, requirements=["C", "A", "W"])  # contiguous, aligned, writable: copies only what is not
    if array.dtype.isbuiltin == 2 and hasattr(torch, array.dtype.name):  # ml_dtypes: bfloat16, float8_*
        bits = array.reshape(-1).view(_BITS[array.dtype.itemsize])
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name)).reshape(array.shape)
    return torch.from_numpy(array)


def _check(path: str, array: Array) -> None:
    try:
        _tensor(array)
    except TypeError as error:
        raise InputError(
            f"{path} has the element type {array.dtype}, which PyTorch does not have. Cast it in `inputs`."
        ) from error
