"""When local workers run within each period of a CPU quota, so that others always find their part in it. Pure.

Under a quota priority is of no help: whoever runs first uses up the period's CPU time, and then nobody of the group
runs until the next period begins, a training loop that wakes up meanwhile included. So workers are paused, and run
last. In each period there is left for them

    quota - what all have used since it began - what others are likely to need until it ends - a margin

and they begin just so early that this is used up when the period ends. Whoever else wants a CPU before finds the
whole quota, and whatever goes wrong keeps others waiting only until the next period, which is about to begin. Where the
workers cannot use up what is left, they run all the time.

The kernel's periods are followed (`nr_periods` in `cpu.stat`). Its accounts are not exact: each CPU takes CPU time
from the quota in slices of 5 ms, and what runs at this moment is counted at the next tick. Hence the margin, which
grows where the group is throttled all the same, and shrinks slowly where it is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LONGEST_PAUSE_S = 0.5
"""After so long workers run for LEAST_RUN_S when a period begins, whatever is left: they have to give signs of life."""
LEAST_RUN_S = 0.004
LEAST_MARGIN, MOST_MARGIN, FIRST_MARGIN = 0.02, 0.3, 0.03
"""Parts of the quota."""
_MOST_THROTTLED = 0.01  # of the time; the margin grows where it is more
_MARGIN_GROWS, _MARGIN_SHRINKS, _JUDGE_S = 1.3, 0.95, 1.0
_RISE, _FALL = 0.5, 0.05  # of the difference, in each period
_EARLIER, _LATER, _MOST_LEAD = 0.5, 0.1, 0.4
_SOONEST_S, _LATEST_S = 0.001, 0.050  # between two looks at workers that run
_UNSURE_S = 0.0005  # between a count and its time
_SHARP_S = 0.003  # a boundary between two periods known so well is good enough
_MOST_DEBT = 2.0  # periods


class Look(NamedTuple):
    """How things stand at one moment; all but the time are sums since some moment in the past.

    Attributes:
        at_s: When, monotonic seconds.
        used_s: CPU seconds of all that the quota is for.
        workers_s: CPU seconds of the workers, which are part of it.
        periods: How many periods the kernel has counted.
        throttled_s: Seconds for which it kept the group from running.
    """

    at_s: float
    used_s: float
    workers_s: float
    periods: int = 0
    throttled_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What is to be done.

    Attributes:
        run: Whether the workers may run.
        again_in_s: When to look again, seconds.
    """

    run: bool
    again_in_s: float


