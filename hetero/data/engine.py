"""What an input engine gives to the layers above it, and what these give to a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Source(Protocol):
    """The raw batches of one rank in one epoch. One thread iterates it, once."""

    def __iter__(self) -> Iterator[Any]:
        """Give nested structures over arrays with any number of rows, 0 included."""
        ...

    def close(self) -> None:
        """Let go of everything. Never raises, may be repeated and may come while another thread waits in `next`."""
        ...

    def is_stuck(self, *, ended_elsewhere: bool) -> bool:
        """Whether nothing will ever come although the end was not reached. Called from the consumer's thread.

        Args:
            ended_elsewhere: Whether another rank's source of this epoch has ended.
        """
        ...


class Opener(Protocol):
    """Opens the source of one epoch; called in the reader's thread and allowed to block."""

    def __call__(self, epoch: int) -> Source:
        """Open it; what this raises reaches the consumer."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank takes in one step.

    Attributes:
        data: nested structure of arrays with exactly batch_size rows. The arrays may be read-only.
        mask: bool (batch_size,); False marks rows that only fill up the last step of an epoch (`--remainder pad`).
        rows: rows of the input in this batch, `mask.sum()`; may be 0 in the last step of an epoch.
    """

    data: Any
    mask: npt.NDArray[np.bool_]
    rows: int
