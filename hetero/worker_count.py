"""How many workers a data host is to have under `grpc`: found by trying, in the first seconds of training. Pure.

```
  watching ── CPUs used up, or ranks have enough, for all of WATCH_S ─────▶ decided: as many as there are
     │ a rank would take a batch, none is finished, all workers are at work, and CPUs are idle
     ▼ start as many again
  starting ── none of them serves within START_UP_S ──────────────────────▶ decided: without them
     │ they serve
     ▼
  trying ──── this host's rows a second rose by more than LEAST_GAIN ─────▶ once more, if CPUs are idle still
     └─────── they did not, twice ────────────────────────────────────────▶ decided: without them
```

Inputs that compute need as many workers as there are CPUs, which is what a host begins with. Inputs that wait, for
disks or networks, leave CPUs idle, and workers that wait add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

WARM_UP_S = 2.0
WINDOW_S = 3.0
"""Length of a measurement, if LEAST_BATCHES arrive in it; else it goes on for up to LONGEST_WINDOWS of them."""
LEAST_BATCHES = 20
LONGEST_WINDOWS = 6
WATCH_S = 30.0
START_UP_S = 60.0
SETTLE_S = 1.0
LEAST_SHORT = 0.5
"""Either workers are what all wait for, and then nearly all the time, or they are not."""
LEAST_IDLE = 0.3
"""Of its CPUs: a host on a busy machine gets less than its quota, and what it lacks looks idle."""
LEAST_GAIN = 0.03
_HARDLY = 0.05  # of a worker
_WAITING = 0.25
"""A worker that uses less of a CPU waits for something else: it gets the little it needs on a busy machine too."""
_REFUSALS = 2
"""The end of an epoch, at which workers run out of splits, may fall into one measurement, but hardly into two."""


@dataclass(frozen=True)
class Figures:
    """What the host's feed has counted; sums since its start.

    Attributes:
        feed_id: Names this start of the feed.
        at_s: When, on the feed's clock.
        rows, batches: That have arrived at ranks.
        short_s: Seconds in which a rank would have taken a batch and none was finished, with all workers at work.
    """

    feed_id: str
    at_s: float
    rows: int
    batches: int
    short_s: float


@dataclass(frozen=True)
class Sample:
    """How things stand at one moment.

    Attributes:
        at_s: When, monotonic seconds.
        used_s: CPU seconds of all processes of the host so far.
        idle_s: Seconds in which its CPUs had nothing to do, whoever might use them; None if that is not known.
        cpus: That its processes may use now, a fraction where a quota says so.
        feed: What its feed has counted; None if it has said nothing yet.
        room: So many more workers there is memory for.
    """

    at_s: float
    used_s: float
    idle_s: float | None
    cpus: float
    feed: Figures | None
    room: int


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
    short: float
    cpus: float
    used_cpus: float
    idle_cpus: float


class _Phase(Enum):
    WATCHING = "watching"
    STARTING = "starting"
    TRYING = "trying"
    DECIDED = "decided"


class Growth:
    """Decides about the workers of one data host.

    Args:
        workers: How many it begins with.
        most: So many it has at most.

    Attributes:
        workers: How many are to run now.
        measured: Rows a second of this host by number of workers.
        why: The numbers behind the last decision.
    """

    def __init__(self, *, workers: int, most: int) -> None:
        self._most = most
        self._phase = _Phase.WATCHING
        self._kept = workers
        self._began_s: float | None = None  # when this phase began, in the first sample of it
        self._window: Sample | None = None  # the first sample of this measurement
        self._refusals = 0
        self.workers = workers
        self.measured: dict[int, float] = {}
        self.why = "training ended before anything could be measured"

    @property
    def decided(self) -> bool:
        """Whether the last decision was made."""
        return self._phase is _Phase.DECIDED

    @property
    def kept(self) -> int:
        """How many there are but for those that are only being tried."""
        return self._kept

    def give_up(self, why: str) -> Decision:
        """Do without those that are being tried: there is nothing more to decide."""
        return self._decide(self._kept, why, final=True)

    def look(self, sample: Sample, *, serving: int) -> Decision | None:
        """Take in a sample, about one a second.

        Args:
            sample: How things stand.
            serving: How many workers of the host can prepare input by now.

        Returns:
            What is to be done from now on; None as long as nothing changes.
        """
        if self._phase is _Phase.DECIDED or sample.feed is None or not sample.feed.batches:
            return None
        if self._began_s is None:
            self._began_s = sample.at_s
        passed_s = sample.at_s - self._began_s
        if self._phase is _Phase.STARTING:
            return self._await_workers(passed_s, serving)
        window, watching = self._window, self._phase is _Phase.WATCHING
        if window is None or window.feed is None or window.feed.feed_id != sample.feed.feed_id:
            self._window = sample if passed_s >= (WARM_UP_S if watching else SETTLE_S) else None
            return None
        seconds, batches = sample.feed.at_s - window.feed.at_s, sample.feed.batches - window.feed.batches
        too_long = seconds >= LONGEST_WINDOWS * WINDOW_S
        if not (seconds >= WINDOW_S and batches >= LEAST_BATCHES) and not too_long:
            return None
        self._window = sample
        if batches < 2:  # an evaluation, or a step that takes minutes
            return None
        pace = _measured(window, sample, self.workers)
        return self._watch(pace, sample.room, passed_s) if watching else self._judge(pace, sample.room)

    def _watch(self, pace: _Pace, room: int, watched_s: float) -> Decision | None:
        self.measured[self.workers] = pace.rows_per_s
        enough = self._why_enough(pace, room)
        if enough is None:
            return self._try_more(pace, room)
        self.why = f"{enough} (so far)"
        return self._decide(self.workers, enough, final=True) if watched_s >= WATCH_S else None

    def _why_enough(self, pace: _Pace, room: int) -> str | None:
        """Return why more workers would not help, None if they might."""
        if pace.short <= LEAST_SHORT:
            return f"ranks wait for this host {pace.short:.0%} of the time, above {LEAST_SHORT:.0%} more are tried"
        if pace.idle_cpus <= LEAST_IDLE * pace.cpus:
            return f"{pace.used_cpus:.2f} of {pace.cpus:.3g} CPUs are used, {pace.idle_cpus:.2f} are idle"
        if self.workers >= self._most:
            return f"{self._most} is the most that a host with {pace.cpus:.3g} CPUs tries"
        return "there is no memory for more" if room < 1 else None

    def _try_more(self, pace: _Pace, room: int) -> Decision:
        each = pace.used_cpus / self.workers
        # As many again; fewer where that would be more than fill the CPUs.
        wanted = self.workers + max(
            1, min(self.workers, math.ceil((pace.cpus - pace.used_cpus) / max(each, 1e-3) - _HARDLY))
        )
        self._kept = self.workers
        self._enter(_Phase.STARTING)
        why = f"ranks wait for this host, {pace.idle_cpus:.2f} of {pace.cpus:.3g} CPUs are idle"
        return self._decide(min(wanted, self._most, self.workers + room), why, final=False)

    def _await_workers(self, passed_s: float, serving: int) -> Decision | None:
        late = passed_s > START_UP_S
        if serving >= self.workers or (late and serving > self._kept):
            self._refusals = 0
            self._enter(_Phase.TRYING)
        elif late:
            return self._decide(self._kept, f"no further one was ready within {START_UP_S:.0f} s", final=True)
        return None

    def _judge(self, pace: _Pace, room: int) -> Decision | None:
        before = self.measured[self._kept]
        now = self.measured[self.workers] = max(pace.rows_per_s, self.measured.get(self.workers, 0.0))
        gain = now / before - 1 if before > 0 else math.inf
        why = f"{before:.0f} rows/s with {self._kept}, {now:.0f} rows/s with {self.workers} ({gain:+.1%})"
        if gain <= LEAST_GAIN:
            self._refusals += 1
            if self._refusals < _REFUSALS:
                return None
            return self._decide(self._kept, f"{why}, less than {LEAST_GAIN:.0%} more", final=True)
        self._kept = self.workers
        enough = self._why_enough(pace, room)
        return (
            self._try_more(pace, room) if enough is None else self._decide(self.workers, f"{why}; {enough}", final=True)
        )

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._began_s, self._window = phase, None, None

    def _decide(self, workers: int, why: str, *, final: bool) -> Decision:
        self.workers, self.why = workers, why
        if final:
            self._phase = _Phase.DECIDED
        return Decision(workers, why, final)


def _measured(first: Sample, last: Sample, workers: int) -> _Pace:
    """Return what happened between two samples of one feed with so many workers."""
    assert first.feed is not None and last.feed is not None  # noqa: S101, PT018  the caller saw to it
    seconds, feed_s = max(last.at_s - first.at_s, 1e-3), last.feed.at_s - first.feed.at_s
    used = (last.used_s - first.used_s) / seconds
    idle = last.cpus - used
    if first.idle_s is not None and last.idle_s is not None and used > _WAITING * workers:
        idle = min(idle, (last.idle_s - first.idle_s) / seconds)
    rows_per_s = (last.feed.rows - first.feed.rows) / feed_s
    return _Pace(rows_per_s, (last.feed.short_s - first.feed.short_s) / feed_s, last.cpus, used, max(0.0, idle))
