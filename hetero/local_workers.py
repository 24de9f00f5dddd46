"""Whether the spare CPUs of a trainer host are worth using for input: decided once, from what its ranks measure. Pure.

```
  watching ── ranks hardly wait, or no CPU is idle, for all of WATCH_S ──▶ decided: none
     │ they wait, and CPUs are idle
     ▼ start workers
  starting ── none serves within START_UP_S ─────────────────────────────▶ decided: stop
     │ they serve
     ▼
  trying ──── rows a second rose by more than LEAST_GAIN ────────────────▶ decided: keep
     └─────── they did not ──────────────────────────────────────────────▶ decided: stop; keep, where that loses rows
```

Watching goes on for a while, because what was prepared before training began can hide for some time that input is too
slow. A trial needs no such patience: where ranks wait, nothing is left of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

AUTO = "auto"
WARM_UP_S = 3.0
WINDOW_S = 5.0
"""Length of a measurement, if ranks take LEAST_STEPS in it; else it goes on for up to LONGEST_WINDOWS of them."""
LEAST_STEPS = 10
LONGEST_WINDOWS = 6
WATCH_S = 30.0
START_UP_S = 60.0
SETTLE_S = 2.0
LEAST_WAIT = 0.03
LEAST_GAIN = 0.03
_NEARLY = 0.1  # a CPU that is idle but for so much counts as idle
_WORTH = 0.2  # of all that a host has, where that is less than two CPUs
_LEAST_IDLE = 0.05  # CPUs; less is not worth a worker, however well it is paced


@dataclass(frozen=True)
class Sums:
    """What a rank has measured so far, without its first step.

    Attributes:
        steps, rows: Steps taken, and rows in them.
        step_s: Seconds in steps.
        wait_s: Seconds of these in which it waited for input.
    """

    steps: int
    rows: int
    step_s: float
    wait_s: float


@dataclass(frozen=True)
class Sample:
    """How things stand at one moment; all but the time are sums since the host's start.

    Attributes:
        at_s: When, monotonic seconds.
        ranks: By name, what each rank of the host has measured; those that have nothing yet are left out.
        used_s: CPU seconds of all processes of the host.
        idle_s: Seconds in which its CPUs had nothing to do, whoever might use them; None if that is not known.
    """

    at_s: float
    ranks: Mapping[str, Sums]
    used_s: float
    idle_s: float | None


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    Attributes:
        workers: How many are to run from now on.
        why: The numbers behind it.
        final: Whether it is the last decision.
    """

    workers: int
    why: str
    final: bool


@dataclass(frozen=True)
class _Pace:
    """What happened between two samples."""

    rows_per_s: float
    wait: float
    idle_cpus: float


class _Phase(Enum):
    WATCHING = "watching"
    STARTING = "starting"
    TRYING = "trying"
    DECIDED = "decided"


