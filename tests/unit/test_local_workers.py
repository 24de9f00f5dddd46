"""What `--local-workers auto` decides, from tables of what ranks measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from hetero.local_workers import (
    LONGEST_WINDOWS,
    SETTLE_S,
    START_UP_S,
    WARM_UP_S,
    WATCH_S,
    WINDOW_S,
    Decision,
    Sample,
    Sums,
    Trial,
)

TIED = "but stopping them would lose the rows in their hands"


@dataclass
class Host:
    """A trainer host whose ranks take steps at some pace."""

    step_s: float = 0.1
    wait: float = 0.5
    used_cpus: float = 0.5
    idle_cpus: float | None = None
    rows: int = 8
    ranks: int = 1
    at_s: float = 1000.0
    sums: dict[str, list[float]] = field(default_factory=dict)
    used_s: float = 7.0
    idle_s: float = 50.0

    def second(self) -> Sample:
        """Let a second pass."""
        self.at_s += 1.0
        self.used_s += self.used_cpus
        self.idle_s += self.idle_cpus or 0.0
        for rank in range(self.ranks):
            sums = self.sums.setdefault(f"rank-{rank}", [0.0, 0.0])
            sums[0] += 1.0
            sums[1] += self.wait
        steps = {name: int(sums[0] / self.step_s) for name, sums in self.sums.items()}
        ranks = {
            name: Sums(steps[name], steps[name] * self.rows, steps[name] * self.step_s, sums[1])
            for name, sums in self.sums.items()
            if steps[name]
        }
        return Sample(self.at_s, ranks, self.used_s, None if self.idle_cpus is None else self.idle_s)


def decisions(trial: Trial, host: Host, seconds: float, *, serving: int = 0) -> Iterator[tuple[float, Decision]]:
    """Yield each decision and the second of `seconds` in which it was made."""
    for second in range(1, int(seconds) + 1):
        decision = trial.look(host.second(), serving=serving)
        if decision is not None:
            yield second, decision


def trial(cpus: int = 4, *, may_stop: bool = True) -> Trial:
    return Trial(cpus=cpus, most=cpus - 1, may_stop=may_stop)


def started(host: Host, cpus: int = 4, *, may_stop: bool = True) -> Trial:
    """Return a trial that has just had its workers started."""
    one = trial(cpus, may_stop=may_stop)
    assert [decision.final for _, decision in decisions(one, host, 12)] == [False]
    return one


def test_it_starts_with_none_and_says_what_is_known() -> None:
    one = trial()
    assert (one.workers, one.decided) == (0, False)
    assert one.why == "training ended before anything could be measured"
    assert one.look(Sample(0.0, {}, 0.0, None), serving=0) is None


@pytest.mark.parametrize(
    ("cpus", "used", "idle", "workers"),
    [
        (8, 0.5, None, 7),  # 7.5 idle, and training is left one
        (8, 3.4, None, 4),
        (8, 0.5, 2.3, 2),  # somebody else uses what this host does not
        (2, 0.95, None, 1),
        (2, 0.0, 1.95, 1),
        (4, 2.97, None, 1),
    ],
)
def test_where_ranks_wait_and_cpus_are_idle_workers_are_started(
    cpus: int, used: float, idle: float | None, workers: int
) -> None:
    one, host = trial(cpus), Host(wait=0.31, used_cpus=used, idle_cpus=idle)
    ((second, decision),) = decisions(one, host, 12)
    assert WARM_UP_S + WINDOW_S <= second <= WARM_UP_S + WINDOW_S + 2
    assert (decision.workers, decision.final) == (workers, False)
    assert decision.why.startswith("ranks wait for input 31.0% of the time, ")
    assert one.workers == workers


@pytest.mark.parametrize(
    ("cpus", "wait", "used", "idle", "why"),
    [
        (8, 0.0, 1.0, None, "ranks wait for input 0.0% of the time, 3% would be worth it"),
        (8, 0.029, 1.0, None, "ranks wait for input 2.9% of the time, 3% would be worth it"),
        (8, 0.5, 7.5, None, "ranks wait for input 50.0% of the time, but 0.5 of 8 CPUs are idle"),
        (8, 0.5, 1.0, 0.2, "ranks wait for input 50.0% of the time, but 0.2 of 8 CPUs are idle"),
        (2, 0.5, 1.5, None, "ranks wait for input 50.0% of the time, but 0.5 of 2 CPUs are idle"),
        (8, 0.5, 9.0, None, "ranks wait for input 50.0% of the time, but 0.0 of 8 CPUs are idle"),
    ],
)
def test_where_they_do_not_or_none_is_there_are_none(
    cpus: int, wait: float, used: float, idle: float | None, why: str
) -> None:
    one, host = trial(cpus), Host(wait=wait, used_cpus=used, idle_cpus=idle)
    assert not list(decisions(one, host, 15))
    assert one.why.startswith(why)
    assert one.why.endswith("(so far)")
    ((second, decision),) = decisions(one, host, 60)
    assert WATCH_S <= 15 + second <= WATCH_S + WINDOW_S + 2
    assert (decision.workers, decision.final) == (0, True)
    assert decision.why.startswith(why)
    assert not decision.why.endswith("(so far)")
    assert one.decided


def test_input_that_runs_short_only_when_what_was_prepared_before_is_gone_is_noticed() -> None:
    one, host = trial(), Host(wait=0.0)
    assert not list(decisions(one, host, 20))
    host.wait = 0.4
    ((second, decision),) = decisions(one, host, 12)
    assert second <= 2 * WINDOW_S + 1
    assert decision.workers == 3


@pytest.mark.parametrize(
    ("step_s", "may_stop", "workers", "why"),
    [
        (0.1 / 1.3, True, 3, "80 rows/s before, 104 rows/s with them (+30.0%)"),
        (0.1 / 1.04, True, 3, "80 rows/s before, 83 rows/s with them (+4.0%)"),
        (0.1 / 1.02, True, 0, "80 rows/s before, 82 rows/s with them (+2.0%), less than 3% more"),
        (0.1 / 0.9, True, 0, "80 rows/s before, 72 rows/s with them (-10.0%), less than 3% more"),
        (0.1 / 1.3, False, 3, "80 rows/s before, 104 rows/s with them (+30.0%)"),
        (0.1, False, 3, f"80 rows/s before, 80 rows/s with them (+0.0%), less than 3% more, {TIED}"),
    ],
)
def test_workers_are_kept_if_they_help_or_cannot_be_stopped(
    step_s: float, may_stop: bool, workers: int, why: str
) -> None:
    host = Host(step_s=0.1)
    one = started(host, may_stop=may_stop)
    host.sums = {name: [s / 0.1 * step_s, wait] for name, (s, wait) in host.sums.items()}  # so that steps go on
    host.step_s = step_s
    ((second, decision),) = decisions(one, host, 60, serving=3)
    assert SETTLE_S + WINDOW_S <= second <= SETTLE_S + 2 * WINDOW_S + 2
    assert (decision.workers, decision.why, decision.final) == (workers, why, True)
    assert (one.workers, one.why, one.decided) == (workers, why, True)
    assert not list(decisions(one, host, 100, serving=3))


def test_the_trial_begins_when_all_workers_serve() -> None:
    host = Host()
    one = started(host)
    assert not list(decisions(one, host, START_UP_S - 5, serving=2))
    host.step_s, host.sums = 0.05, {name: [s / 2, wait] for name, (s, wait) in host.sums.items()}
    ((second, decision),) = decisions(one, host, 30, serving=3)
    assert second >= SETTLE_S + WINDOW_S
    assert "(+100.0%)" in decision.why


def test_after_a_while_it_begins_with_those_that_do() -> None:
    host = Host()
    one = started(host)
    ((second, decision),) = decisions(one, host, START_UP_S + 20, serving=1)
    assert second >= START_UP_S + SETTLE_S + WINDOW_S
    assert decision.final


def test_workers_none_of_which_comes_up_are_stopped() -> None:
    host = Host()
    one = started(host, may_stop=False)  # who has nothing in hand has nothing to lose
    ((_, decision),) = decisions(one, host, START_UP_S + 20)
    assert decision == Decision(0, "none of them was ready within 60 s", final=True)


def test_few_long_steps_make_a_longer_measurement() -> None:
    one, host = trial(), Host(step_s=4.0, wait=0.9)
    second, _ = next(decisions(one, host, 200))
    assert LONGEST_WINDOWS * WINDOW_S <= second <= LONGEST_WINDOWS * WINDOW_S + 10
    second, _ = next(decisions(trial(), Host(step_s=100.0, wait=0.9), 400))
    assert second > 200


def test_all_ranks_of_the_host_count() -> None:
    one, host = trial(), Host(wait=0.2, ranks=4)
    ((_, decision),) = decisions(one, host, 12)
    assert "20.0%" in decision.why
    host.step_s, host.sums = 0.05, {name: [s / 2, wait] for name, (s, wait) in host.sums.items()}
    ((_, verdict),) = decisions(one, host, 30, serving=3)
    assert verdict.why.startswith("320 rows/s before, 640 rows/s with them")


def test_what_was_given_up_is_not_decided_on_any_more() -> None:
    host = Host()
    one = started(host)
    one.give_up("given up: no")
    assert (one.workers, one.why, one.decided) == (0, "given up: no", True)
    assert not list(decisions(one, host, 100, serving=3))


@pytest.mark.parametrize(
    ("cpus", "used", "most", "workers"), [(0.4, 0.1, 1, 1), (2.5, 0.3, 3, 3), (2.5, 1.6, 3, 1), (4.0, 0.2, 2, 2)]
)
def test_paced_workers_may_use_a_part_of_a_cpu(cpus: float, used: float, most: int, workers: int) -> None:
    paced = Trial(cpus=cpus, most=most, may_stop=True, paced=True)
    ((_, decision),) = decisions(paced, Host(used_cpus=used), WARM_UP_S + WINDOW_S + 2)
    assert (decision.workers, decision.final) == (workers, False)
    assert decision.why.endswith(f"of {cpus:g} CPUs are idle")


def test_nor_do_paced_workers_start_where_next_to_nothing_is_idle() -> None:
    paced = Trial(cpus=0.4, most=1, may_stop=True, paced=True)
    ((_, decision),) = decisions(paced, Host(used_cpus=0.36), WATCH_S + WINDOW_S + 2)
    assert (decision.workers, decision.final) == (0, True)
    assert decision.why.endswith("but 0.04 of 0.4 CPUs are idle; 0.05 would be worth it")
