"""One rank's state in one epoch, and the thread that fills it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hetero import batch as batches
from hetero.data.engine import Opener, Source
from hetero.data.rebatch import Rebatcher
from hetero.data.schedule import LEFTOVER, RUNNING, Piece, Schedule, Step


@dataclass(slots=True)
class Taking:
    """What this rank takes in one step; parts that others give are None until they arrive."""

    step: int
    parts: list[Any]
    rows: int
    holds: int | None  # bytes of the rank's own full batch that it keeps in memory; None: it keeps none


@dataclass(frozen=True, slots=True)
class Giving:
    """A part of a batch that this rank gives to another in one step."""

    step: int
    to: int
    part: int
    data: Any
    holds: int | None


@dataclass(slots=True)
class EpochState:
    """One epoch as this rank sees it; guarded by the stream's lock. A step is admitted once, in order."""

    number: int
    rank: int
    schedule: Schedule
    read: dict[int, Any] = field(default_factory=dict)  # own full batches that are in no step yet
    produced: int = 0
    leftover: Any = None
    leftover_rows: int = RUNNING
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of those in `read`
    held: int = 0  # own full batches in memory
    held_bytes: int = 0
    source: Source | None = None
    may_read: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    takings: deque[Taking] = field(default_factory=deque)
    givings: deque[Giving] = field(default_factory=deque)
    arrived: dict[tuple[int, int], Any] = field(default_factory=dict)
    in_flight: int = 0
    in_flight_bytes: int = 0
    consumed: int = 0
    settled: bool = False
    left: bool = False
    cut_s: float | None = None  # when a source that will give nothing more was closed
    ended_elsewhere: bool = False
    left_after: tuple[int, ...] = ()

    def hold(self, full: Any, size: int) -> None:
        """Keep a full batch of `size` bytes that was just read."""
        self.read[self.produced] = full
        self.sizes[self.produced] = size
        self.produced += 1
        self.held += 1
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Note that a full batch is in memory no longer."""
        self.held -= 1
        self.held_bytes -= size

    def waiting_bytes(self) -> int:
        """Bytes of the full batches whose step is decided but lacks others: the oldest of those in `read`."""
        return sum(islice(self.sizes.values(), self.schedule.waiting(self.rank)))

    def admit(self, steps: list[Step]) -> bool:
        """Take newly decided steps in. Returns whether others give this rank something in them."""
        receives = False
        for step in steps:
            if step.level is not None:
                own, size = self.read.pop(step.level), self.sizes.pop(step.level)
                self.takings.append(Taking(step.index, [own], self.schedule.batch_size, size))
            else:
                receives = self._admit_shares(step) or receives
        if self.schedule.ended and not self.settled:
            self.settled = True  # what is in no step now never will be
            self.read.clear()
            self.sizes.clear()
            self.leftover = None
            sizes = (*(taking.holds for taking in self.takings), *(giving.holds for giving in self.givings))
            kept = [size for size in sizes if size is not None]
            self.held = len(kept) + self.in_flight
            self.held_bytes = sum(kept) + self.in_flight_bytes
        return receives

    def next_taking(self) -> Taking | None:
        """The next step's taking if all its parts are here."""
        if not self.takings:
            return None
        taking = self.takings[0]
        for index, part in enumerate(taking.parts):
            if part is None:
                if (taking.step, index) not in self.arrived:
                    return None
                taking.parts[index] = self.arrived.pop((taking.step, index))
        return self.takings.popleft()

    def drop(self) -> None:
        """Forget all data; the epoch is over for this rank."""
        self.left = True
        self.read.clear()
        self.sizes.clear()
        self.takings.clear()
        self.givings.clear()
        self.arrived.clear()
        self.leftover = None
        self.held = self.held_bytes = 0

    def _admit_shares(self, step: Step) -> bool:
        receives = False
        for rank, share in enumerate(step.shares):
            mine = [self._own(piece, step) if piece.owner == self.rank else None for piece in share.pieces]
            first = share.pieces[0]  # and the only one, but in the tail
            holds = self.sizes.pop(first.batch) if first.owner == self.rank and not step.tail else None
            if rank == self.rank:
                self.takings.append(Taking(step.index, mine, share.rows, holds))
                receives = any(part is None for part in mine)
                continue
            for index, piece in enumerate(share.pieces):
                if piece.owner == self.rank:
                    self.givings.append(Giving(step.index, rank, index, mine[index], holds))
        return receives

    def _own(self, piece: Piece, step: Step) -> Any:
        if piece.batch == LEFTOVER:
            return batches.slice_rows(self.leftover, piece.start, piece.stop)
        if not step.tail:
            return self.read.pop(piece.batch)
        whole = self.read[piece.batch]
        if piece.stop - piece.start == self.schedule.batch_size:
            return whole
        return batches.slice_rows(whole, piece.start, piece.stop)


def read_epoch(
    state: EpochState,
    open_source: Opener,
    accept: Callable[[EpochState, Any], bool],
    end: Callable[[EpochState, Any, int], None],
    fail: Callable[[EpochState, BaseException], None],
    *,
    ordered: bool = True,
) -> None:
    """Read one epoch's source to its end; the body of a reader thread.

    Args:
        state: whose `source` is set while it is open.
        open_source: the engine.
        accept: takes a full batch, waits for room; False: nobody wants more.
        end: takes the leftover rows and their number after the source's end.
        fail: takes what the source, or the check of its batches, raised.
        ordered: as `Rebatcher` takes it.
    """
    source: Source | None = None
    rebatcher = Rebatcher(state.schedule.batch_size, ordered=ordered)
    try:
        source = state.source = open_source(state.number)
        state.may_read.wait()
        if state.left:
            return
        for raw in source:
            for full in rebatcher.feed(raw):
                if not accept(state, full):
                    return
            if state.left:
                return
        leftover, rows = rebatcher.leftover()
        end(state, leftover, rows)
    except BaseException as error:  # a rank must hear of anything that stops its reader, SystemExit included
        fail(state, error)
    finally:
        if source is not None:
            source.close()


def batch_bytes(full: Any) -> int:
    """Bytes of a batch's arrays, text and bytes in them included."""
    size = 0
    for leaf in batches.flatten(full)[0]:
        size += leaf.nbytes
        if leaf.dtype.kind == "O":
            size += sum(len(item) for item in leaf.reshape(-1).tolist() if isinstance(item, (str, bytes)))
    return size
