"""How long the steps of a rank take, and how much of that is waiting for input.

The clock of a rank:

    ask    batch 0        ask    batch 1        ask    batch 2
     |------>|-------------|------>|-------------|------>|
      start   compute       wait    compute       wait
              '---- step 0 --------''---- step 1 --------'

A step lasts from one batch handed over to the next; its wait is the part between the request for the next batch and its
arrival. The last step of an epoch waits for its stream to end and for the first batch of the next epoch; what the job
does between two epochs (evaluation, checkpoints) belongs to no step. The first step of a run, in which graphs are
traced, is written to the file but left out of every statistic.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from hetero.rundir import write_json_atomic

EVENT_MARK = "\x1e"
"""First character of a progress line that is meant for a program (ASCII record separator)."""


class MeasuredBatch(Protocol):
    """What the meter needs of a batch: `mask`, bool (rows,), False where a row only fills up."""

    @property
    def mask(self) -> Any:
        """Which rows are real."""


BatchT = TypeVar("BatchT", bound=MeasuredBatch)


@dataclass(frozen=True)
class MeterResult:
    """What one rank measured in one run; times of steps leave out the first step.

    Attributes:
        steps: Steps taken, the first one included.
        rows: Rows trained on by this rank; rows that only fill up a batch are not counted.
        step_ms: `mean`, `p50`, `p95` of a step, or all None when fewer than two steps were taken.
        input_wait_fraction: Part of the step time spent waiting for input, 0 to 1, or None.
        rows_per_s: Rows of this rank in a second of step time, or None.
        first_batch_s: From the launcher's start until the first batch was handed over, or None.
        first_step_s: From the launcher's start until the first step, tracing included, was done, or None.
        train_s: From the first batch handed over to the end of training, evaluation included.
    """

    steps: int
    rows: int
    step_ms: dict[str, float | None]
    input_wait_fraction: float | None
    rows_per_s: float | None
    first_batch_s: float | None
    first_step_s: float | None
    train_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


@dataclass
class _Step:
    """A step that has begun and whose next batch has not come yet."""

    number: int
    epoch: int
    rows: int
    began_s: float
    compute_s: float = 0.0
    wait_s: float = 0.0
    shown_wait_s: float | None = None
    """The wait that a progress line has shown already, None before the step was part of one."""


@dataclass
class _Window:
    """Sums since the last progress line."""

    steps: int = 0
    rows: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0

    def add(self, step: _Step) -> None:
        self.steps += 1
        self.rows += step.rows
        self.step_s += step.compute_s + step.wait_s
        self.wait_s += step.wait_s


class StepMeter:
    """Measure one rank's steps over all its epochs.

    Args:
        metrics: File for one JSON line a step; None on every rank but the first.
        epochs: Epochs of the run where known, for the progress shown.
        size: Number of ranks: progress lines show the rows of all of them, which take equal steps.
        progress: "plain" (lines that metric definitions can match), "events" (for a program), "off" (every rank but the
            first).
        started_at: When the launcher started, seconds since 1970; None leaves `first_step_s` out.
        interval_s: Least time between two plain progress lines in mid-epoch; events come up to ten times as often.
        sums: File that gets the sums over all finished steps but the first, `steps, rows, step_s, wait_s`, at most once
            a second; None writes none.
        emit: Where progress lines go.
        device: Describes the simulated accelerator that the steps are taken on, for the end of each plain progress
            line; None where there is none.
        clock: Monotonic seconds.
        wall: Seconds since 1970.
    """

    def __init__(
        self,
        *,
        metrics: Path | None = None,
        epochs: int | None = None,
        size: int = 1,
        progress: str = "plain",
        started_at: float | None = None,
        interval_s: float = 5.0,
        sums: Path | None = None,
        emit: Callable[[str], None] | None = None,
        device: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if progress not in ("plain", "events", "off"):
            raise ValueError(f'progress is {progress!r}; it must be "plain", "events" or "off"')
        self._epochs, self._size, self._progress = epochs, size, progress
        self._interval_s = interval_s / 10 if progress == "events" else interval_s
        self._emit = emit if emit is not None else _print_line
        self._device = device
        self._clock, self._wall, self._started_at = clock, wall, started_at
        self._file = _MetricsFile(metrics, clock) if metrics is not None else None
        self._logged: dict[str, Any] = {}
        self._pending: _Step | None = None
        self._steps = self._rows = 0
        self._step_ms = array("d")
        self._total, self._window = _Window(), _Window()
        self._steps_per_epoch: int | None = None
        self._first_batch_at: float | None = None
        self._first_step_s: float | None = None
        self._first_batch_s: float | None = None
        self._ended_at: float | None = None
        self._sums = sums
        self._shown_at = self._sums_at = clock()

    def batches(self, epoch: int, batches: Iterable[BatchT]) -> Iterator[BatchT]:
        """Hand on the batches of one epoch, measuring.

        Args:
            epoch: Number of the epoch, from 0.
            batches: The epoch's batches; how long its `next` takes is the wait.

        Yields:
            Each batch unchanged.
        """
        source = iter(batches)
        taken = 0
        while True:
            asked = self._clock()
            if taken:
                self._end_compute(asked)
            batch = next(source, None)
            now = self._clock()
            if self._pending is not None and (batch is not None or taken):
                self._pending.wait_s += now - asked
            if batch is None:
                break
            self._begin_step(epoch, batch, now)
            taken += 1
            if now - self._shown_at >= self._interval_s:
                self._show(epoch, taken)
            try:
                yield batch
            except GeneratorExit:  # the job leaves the epoch early
                self._end_compute(self._clock())
                raise
        if taken:
            self._steps_per_epoch = taken
            self._show(epoch, taken, with_pending=True)
        if self._file is not None:
            self._file.flush()

    def log(self, **values: Any) -> None:
        """Add what the job measured to the line of the current step; numpy and TensorFlow scalars become numbers."""
        self._logged.update({name: _plain(value) for name, value in values.items()})

    def lengthen(self, seconds: float) -> None:
        """Count these seconds to the step that ended last: its loop had left the epoch, its device was not done."""
        if self._pending is not None:
            self._pending.compute_s += seconds

    def close(self) -> None:
        """End the measuring and write what is left. May be repeated; a broken-off step is not counted."""
        if self._ended_at is not None:
            return
        self._ended_at = self._clock()
        step, self._pending = self._pending, None
        if step is not None and step.compute_s > 0:
            self._finish_step(step)
        if self._file is not None:
            if self._logged:
                self._file.write(self._logged)
            self._file.close()

    def result(self) -> MeterResult:
        """Return the figures so far; after `close` they are final."""
        total, timed = self._total, self._total.steps > 0
        ended = self._ended_at if self._ended_at is not None else self._clock()
        return MeterResult(
            steps=self._steps,
            rows=self._rows,
            step_ms={
                "mean": 1000 * total.step_s / total.steps if timed else None,
                "p50": _quantile(self._step_ms, 0.50),
                "p95": _quantile(self._step_ms, 0.95),
            },
            input_wait_fraction=total.wait_s / total.step_s if timed and total.step_s > 0 else None,
            rows_per_s=total.rows / total.step_s if timed and total.step_s > 0 else None,
            first_batch_s=self._first_batch_s,
            first_step_s=self._first_step_s,
            train_s=ended - self._first_batch_at if self._first_batch_at is not None else None,
        )

    def _end_compute(self, now: float) -> None:
        if self._pending is not None:
            self._pending.compute_s = now - self._pending.began_s
        if self._first_step_s is None and self._started_at is not None:
            self._first_step_s = self._wall() - self._started_at

    def _begin_step(self, epoch: int, batch: MeasuredBatch, now: float) -> None:
        if self._pending is not None:
            self._finish_step(self._pending)
            self._write_sums(now)
        rows = int(batch.mask.sum())
        if self._first_batch_at is None:
            self._first_batch_at = now
            if self._started_at is not None:
                self._first_batch_s = self._wall() - self._started_at
        self._pending = _Step(self._steps, epoch, rows, now)
        self._steps += 1
        self._rows += rows

    def _finish_step(self, step: _Step) -> None:
        if step.number > 0:
            self._step_ms.append(1000 * (step.compute_s + step.wait_s))
            self._total.add(step)
            if step.shown_wait_s is None:
                self._window.add(step)
            else:  # the wait for an epoch's first batch, shown with that epoch
                self._window.step_s += step.wait_s - step.shown_wait_s
                self._window.wait_s += step.wait_s - step.shown_wait_s
        if self._file is not None:
            step_ms, wait_ms = 1000 * (step.compute_s + step.wait_s), 1000 * step.wait_s
            line = {"step": step.number, "epoch": step.epoch, "rows": step.rows}
            self._file.write(line | {"step_ms": round(step_ms, 3), "wait_ms": round(wait_ms, 3)} | self._logged)
        self._logged = {}

    def _write_sums(self, now: float) -> None:
        if self._sums is None or self._total.steps == 0 or now - self._sums_at < 1.0:
            return
        self._sums_at = now
        with contextlib.suppress(OSError):  # a full disk: whoever reads them decides without
            write_json_atomic(self._sums, asdict(self._total))

    def _show(self, epoch: int, taken: int, *, with_pending: bool = False) -> None:
        """Print one progress line about the steps since the last one."""
        self._shown_at = self._clock()
        window, self._window = self._window, _Window()
        if with_pending and self._pending is not None and self._pending.number > 0:
            window.add(self._pending)  # the epoch's last step: only the wait for the next epoch is missing
            self._pending.shown_wait_s = self._pending.wait_s
        if window.steps == 0:
            self._window = window  # a wait without its step: it is shown with the next line
        if self._progress == "off" or (window.steps == 0 and self._progress == "plain"):
            return
        timed = window.steps > 0 and window.step_s > 0
        rows_per_s = window.rows * self._size / window.step_s if timed else 0.0
        if self._progress == "plain":
            step_ms, wait_ms = 1000 * window.step_s / window.steps, 1000 * window.wait_s / window.steps
            self._emit(
                f"hetero_step_ms={step_ms:.2f} hetero_wait_ms={wait_ms:.2f} hetero_rows_per_s={rows_per_s:.1f} "
                f"epoch={epoch + 1} step={taken}" + (f" {self._device()}" if self._device is not None else "")
            )
            return
        event = {
            "epoch": epoch,
            "epochs": self._epochs,
            "step": taken,
            "steps_per_epoch": self._steps_per_epoch,
            "rows": self._rows * self._size,
            "rows_per_s": round(rows_per_s, 1),
            "step_ms": round(1000 * window.step_s / window.steps, 3) if timed else None,
            "wait_fraction": round(window.wait_s / window.step_s, 4) if timed else None,
            "epoch_ended": with_pending,
            "simulated": self._device is not None,
        }
        self._emit(EVENT_MARK + json.dumps(event))


class _MetricsFile:
    """JSON lines, flushed about each second, so that a killed rank loses a second of them at most."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1 << 16)
        self._clock, self._flushed_at = clock, clock()

    def write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            self._give_up(error)
            return
        if self._clock() - self._flushed_at >= 1.0:
            self.flush()

    def flush(self) -> None:
        if self._file is None:
            return
        self._flushed_at = self._clock()
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        """Training goes on without the file: a full disk is no reason to lose the model."""
        file, self._file = self._file, None
        name = file.name if file is not None else "the metrics"
        _print_line(f"hetero: cannot write {name}: {error}; no more steps are written there")
        try:
            if file is not None:
                file.close()
        except OSError:
            pass  # closing flushes once more and fails for the same reason


def _quantile(values: array[float], part: float) -> float | None:
    """Return the smallest value that at least `part` of all values do not exceed (nearest rank)."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def _plain(value: Any) -> Any:
    """Return a scalar of any framework as a Python value; JSON has no NaN, so that becomes None."""
    item = getattr(value, "numpy", None)
    if callable(item):
        value = item()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the job may have closed stdout
        print(line, flush=True)
