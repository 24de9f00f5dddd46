"""When workers run under a quota, beside a kernel that is acted: periods, CPU time given out, throttling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hetero.process.pace import FIRST_MARGIN, LEAST_MARGIN, LONGEST_PAUSE_S, MOST_MARGIN, Look, Pace

PERIOD_S, STEP_S = 0.1, 0.0005


@dataclass
class Kernel:
    """A group with a quota: workers that use all they get while they may run, and others.

    Attributes:
        quota: CPUs; infinite for none.
        speed: CPUs that the workers use while they run.
        others: CPUs that others want at a time.
        offset_s: When its periods begin.
        late_s: How much later than asked for each look comes.
        extra_s: Throttled seconds that it says there were in each second, whatever happens.
    """

    quota: float = 0.4
    speed: float = 1.0
    others: Callable[[float], float] = lambda _: 0.0
    offset_s: float = 0.0
    late_s: float = 0.0
    extra_s: float = 0.0
    now_s: float = 1000.0
    used_s: float = 3.0
    workers_s: float = 2.0
    periods: int = 7
    throttled_s: float = 0.0
    waited_s: float = 0.0  # for which others wanted a CPU and got none
    runs: list[float] = field(default_factory=list)  # when workers ran
    _left_s: float = 0.0
    _period: int = -1

    def run(self, pace: Pace, seconds: float, *, burst: float | None = None) -> None:
        """Let time pass, and do what the pace says."""
        end_s, due_s, running = self.now_s + seconds, self.now_s, True
        while self.now_s < end_s:
            if self.now_s >= due_s:
                look = Look(self.now_s, self.used_s, self.workers_s, self.periods, self.throttled_s)
                verdict = pace.look(look, burst_cpus=self.speed if burst is None else burst)
                running = verdict.run
                due_s = self.now_s + verdict.again_in_s + self.late_s
            self._step(running)

    def _step(self, running: bool) -> None:
        period = math.floor((self.now_s - self.offset_s) / PERIOD_S)
        if period != self._period:
            self._period, self._left_s = period, self.quota * PERIOD_S
            self.periods += 1
        self.throttled_s += self.extra_s * STEP_S
        wanted = self.others(self.now_s)
        if self._left_s <= 0:
            self.throttled_s += STEP_S if wanted or running else 0.0
            self.waited_s += STEP_S if wanted else 0.0
            wanted, running = 0.0, False
        if running:
            self.runs.append(self.now_s)
        used_s = (wanted + (self.speed if running else 0.0)) * STEP_S
        self._left_s -= used_s
        self.used_s += used_s
        self.workers_s += self.speed * STEP_S if running else 0.0
        self.now_s += STEP_S


def pace_of(quota: float = 0.4, cap: float = math.inf) -> Pace:
    return Pace(quota_cpus=quota, period_s=PERIOD_S, cap_cpus=cap)


def used(kernel: Kernel, pace: Pace, seconds: float = 10.0, *, burst: float | None = None) -> tuple[float, float]:
    """Return the CPUs of all, and of workers, in so many seconds after the first three."""
    kernel.run(pace, 3.0, burst=burst)
    kernel.waited_s = kernel.throttled_s = 0.0
    first = (kernel.used_s, kernel.workers_s)
    kernel.run(pace, seconds, burst=burst)
    return (kernel.used_s - first[0]) / seconds, (kernel.workers_s - first[1]) / seconds


@pytest.mark.parametrize("offset_s", [0.0, 0.013, 0.05, 0.087])
@pytest.mark.parametrize(("quota", "speed"), [(0.4, 1.0), (0.4, 2.0), (1.5, 2.0), (7.5, 16.0), (0.1, 1.0)])
def test_workers_alone_use_the_quota_and_the_group_is_hardly_throttled(
    quota: float, speed: float, offset_s: float
) -> None:
    kernel = Kernel(quota, speed, offset_s=offset_s)
    all_cpus, _ = used(kernel, pace_of(quota))
    assert 0.93 * quota < all_cpus < 1.001 * quota
    assert kernel.throttled_s < 0.01 * 10


def steadily(now_s: float) -> float:
    """Want a CPU for 1 ms in each 20."""
    return 1.0 if now_s % 0.02 < 0.001 else 0.0


def now_and_then(now_s: float) -> float:
    """Want a CPU for 12 ms in each 330, at any time of a period."""
    return 1.0 if now_s % 0.33 < 0.012 else 0.0


@pytest.mark.parametrize("others", [steadily, now_and_then])
@pytest.mark.parametrize("late_s", [0.0, 0.002])
def test_others_hardly_ever_wait_and_what_they_leave_is_used(others: Callable[[float], float], late_s: float) -> None:
    kernel = Kernel(0.4, others=others, offset_s=0.03, late_s=late_s)
    all_cpus, _ = used(kernel, pace_of(), 20.0)
    assert all_cpus > 0.95 * 0.4
    assert kernel.waited_s < 0.08  # of 20 s


def test_without_a_pace_others_wait_most_of_the_time() -> None:
    kernel = Kernel(0.4, others=steadily)
    kernel.run(pace_of(math.inf), 10.0)
    assert kernel.waited_s > 0.2  # of the 0.5 s for which they wanted a CPU


def test_workers_run_last_in_each_period() -> None:
    kernel = Kernel(0.4, offset_s=0.02)
    pace = pace_of()
    kernel.run(pace, 3.0)
    kernel.runs.clear()
    kernel.run(pace, 3.0)
    early = [at_s for at_s in kernel.runs if 0.005 < (at_s - 0.02) % PERIOD_S < 0.04]
    assert len(early) < 0.02 * len(kernel.runs)


def test_workers_that_cannot_use_up_what_is_left_run_all_the_time() -> None:
    kernel = Kernel(1.5, speed=1.0)
    _, workers = used(kernel, pace_of(1.5))
    assert workers > 0.99


def test_what_others_come_to_need_is_left_to_them_at_once_and_taken_back_slowly() -> None:
    kernel = Kernel(0.4)
    pace = pace_of()
    kernel.run(pace, 3.0)
    assert pace.cpus == pytest.approx(0.4 * (1 - pace.margin), rel=0.01)
    kernel.others = lambda _: 0.2
    kernel.run(pace, 1.0)
    assert pace.others_cpus == pytest.approx(0.2, rel=0.1)
    kernel.others = lambda _: 0.0
    kernel.run(pace, 0.5)
    assert 0.1 < pace.others_cpus < 0.2
    kernel.run(pace, 10.0)
    assert pace.others_cpus < 0.01


def test_workers_give_signs_of_life_where_others_need_everything() -> None:
    kernel = Kernel(0.4, others=lambda _: 0.5)
    pace = pace_of()
    kernel.run(pace, 2.0)
    kernel.runs.clear()
    kernel.run(pace, 10.0)
    gaps = [after - before for before, after in zip(kernel.runs, kernel.runs[1:], strict=False)]
    assert max(gaps) < LONGEST_PAUSE_S + 2 * PERIOD_S
    assert len(kernel.runs) * STEP_S < 0.02 * 10.0


@pytest.mark.parametrize(("cap", "speed"), [(0.2, 1.0), (0.05, 1.0), (1.5, 4.0), (1.0, 1.0)])
def test_a_cap_holds_without_a_quota(cap: float, speed: float) -> None:
    kernel = Kernel(math.inf, speed, others=lambda _: 0.7, late_s=0.001)
    pace = pace_of(math.inf, cap)
    _, workers = used(kernel, pace)
    assert workers == pytest.approx(cap, rel=0.03)
    assert pace.cpus == pytest.approx(cap)


def test_the_tighter_of_cap_and_quota_counts() -> None:
    assert used(Kernel(0.4), pace_of(0.4, 0.1))[1] == pytest.approx(0.1, rel=0.03)
    assert used(Kernel(0.4), pace_of(0.4, 3.0))[1] == pytest.approx(0.4, rel=0.07)


def test_workers_that_are_faster_than_was_said_are_held_all_the_same() -> None:
    kernel = Kernel(0.4, speed=4.0)
    all_cpus, _ = used(kernel, pace_of(), burst=1.0)
    assert all_cpus < 1.001 * 0.4
    assert kernel.throttled_s < 0.02 * 10


def test_the_margin_grows_where_the_kernel_throttles_and_shrinks_where_not() -> None:
    kernel, pace = Kernel(0.4, extra_s=0.1), pace_of()
    kernel.run(pace, 3.0)
    assert pace.margin > FIRST_MARGIN
    kernel.run(pace, 30.0)
    assert pace.margin == MOST_MARGIN
    kernel.extra_s = 0.0
    kernel.run(pace, 150.0)
    assert pace.margin == pytest.approx(LEAST_MARGIN, rel=0.5)


def test_a_quota_that_is_set_anew_is_followed() -> None:
    kernel = Kernel(0.4, offset_s=0.01)
    pace = pace_of()
    kernel.run(pace, 3.0)
    kernel.offset_s = 0.064
    kernel._period = -1
    all_cpus, _ = used(kernel, pace)
    assert all_cpus > 0.93 * 0.4
    assert kernel.throttled_s < 0.01 * 10


def test_a_pacer_that_was_held_up_itself_goes_on_as_before() -> None:
    kernel = Kernel(0.4)
    pace = pace_of()
    kernel.run(pace, 3.0)
    kernel.now_s += 3.7
    all_cpus, _ = used(kernel, pace)
    assert all_cpus > 0.93 * 0.4
