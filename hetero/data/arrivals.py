"""What of the input has arrived at this rank, and what it refuses: the rank's part in exactly once.

A batch is known by (epoch, split, sequence). A data host that is given up may still send, while another prepares its
splits again: before they are handed out a second time every rank is told a floor, an attempt up to which their batches
are refused from then on, and answers which of them it has. No row is lost then, and none comes twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetero import bitmap

_EPOCHS_KEPT = 4


class Arrivals:
    """Bitmaps of the batches that have arrived and floors of attempts, by epoch and split. Pure; the caller locks.

    The newest epochs are remembered beyond their end: a coordinator that lost its memory asks about an epoch that
    ended at this rank and not yet at another. Memory: a bit for each batch.

    Attributes:
        highest_attempt: the greatest number of an attempt heard of, 0 at first.
    """

    def __init__(self) -> None:
        self.highest_attempt = 0
        self._epochs: dict[int, _Epoch] = {}

    def accept(self, epoch: int, split: int, sequence: int, attempt: int) -> bool:
        """Note a batch. Returns False if it came before, or is of an attempt that is refused."""
        if not self._admits(epoch, split, attempt):
            return False
        arrived = self._epoch(epoch).arrived.setdefault(split, bytearray())
        if bitmap.has(arrived, sequence):
            return False
        bitmap.add(arrived, sequence)
        return True

    def accept_end(self, epoch: int, split: int, attempt: int, batches: int) -> bool:
        """Note the end of a split: all batches below it come, and beyond it none but those that are here already.

        Returns False if the word is of an attempt that is refused.
        """
        if not self._admits(epoch, split, attempt):
            return False
        self._epoch(epoch).ends[split] = batches
        return True

    def fence(self, epoch: int, attempt: int, splits: Iterable[int]) -> dict[int, bytes]:
        """Refuse these splits' batches of attempts up to `attempt` from now on; the next one tells their ends anew.

        Returns:
            By split, the bitmap of sequences that have arrived; splits without any are left out.
        """
        self.highest_attempt = max(self.highest_attempt, attempt)
        kept, answer = self._epoch(epoch), {}
        for split in splits:
            kept.floors[split] = max(attempt, kept.floors.get(split, attempt))
            kept.ends.pop(split, None)
            arrived = kept.arrived.get(split)
            if arrived:
                answer[split] = bytes(arrived)
        return answer

    def end(self, epoch: int, split: int) -> int | None:
        """Return the end of a split, None as long as that is unknown."""
        kept = self._epochs.get(epoch)
        return None if kept is None else kept.ends.get(split)

    def has(self, epoch: int, split: int, sequence: int) -> bool:
        """Return whether a batch has arrived."""
        kept = self._epochs.get(epoch)
        return kept is not None and bitmap.has(kept.arrived.get(split, b""), sequence)

    def _admits(self, epoch: int, split: int, attempt: int) -> bool:
        self.highest_attempt = max(self.highest_attempt, attempt)
        return attempt > self._epoch(epoch).floors.get(split, -1)

    def _epoch(self, epoch: int) -> _Epoch:
        kept = self._epochs.get(epoch)
        if kept is None:
            kept = self._epochs[epoch] = _Epoch()
            for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
                del self._epochs[old]
        return kept


class _Epoch:
    """What is kept of one epoch, by split."""

    __slots__ = ("arrived", "ends", "floors")

    def __init__(self) -> None:
        self.arrived: dict[int, bytearray] = {}
        self.floors: dict[int, int] = {}
        self.ends: dict[int, int] = {}