class Pace:
    """Decides when workers run.

    Args:
        quota_cpus: CPUs that the quota leaves the group; infinite where there is none.
        period_s: Length of its periods, seconds.
        cap_cpus: CPUs that workers may use at most on average; infinite where only the quota counts.

    Attributes:
        margin: Part of the quota that is left alone.
        others_cpus: CPUs that others are taken to need.
    """

    def __init__(self, *, quota_cpus: float, period_s: float, cap_cpus: float = math.inf) -> None:
        self._quota_s, self._cap_s, self._period_s = quota_cpus * period_s, cap_cpus * period_s, period_s
        self._periods = _Periods(period_s)
        self.margin = FIRST_MARGIN if math.isfinite(quota_cpus) else 0.0
        self.others_cpus = 0.0
        self._last: Look | None = None
        self._start: Look  # how things stood when this period began
        self._judged: Look
        self._debt_s = self._cap_debt_s = 0.0
        self._running = True
        self._ran_s = 0.0  # when workers ran last
        self._run_s = 0.0  # for how long they have run in this period
        self._speed = 0.0  # CPUs that they use while they run
        self._lead_s = 0.0  # how much earlier they begin than should be needed
        self._early_s = 0.0  # how long before this period's end they had used up what there was

    @property
    def cpus(self) -> float:
        """CPUs that workers may use now."""
        quota_cpus = self._quota_s * (1 - self.margin) / self._period_s
        return max(0.0, min(self._cap_s / self._period_s, quota_cpus - self.others_cpus))

    def look(self, now: Look, *, burst_cpus: float = 1.0) -> Verdict:
        """Take in how things stand, and say what follows.

        Args:
            now: How things stand.
            burst_cpus: CPUs that workers which run are likely to use at once.
        """
        if self._last is None:
            self._last = self._start = self._judged = now
            self._ran_s = now.at_s
        last, self._last = self._last, now
        self._periods.see(last.at_s, now.at_s, turned=now.periods != last.periods)
        start_s = self._periods.start_s(now.at_s)
        if self._running:
            self._ran_s = now.at_s
            self._run_s += now.at_s - last.at_s
        if start_s > self._start.at_s + self._period_s / 2:
            self._turn(_between(last, now, start_s))
            self._run_s = now.at_s - start_s if self._running else 0.0
        if now.at_s - self._judged.at_s >= _JUDGE_S:
            self._judge(now)
        return self._decide(now, start_s + self._period_s, burst_cpus)

    def _decide(self, now: Look, end_s: float, burst_cpus: float) -> Verdict:
        left_s, to_end_s = self._left_s(now, end_s), end_s - now.at_s
        if now.at_s - self._ran_s >= LONGEST_PAUSE_S and to_end_s > 0.9 * self._period_s:  # there is plenty now
            self._running = True
            return Verdict(run=True, again_in_s=LEAST_RUN_S)
        speed = max(self._speed, 0.1 * burst_cpus) if self._speed else burst_cpus
        enough = left_s > _SOONEST_S / 2 * burst_cpus
        lead_s = self._lead_s if enough else 0.0
        if self._running and not enough:
            self._early_s = max(self._early_s, to_end_s)
        self._running = enough and left_s / speed + lead_s >= to_end_s - _SOONEST_S
        if self._running:
            again_s = min(_LATEST_S, left_s / max(burst_cpus, self._speed))
        else:  # when the rest of the period is just enough to use up what there will be if others use nothing
            again_s = (to_end_s * speed - left_s) / (speed + self.others_cpus) - lead_s
            again_s = max(2 * _SOONEST_S, again_s)
        at_s = min(now.at_s + max(_SOONEST_S, again_s), self._periods.next_s(now.at_s))
        return Verdict(self._running, max(_SOONEST_S / 2, at_s - now.at_s))

    def _left_s(self, now: Look, end_s: float) -> float:
        """Return the CPU seconds that workers may use before this period ends."""
        others_s = self.others_cpus * max(0.0, end_s - now.at_s)
        left_s = self._quota_s * (1 - self.margin) - self._debt_s - (now.used_s - self._start.used_s) - others_s
        return min(left_s, self._cap_s - self._cap_debt_s - (now.workers_s - self._start.workers_s))

    def _turn(self, start: Look) -> None:
        """Begin a period."""
        periods = max(1, round((start.at_s - self._start.at_s) / self._period_s))
        used_s, workers_s = start.used_s - self._start.used_s, start.workers_s - self._start.workers_s
        others_cpus = max(0.0, used_s - workers_s) / periods / self._period_s
        rate = _RISE if others_cpus > self.others_cpus else _FALL
        self.others_cpus += (1 - (1 - rate) ** periods) * (others_cpus - self.others_cpus)
        if self._run_s > LEAST_RUN_S:
            speed = workers_s / self._run_s
            self._speed += (_RISE if speed > self._speed else _FALL) * (speed - self._speed)
        self._aim(used_s, workers_s, periods)
        self._debt_s = _debt(self._debt_s + used_s, self._quota_s, periods)
        self._cap_debt_s = _debt(self._cap_debt_s + workers_s, self._cap_s, periods)
        self._start = start

    def _aim(self, used_s: float, workers_s: float, periods: int) -> None:
        """Have workers begin earlier where a period ended before they had used up what there was, later where not."""
        unused_s = min(
            self._quota_s * (1 - self.margin) * periods - self._debt_s - used_s,
            self._cap_s * periods - self._cap_debt_s - workers_s,
        )
        if self._running and self._speed > 0:
            self._lead_s += _EARLIER * max(0.0, unused_s) / self._speed
        self._lead_s -= _LATER * self._early_s
        self._lead_s = min(_MOST_LEAD * self._period_s, max(0.0, self._lead_s))
        self._early_s = 0.0

    def _judge(self, now: Look) -> None:
        """Adjust the margin to what the kernel did."""
        part = (now.throttled_s - self._judged.throttled_s) / (now.at_s - self._judged.at_s)
        self._judged = now
        if math.isfinite(self._quota_s):
            margin = self.margin * (_MARGIN_GROWS if part > _MOST_THROTTLED else _MARGIN_SHRINKS)
            self.margin = min(MOST_MARGIN, max(LEAST_MARGIN, margin))


class _Periods:
    """Where the kernel's periods begin, from counts of them seen before and after.

    Args:
        period_s: Length of one, seconds.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._low_s = self._high_s = -math.inf  # one began between these

    def see(self, before_s: float, now_s: float, *, turned: bool) -> None:
        """Take in whether a period began between two moments.

        That none was counted says nothing: the kernel counts none while nobody wants a CPU.
        """
        if not math.isfinite(self._high_s):
            self._low_s, self._high_s = now_s - self._period_s, now_s
        if not turned or now_s - before_s > self._period_s / 2:
            return
        before_s, now_s = before_s - _UNSURE_S, now_s + _UNSURE_S
        shift_s = round((now_s - self._high_s) / self._period_s) * self._period_s
        low_s, high_s = max(before_s, self._low_s + shift_s), min(now_s, self._high_s + shift_s)
        # Where the two disagree the quota has been set anew.
        self._low_s, self._high_s = (low_s, high_s) if low_s < high_s else (before_s, now_s)

    def start_s(self, now_s: float) -> float:
        """Return when the present period began, at the latest."""
        return self._high_s + math.floor((now_s - self._high_s) / self._period_s) * self._period_s

    def next_s(self, now_s: float) -> float:
        """Return when it is worth looking for the next one."""
        end_s = self.start_s(now_s) + self._period_s
        width_s = self._high_s - self._low_s
        middle_s = end_s - width_s / 2
        return middle_s if width_s > _SHARP_S and middle_s > now_s else end_s


def _between(first: Look, last: Look, at_s: float) -> Look:
    """Return how things stood at a moment between two looks, if all went on evenly."""
    part = (at_s - first.at_s) / (last.at_s - first.at_s) if last.at_s > first.at_s else 1.0
    part = min(1.0, max(0.0, part))
    used_s = first.used_s + part * (last.used_s - first.used_s)
    return last._replace(
        at_s=at_s, used_s=used_s, workers_s=first.workers_s + part * (last.workers_s - first.workers_s)
    )


def _debt(used_s: float, allowed_s: float, periods: int) -> float:
    """Return what was used too much, CPU seconds; what was not used is lost."""
    if not math.isfinite(allowed_s):
        return 0.0
    return min(_MOST_DEBT * allowed_s, max(0.0, used_s - allowed_s * periods))