class Trial:
    """Decides about the local workers of one trainer host.

    Args:
        cpus: CPUs that the host's processes may use, a fraction where a quota says so.
        most: So many workers are started at most.
        may_stop: Whether workers can be stopped in mid-epoch without losing the rows that they have in hand.
        paced: Whether workers are kept within what is idle, so that one may use a part of a CPU.

    Attributes:
        workers: How many are to run now.
        measured: Rows a second of this host's ranks by number of local workers.
        why: The numbers behind that.
    """

    def __init__(self, *, cpus: float, most: int, may_stop: bool, paced: bool = False) -> None:
        self._cpus, self._most, self._may_stop, self._paced = cpus, most, may_stop, paced
        self._phase = _Phase.WATCHING
        self._began_s: float | None = None  # when this phase began, in the first sample of it
        self._window: Sample | None = None  # the first sample of this measurement
        self._before: _Pace | None = None
        self.workers = 0
        self.measured: dict[int, float] = {}
        self.why = "training ended before anything could be measured"

    @property
    def decided(self) -> bool:
        """Whether the last decision was made."""
        return self._phase is _Phase.DECIDED

    def allow(self, cpus: float, *, paced: bool) -> None:
        """Note how many CPUs the host may use from now on, and whether workers are paced: a quota can be changed."""
        self._cpus, self._paced = cpus, paced

    def give_up(self, why: str) -> None:
        """Note that workers cannot be used here: there is nothing more to decide."""
        self._phase, self.workers, self.why = _Phase.DECIDED, 0, why

    def look(self, sample: Sample, *, serving: int) -> Decision | None:
        """Take in a sample, about one a second.

        Args:
            sample: How things stand.
            serving: How many of the workers that were started can prepare input by now.

        Returns:
            What is to be done from now on; None as long as nothing changes.
        """
        if self._phase is _Phase.DECIDED or not sample.ranks:
            return None
        if self._phase is _Phase.STARTING:
            return self._await_workers(sample, serving=serving)
        if self._began_s is None:
            self._began_s = sample.at_s
        passed_s, watching = sample.at_s - self._began_s, self._phase is _Phase.WATCHING
        if self._window is None:
            self._window = sample if passed_s >= (WARM_UP_S if watching else SETTLE_S) else None
            return None
        pace = _measured(self._window, sample, self._cpus)
        if pace is None:
            return None
        self._window = sample
        return self._watch(pace, passed_s) if watching else self._judge(pace)

    def _watch(self, pace: _Pace, watched_s: float) -> Decision | None:
        waits = f"ranks wait for input {pace.wait:.1%} of the time"
        idle = f"{pace.idle_cpus:.{1 if self._cpus >= 2 else 2}f} of {self._cpus:.3g} CPUs are idle"
        self.measured[0] = pace.rows_per_s
        workers = min(self._most, self._fit(pace.idle_cpus))
        if pace.wait > LEAST_WAIT and workers > 0:
            self._before = pace
            self._enter(_Phase.STARTING)
            return self._decide(workers, f"{waits}, {idle}", final=False)
        if pace.wait <= LEAST_WAIT:
            why = f"{waits}, {LEAST_WAIT:.0%} would be worth it"
        else:
            why = f"{waits}, but {idle}{self._needs()}"
        self.why = f"{why} (so far)"
        return self._decide(0, why, final=True) if watched_s >= WATCH_S else None

    def _fit(self, idle_cpus: float) -> int:
        """Return how many workers the idle CPUs keep busy."""
        if self._paced:
            return max(0, math.ceil(idle_cpus - _LEAST_IDLE))
        if self._cpus < 2:  # one worker and training share what there is, training first
            return int(idle_cpus > _WORTH * self._cpus)
        return math.floor(idle_cpus + _NEARLY)

    def _needs(self) -> str:
        """Return what would have to be idle, as the end of a sentence."""
        if self._paced:
            return f"; {_LEAST_IDLE:g} would be worth it"
        return "; training is left one" if self._cpus >= 2 else f"; {_WORTH:.0%} of them would be worth it"

    def _await_workers(self, sample: Sample, *, serving: int) -> Decision | None:
        if self._began_s is None:
            self._began_s = sample.at_s
        late = sample.at_s - self._began_s > START_UP_S
        if serving >= self.workers or (late and serving):
            self._enter(_Phase.TRYING)
        elif late:
            return self._decide(0, f"none of them was ready within {START_UP_S:.0f} s", final=True)
        return None

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._began_s, self._window = phase, None, None

    def _judge(self, pace: _Pace) -> Decision:
        assert self._before is not None  # noqa: S101  a trial begins with it
        before = self._before.rows_per_s
        self.measured[self.workers] = pace.rows_per_s
        gain = pace.rows_per_s / before - 1 if before > 0 else math.inf
        why = f"{before:.0f} rows/s before, {pace.rows_per_s:.0f} rows/s with them ({gain:+.1%})"
        if gain > LEAST_GAIN:
            return self._decide(self.workers, why, final=True)
        why += f", less than {LEAST_GAIN:.0%} more"
        if self._may_stop:
            return self._decide(0, why, final=True)
        return self._decide(self.workers, f"{why}, but stopping them would lose the rows in their hands", final=True)

    def _decide(self, workers: int, why: str, *, final: bool) -> Decision:
        self.workers, self.why = workers, why
        if final:
            self._phase = _Phase.DECIDED
        return Decision(workers, why, final)


def _measured(first: Sample, last: Sample, cpus: float) -> _Pace | None:
    """Return what happened between two samples, None if that is too little to go by."""
    seconds = last.at_s - first.at_s
    steps = rows_per_s = wait = 0.0
    ranks = [(last.ranks[name], before) for name, before in first.ranks.items() if name in last.ranks]
    moved = [(now, before) for now, before in ranks if now.steps > before.steps and now.step_s > before.step_s]
    if moved and len(moved) == len(ranks):
        steps = min(now.steps - before.steps for now, before in moved)
        rows_per_s = sum((now.rows - before.rows) / (now.step_s - before.step_s) for now, before in moved)
        wait = sum((now.wait_s - before.wait_s) / (now.step_s - before.step_s) for now, before in moved) / len(moved)
    enough = seconds >= WINDOW_S and steps >= LEAST_STEPS
    if not enough and not (seconds >= LONGEST_WINDOWS * WINDOW_S and steps >= 2):
        return None
    idle = cpus - (last.used_s - first.used_s) / seconds
    if first.idle_s is not None and last.idle_s is not None:
        idle = min(idle, (last.idle_s - first.idle_s) / seconds)
    return _Pace(rows_per_s, wait, max(0.0, idle))
