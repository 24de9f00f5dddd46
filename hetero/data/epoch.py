"""The layer that all engines share: exact batches, and the same number of steps on every rank.

A thread reads the rank's own source into full batches and tells the exchange how many there are. When the reports of
all ranks decide a step (`schedule.py`), each rank keeps its own batch for it or, near the end of an epoch and wherever
sources are uneven, gives one to a rank that has none. Memory of a rank: at most `prefetch_batches` full batches of its
own (one more in the reader's hand, and up to one a rank while a step waits for batches), and at most `prefetch_batches`
that others give. Its own are fewer if they would take more than `prefetch_bytes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hetero.data.digest import Digest
from hetero.data.engine import Batch, Opener
from hetero.data.exchange import POLL_S, Exchange, Frontier, PeerLeft
from hetero.data.reader import EpochState, Taking, batch_bytes, read_epoch
from hetero.data.rebatch import fill, joined
from hetero.data.schedule import RUNNING, Schedule
from hetero.errors import DataServiceLost, HeteroError, InputError

_CLOSE_S = 1.0
_CUT_S = 10.0


def _no_check() -> None:
    """Find nothing wrong."""


class InputStream:
    """The batches of one rank, epoch by epoch. Starts a thread for each epoch that is read; `close` ends them.

    Args:
        open_source: the engine: gives the rank's raw batches of an epoch.
        batch_size: rows of every batch.
        rank: this rank.
        size: number of ranks.
        exchange: this rank's; None if size is 1. Whoever made it closes it, after this stream.
        remainder: the last rows of an epoch, fewer than a step of all ranks: "drop" or "pad".
        prefetch_batches: full batches read ahead, at least 1.
        prefetch_bytes: no more are read ahead than these bytes hold, but always one; None: any.
        ordered: keep the rows of the source in order; otherwise raw batches of the right size are not copied.
        digest: keep a digest of all batches handed out.
        check: called at least every 0.5 s while waiting; raises if there is no use in waiting.
        epochs: number of epochs if known; the next epoch's source is then opened as soon as this one's has given a
            batch, and read when this one's has ended.

    Attributes:
        dropped_rows: rows, over all ranks, that finished epochs did not use.
    """

    def __init__(
        self,
        open_source: Opener,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        exchange: Exchange | None = None,
        *,
        remainder: str = "drop",
        prefetch_batches: int = 4,
        prefetch_bytes: int | None = None,
        ordered: bool = True,
        digest: bool = False,
        check: Callable[[], None] = _no_check,
        epochs: int | None = None,
    ) -> None:
        if batch_size < 1 or prefetch_batches < 1 or remainder not in ("drop", "pad") or not 0 <= rank < size:
            raise ValueError(f"{batch_size=}, {prefetch_batches=}, {remainder=}, {rank=}, {size=}: one is out of range")
        if size > 1 and exchange is None:
            raise ValueError(f"{size} ranks need an exchange")
        self.dropped_rows = 0
        self._open_source = open_source
        self._batch_size, self._rank, self._size = batch_size, rank, size
        self._exchange = exchange if size > 1 else None
        self._pad, self._prefetch, self._prefetch_bytes = remainder == "pad", prefetch_batches, prefetch_bytes
        self._ordered, self._digest = ordered, Digest() if digest else None
        self._check, self._number_of_epochs = check, epochs
        self._full_mask = np.ones(batch_size, dtype=np.bool_)
        self._full_mask.flags.writeable = False
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)  # the consumer's
        self._room = threading.Condition(self._lock)  # the readers'
        self._states: dict[int, EpochState] = {}
        self._early: dict[int, Frontier] = {}  # of epochs that other ranks have begun before this one
        self._failures: dict[int, HeteroError] = {}
        self._threads: list[threading.Thread] = []
        self._last_begun = -1
        self._closed = False
        if self._exchange is not None:
            self._exchange.attach(self)

    @property
    def digest(self) -> str | None:
        """Digest of all batches handed out so far, in hexadecimal; None if none is kept."""
        return None if self._digest is None else self._digest.hexdigest()

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch. Each epoch is read once, in ascending order; stopping early leaves it for good.

        If one rank stops early all must, after the same step.

        Raises (from the iterator):
            InputError: the epoch has no rows, or too few for one step; or a batch breaks the contract.
            DataServiceLost: the source says that nothing will come any more.
            PeerInputFailed, PeerLeft, ExchangeLost: another rank failed, left before this step, or is gone.
            HeteroError: the stream was closed or a later epoch begun.
            Whatever the source or `check` raised.
        """
        state = self._begin(epoch)
        return self._iterate(state)

    def close(self) -> None:
        """Leave the epoch at hand and end the threads. May be repeated.

        A source that blocks for ever keeps its thread, a daemon; it is waited for only a second.
        """
        with self._lock:
            self._closed = True
            states = list(self._states.values())
        for state in states:
            self._leave(state)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def on_frontier(self, frontier: Frontier) -> None:
        """Hear what all ranks have read (called by the exchange)."""
        with self._lock:
            state = self._states.get(frontier.epoch)
            if state is not None:
                self._apply(state, frontier)
            elif frontier.epoch > self._last_begun:
                self._early[frontier.epoch] = frontier

    def on_parcel(self, epoch: int, step: int, part: int, data: Any) -> None:
        """Take a part of a batch from another rank (called by the exchange)."""
        with self._lock:
            state = self._states.get(epoch)
            if state is not None and not state.left:
                state.arrived[step, part] = data
                self._ready.notify_all()

    def on_failure(self, epoch: int, error: HeteroError) -> None:
        """Hear that an epoch (-1: any) cannot be finished (called by the exchange)."""
        with self._lock:
            self._failures.setdefault(epoch, error)
            self._ready.notify_all()

    def _begin(self, epoch: int) -> EpochState:
        with self._lock:
            if epoch <= self._last_begun:
                raise HeteroError(
                    f"Epoch {epoch} was begun before (newest: {self._last_begun}): each can be read once, in order."
                )
            past = [state for number, state in self._states.items() if number < epoch]
        for state in past:
            self._leave(state)
        with self._lock:
            self._last_begun = epoch
            self._early = {number: frontier for number, frontier in self._early.items() if number >= epoch}
            state = self._open(epoch)
            state.may_read.set()
            return state

    def _open(self, epoch: int) -> EpochState:
        """The state of an epoch, its reader started; needs the lock.

        The reader opens the source at once, and reads when it may: while its rank is still busy with the epoch before,
        the data hosts already build the pipeline and prepare the first batches of this one.
        """
        if self._closed:
            raise HeteroError(f"Epoch {epoch} cannot be read: the input stream was closed.")
        if epoch not in self._states:
            state = EpochState(epoch, self._rank, Schedule(self._size, self._batch_size, self._pad))
            self._states[epoch] = state
            arguments = (state, self._open_source, self._accept, self._end, self._fail)
            body = partial(read_epoch, *arguments, ordered=self._ordered)
            thread = threading.Thread(target=body, name=f"hetero-input-{epoch}", daemon=True)
            self._threads = [thread, *(other for other in self._threads if other.is_alive())]
            if epoch in self._early:
                self._apply(state, self._early.pop(epoch))
            thread.start()
        return self._states[epoch]

    def _iterate(self, state: EpochState) -> Iterator[Batch]:
        try:
            while (taking := self._take(state)) is not None:
                yield self._batch(taking)
                del taking  # or the batch would outlive its step
            self.dropped_rows += state.schedule.dropped_rows
        finally:
            self._leave(state)

    def _take(self, state: EpochState) -> Taking | None:
        """The next step's taking, None after the last; waits for it."""
        checked_s = time.monotonic()
        while True:
            with self._lock:
                taking = self._try_take(state)
                if taking is not None:
                    return taking
                if state.left:
                    raise HeteroError(
                        f"Epoch {state.number} was left: the input stream was closed or a later epoch begun."
                    )
                if state.schedule.ended and not state.takings and not state.in_flight:
                    self._check_finished(state)
                    return None
                self._check_hopeful(state)
                self._ready.wait(POLL_S)
            if time.monotonic() - checked_s >= POLL_S:
                checked_s = time.monotonic()
                self._check()
                self._check_not_stuck(state)

    def _try_take(self, state: EpochState) -> Taking | None:
        taking = state.next_taking()
        if taking is not None:
            state.consumed += 1
            if taking.holds is not None:
                state.release(taking.holds)
                self._room.notify_all()
            if state.givings:
                self._give(state)
        return taking

    def _batch(self, taking: Taking) -> Batch:
        data = taking.parts[0] if len(taking.parts) == 1 else joined(taking.parts)
        mask = self._full_mask
        if taking.rows != self._batch_size:
            data = fill(data, max(taking.rows, 1), self._batch_size)
            mask = np.arange(self._batch_size) < taking.rows
        batch = Batch(data, mask, taking.rows)
        if self._digest is not None:
            self._digest.add(batch)
        return batch

    def _check_finished(self, state: EpochState) -> None:
        if state.number in self._failures:  # perhaps of a batch that this rank gave and another could not take
            raise self._failures[state.number]
        if state.schedule.steps:
            return
        ranks = "the rank" if self._size == 1 else f"all {self._size} ranks"
        if not state.schedule.total_rows:
            raise InputError(
                f"Epoch {state.number} has no rows: the input of {ranks} was empty. "
                "Check the channel's files, the splits and what `inputs` filters out."
            )
        raise InputError(
            f"Epoch {state.number} has {state.schedule.total_rows} rows over {ranks}, fewer than one step needs "
            f"({self._size} ranks x {self._batch_size} rows). Lower --batch-size, or use --remainder pad."
        )

    def _check_hopeful(self, state: EpochState) -> None:
        """Raise if the step waited for cannot come."""
        if state.error is not None:
            raise state.error
        failure = self._failures.get(state.number) or self._failures.get(-1)
        if failure is not None:
            raise failure
        if state.schedule.ended and not state.takings:
            return  # no step is waited for, only that what this rank gives is on its way
        for rank, steps in enumerate(state.left_after):
            if rank != self._rank and 0 <= steps <= state.consumed:
                raise PeerLeft(
                    f"Rank {rank} left epoch {state.number} after {steps} steps while rank {self._rank} waits for step "
                    f"{state.consumed + 1}. All must take the same number of steps: stop early on all ranks or on none."
                )

    def _check_not_stuck(self, state: EpochState) -> None:
        source = state.source
        if source is None or state.leftover_rows != RUNNING:
            return
        if state.cut_s is None and source.is_stuck(ended_elsewhere=state.ended_elsewhere):
            print(
                f"warning: the input of rank {self._rank} stopped in epoch {state.number} without an end: a data host "
                "is lost, and the rows that it had in hand with it, or this host's clock was set back. It ends here.",
                flush=True,
            )
            state.cut_s = time.monotonic()
            source.close()  # wakes the reader, which takes that for the end
        elif state.cut_s is not None and time.monotonic() - state.cut_s > _CUT_S:
            error = DataServiceLost(
                f"The input of rank {self._rank} stopped in epoch {state.number}, and its reader cannot be woken. "
                "See the data hosts' logs for why their workers ended."
            )
            self._fail(state, error)
            raise error

    def _leave(self, state: EpochState) -> None:
        with self._lock:
            if state.left:
                return
            state.drop()
            state.may_read.set()
            self._states.pop(state.number, None)
            self._room.notify_all()
            self._ready.notify_all()
            if self._exchange is not None:
                self._exchange.leave(state.number, state.consumed)
            reading = state.leftover_rows == RUNNING and state.error is None
        if reading and state.source is not None:
            state.source.close()

    def _accept(self, state: EpochState, full: Any) -> bool:
        size = 0 if self._prefetch_bytes is None else batch_bytes(full)
        with self._lock:
            while not state.left and not self._has_room(state, size):
                self._room.wait()
            if state.left:
                return False
            state.hold(full, size)
            self._report(state)
            if state.produced == 1:
                self._open_following(state.number + 1)
        return True

    def _open_following(self, epoch: int) -> None:
        if self._number_of_epochs is not None and epoch < self._number_of_epochs and not self._closed:
            self._open(epoch)

    def _has_room(self, state: EpochState, size: int) -> bool:
        # Batches in a step that still lacks others do not count: the step may need more of this rank's to be complete.
        held = sum(other.held for other in self._states.values()) - state.schedule.waiting(self._rank)
        if held <= 0 or self._prefetch_bytes is None:
            return held < self._prefetch
        held_bytes = sum(other.held_bytes for other in self._states.values()) - state.waiting_bytes()
        return held < self._prefetch and held_bytes + size <= self._prefetch_bytes

    def _end(self, state: EpochState, leftover: Any, rows: int) -> None:
        with self._lock:
            if state.left:
                return
            state.leftover, state.leftover_rows = leftover, rows
            self._report(state)
            self._open_following(state.number + 1)
            if state.number + 1 in self._states:
                self._states[state.number + 1].may_read.set()

    def _fail(self, state: EpochState, error: BaseException) -> None:
        with self._lock:
            if state.left or state.error is not None:
                return
            state.error = error
            self._ready.notify_all()
        if self._exchange is not None:
            text = f"{type(error).__name__}: {error}"
            self._exchange.fail(state.number, text, error.exit_code if isinstance(error, HeteroError) else 1)

    def _report(self, state: EpochState) -> None:
        if self._exchange is not None:
            self._exchange.report(state.number, state.produced, state.leftover_rows)
        else:
            self._admit(state, (state.produced,), (state.leftover_rows,))

    def _apply(self, state: EpochState, frontier: Frontier) -> None:
        state.left_after = frontier.left_after
        others = (leftover for rank, leftover in enumerate(frontier.leftovers) if rank != self._rank)
        state.ended_elsewhere = any(leftover != RUNNING for leftover in others)
        self._admit(state, frontier.batches, frontier.leftovers)

    def _admit(self, state: EpochState, counts: tuple[int, ...], leftovers: tuple[int, ...]) -> None:
        if state.left:
            return
        if state.admit(state.schedule.update(counts, leftovers)) and self._exchange is not None:
            self._exchange.expect_parcels()
        if state.givings:
            self._give(state)
        self._room.notify_all()
        self._ready.notify_all()

    def _give(self, state: EpochState) -> None:
        """Send what others take in the next steps; not more, for it waits in rank 0's memory and in theirs."""
        exchange = self._exchange
        while exchange is not None and state.givings and state.givings[0].step < state.consumed + self._prefetch:
            giving = state.givings.popleft()
            state.in_flight += 1
            state.in_flight_bytes += giving.holds or 0

            def sent(holds: int | None = giving.holds) -> None:
                with self._lock:
                    state.in_flight -= 1
                    state.in_flight_bytes -= holds or 0
                    if holds is not None and not state.left:
                        state.release(holds)
                    self._room.notify_all()
                    self._ready.notify_all()

            exchange.send(state.number, giving.step, to=giving.to, part=giving.part, data=giving.data, done=sent)
