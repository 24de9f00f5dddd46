"""Which rank takes which rows in which step, so that all ranks take the same number of steps.

Ranks do not get equal shares from their sources, yet one that takes a step more or less than the others blocks them.
Every rank computes the same schedule from what all ranks have read so far:

- Rank r reads n_r full batches and l_r rows that fill none. Level j holds the j-th batch of every rank with n_r > j.
- The batches queue level by level, within a level by rank. Every `size` of them are one step. In a step a rank keeps
  a batch of its own if the step has one (the first); the others go, in order, to the ranks without.
- The batches that fill no step, then the rows left over by rank 0, 1, ..., are the tail: cut into whole steps as far as
  they go. Of what remains, fewer than size x batch_size rows, nothing is used ("drop"), or it is spread evenly over the
  ranks as one more step ("pad").

While all sources give, each level is one step in which every rank keeps its own batch: nothing moves between ranks.
A level is decided as soon as every rank has read past it or has ended; the result does not depend on when ranks tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEFTOVER = -1
RUNNING = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start..stop-1 of a full batch of `owner`, or of its leftover rows (batch = LEFTOVER)."""

    owner: int
    batch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes in one step: its pieces joined; `rows` of it count. With rows = 0 its one row only fills."""

    pieces: tuple[Piece, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all ranks.

    Attributes:
        index: 0, 1, ... within the epoch.
        level: every rank keeps its own batch of this number; None: see `shares`.
        shares: one for each rank; empty if `level` says it all.
        tail: made of batches and rows that filled no ordinary step.
    """

    index: int
    level: int | None
    shares: tuple[Share, ...] = ()
    tail: bool = False


class Schedule:
    """Decides the steps of one epoch as the ranks' reports come in.

    Args:
        size: number of ranks.
        batch_size: rows a rank takes in one step.
        pad: use the last rows, filled up, rather than dropping them.

    Attributes:
        steps: steps decided so far.
        ended: the epoch has no steps beyond these.
        total_rows: rows of the epoch over all ranks, known when `ended`.
        dropped_rows: rows that no step uses, known when `ended`.
    """

    def __init__(self, size: int, batch_size: int, pad: bool) -> None:
        self.size = size
        self.batch_size = batch_size
        self.pad = pad
        self.steps = 0
        self.ended = False
        self.total_rows = 0
        self.dropped_rows = 0
        self._levels = 0
        self._queue: deque[tuple[int, int]] = deque()  # (level, rank), fewer than `size`

    def update(self, counts: Sequence[int], leftovers: Sequence[int]) -> list[Step]:
        """Take the newest state of all ranks and give the steps that it decides.

        Args:
            counts: full batches read by each rank so far.
            leftovers: rows each rank had left at its end, RUNNING while it has not ended.
        """
        if self.ended:
            return []
        decided: list[Step] = []
        running = [count for count, rows in zip(counts, leftovers, strict=True) if rows == RUNNING]
        for level in range(self._levels, min(running) if running else max(counts)):
            self._levels = level + 1
            members = [rank for rank, count in enumerate(counts) if count > level]
            if len(members) == self.size and not self._queue:
                decided.append(self._step(level))
                continue
            self._queue.extend((level, rank) for rank in members)
            while len(self._queue) >= self.size:
                entries = [self._queue.popleft() for _ in range(self.size)]
                decided.append(self._step(None, self._assign([self._whole(entry) for entry in entries])))
        if not running:
            self.ended = True
            self.total_rows = sum(counts) * self.batch_size + sum(leftovers)
            decided.extend(self._tail(leftovers))
        return decided

    def waiting(self, rank: int) -> int:
        """Batches of a rank that are decided but in no step yet, because the step lacks others."""
        return sum(1 for _, owner in self._queue if owner == rank)

    def _step(self, level: int | None, shares: tuple[Share, ...] = (), tail: bool = False) -> Step:
        step = Step(self.steps, level, shares, tail)
        self.steps += 1
        return step

    def _whole(self, entry: tuple[int, int]) -> Share:
        level, rank = entry
        return Share((Piece(rank, level, 0, self.batch_size),), self.batch_size)

    def _assign(self, shares: Iterable[Share]) -> tuple[Share, ...]:
        """Give each rank one of `size` shares: its own whole batch where there is one, the others in order."""
        taken: dict[int, Share] = {}
        others: deque[Share] = deque()
        for share in shares:
            first = share.pieces[0]
            if len(share.pieces) == 1 and first.batch != LEFTOVER and first.owner not in taken:
                taken[first.owner] = share
            else:
                others.append(share)
        return tuple(taken[rank] if rank in taken else others.popleft() for rank in range(self.size))

    def _tail(self, leftovers: Sequence[int]) -> list[Step]:
        pieces = deque(self._whole(entry).pieces[0] for entry in self._queue)
        self._queue.clear()
        pieces.extend(Piece(rank, LEFTOVER, 0, rows) for rank, rows in enumerate(leftovers) if rows)
        rows = sum(piece.stop - piece.start for piece in pieces)
        steps = []
        while rows >= self.size * self.batch_size:
            cut = [Share(_cut(pieces, self.batch_size), self.batch_size) for _ in range(self.size)]
            steps.append(self._step(None, self._assign(cut), tail=True))
            rows -= self.size * self.batch_size
        if rows and self.pad:
            steps.append(self._step(None, self._spread(pieces, rows), tail=True))
        elif rows:
            self.dropped_rows = rows
        return steps

    def _spread(self, pieces: deque[Piece], rows: int) -> tuple[Share, ...]:
        """Even parts of the last rows; a rank without any gets one that does not count, to fill its batch with."""
        head = pieces[0]
        filler = Piece(head.owner, head.batch, head.start, head.start + 1)
        shares = []
        for rank in range(self.size):
            count = (rank + 1) * rows // self.size - rank * rows // self.size
            shares.append(Share(_cut(pieces, count) if count else (filler,), count))
        return tuple(shares)


def _cut(pieces: deque[Piece], rows: int) -> tuple[Piece, ...]:
    """Take the first `rows` rows from the front of a queue of pieces."""
    taken = []
    while rows:
        piece = pieces.popleft()
        used = min(rows, piece.stop - piece.start)
        taken.append(Piece(piece.owner, piece.batch, piece.start, piece.start + used))
        if piece.start + used < piece.stop:
            pieces.appendleft(Piece(piece.owner, piece.batch, piece.start + used, piece.stop))
        rows -= used
    return tuple(taken)
