"""How many workers a data host is to have, from tables of what its feed and the kernel count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hetero.worker_count import (
    LONGEST_WINDOWS,
    SETTLE_S,
    START_UP_S,
    WARM_UP_S,
    WATCH_S,
    WINDOW_S,
    Decision,
    Figures,
    Growth,
    Sample,
)

FIRST_S = WARM_UP_S + WINDOW_S + 2
ROUND_S = SETTLE_S + WINDOW_S + 2


@dataclass
class Host:
    """A data host whose workers wait for most of the time that a batch takes, up to what its ranks or disks can do."""

    cpus: float = 2.0
    workers: int = 2
    each_per_s: float = 10.0  # batches of a worker
    most_per_s: float = 1e9
    each_cpus: float = 0.01
    short: float = 0.95
    idle_cpus: float | None = None
    room: int = 1000
    feed_id: str = "first"
    at_s: float = 1000.0
    feed_s: float = 7.0
    batches: float = 0.0
    used_s: float = 3.0
    idle_s: float = 50.0
    short_s: float = 0.0

    def second(self) -> Sample:
        """Let a second pass."""
        self.at_s += 1.0
        self.feed_s += 1.0
        self.batches += min(self.workers * self.each_per_s, self.most_per_s)
        self.used_s += min(self.workers * self.each_cpus, self.cpus)
        self.idle_s += self.idle_cpus or 0.0
        self.short_s += self.short
        figures = Figures(self.feed_id, self.feed_s, int(self.batches) * 8, int(self.batches), self.short_s)
        idle_s = None if self.idle_cpus is None else self.idle_s
        return Sample(self.at_s, self.used_s, idle_s, self.cpus, figures, self.room)


def decisions(growth: Growth, host: Host, seconds: float, *, start: bool = True) -> Iterator[tuple[float, Decision]]:
    """Yield each decision and the second in which it was made; it is done at once, unless not to `start`."""
    for second in range(1, int(seconds) + 1):
        decision = growth.look(host.second(), serving=host.workers)
        if decision is not None:
            if start:
                host.workers = decision.workers
            yield second, decision


def growth(workers: int = 2, most: int = 16) -> Growth:
    return Growth(workers=workers, most=most)


def test_before_anything_arrives_nothing_is_decided() -> None:
    one = growth()
    assert (one.workers, one.kept, one.decided) == (2, 2, False)
    assert one.why == "training ended before anything could be measured"
    assert one.look(Sample(0.0, 0.0, None, 2.0, None, 9), serving=2) is None
    assert not list(decisions(one, Host(each_per_s=0.0), 100))


def test_workers_that_wait_are_doubled_while_that_pays() -> None:
    one, host = growth(), Host()
    made = list(decisions(one, host, 60))
    assert [decision.workers for _, decision in made] == [4, 8, 16, 16]
    assert [decision.final for _, decision in made] == [False, False, False, True]
    assert made[0][0] <= FIRST_S
    assert made[-1][0] <= FIRST_S + 3 * (ROUND_S + 1)
    assert one.measured == {2: 160.0, 4: 320.0, 8: 640.0, 16: 1280.0}
    assert made[0][1].why == "ranks wait for this host, 1.98 of 2 CPUs are idle"
    assert one.why == ("640 rows/s with 8, 1280 rows/s with 16 (+100.0%); 16 is the most that a host with 2 CPUs tries")


def test_those_that_bring_nothing_are_stopped_after_a_second_look() -> None:
    one, host = growth(), Host(most_per_s=45.0)
    made = list(decisions(one, host, 60))
    assert [decision.workers for _, decision in made] == [4, 8, 16, 8]
    assert one.measured == {2: 160.0, 4: 320.0, 8: 360.0, 16: 360.0}
    assert one.why == "360 rows/s with 8, 360 rows/s with 16 (+0.0%), less than 3% more"


def test_less_than_three_percent_is_nothing() -> None:
    one, host = growth(), Host(most_per_s=20.4)
    made = list(decisions(one, host, 60))
    assert [(decision.workers, decision.final) for _, decision in made] == [(4, False), (2, True)]
    assert "less than 3% more" in one.why
    assert made[1][0] - made[0][0] >= 2 * WINDOW_S
    assert one.decided
    assert not list(decisions(one, Host(), 60))


def test_the_end_of_an_epoch_in_one_measurement_does_not_count_against_them() -> None:
    one, host = growth(most=4), Host()
    assert [decision.workers for _, decision in decisions(one, host, FIRST_S)] == [4]
    host.each_per_s = 4.9
    assert not list(decisions(one, host, SETTLE_S + WINDOW_S + 3))
    host.each_per_s = 10.0
    ((_, decision),) = decisions(one, host, 10)
    assert (decision.workers, decision.final) == (4, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"short": 0.3}, "ranks wait for this host 30% of the time, above 50% more are tried"),
        ({"each_cpus": 0.98}, "1.96 of 2 CPUs are used, 0.04 are idle"),
        ({"each_cpus": 0.5, "idle_cpus": 0.1}, "1.00 of 2 CPUs are used, 0.10 are idle"),
        ({"cpus": 0.3, "each_cpus": 0.2}, "0.30 of 0.3 CPUs are used, 0.00 are idle"),
        ({"room": 0}, "there is no memory for more"),
    ],
)
def test_where_more_could_not_help_there_are_no_more(changes: dict[str, float], why: str) -> None:
    one, host = growth(), Host(**changes)  # type: ignore[arg-type]
    assert not list(decisions(one, host, WATCH_S - WINDOW_S))
    assert one.why == f"{why} (so far)"
    ((_, decision),) = decisions(one, host, 3 * WINDOW_S)
    assert decision == Decision(2, why, final=True)
    assert list(one.measured) == [2]


def test_workers_that_hardly_use_a_cpu_are_tried_on_a_busy_machine_too() -> None:
    one, host = growth(most=4), Host(idle_cpus=0.0)
    assert [decision.workers for _, decision in decisions(one, host, 60)] == [4, 4]


def test_a_host_at_its_bound_tries_none() -> None:
    one, host = growth(workers=96, most=96), Host(workers=96, cpus=96.0)
    assert [decision.workers for _, decision in decisions(one, host, 60)] == [96]
    assert one.why == "96 is the most that a host with 96 CPUs tries"


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"room": 1}, 3),  # memory
        ({"cpus": 4.0, "workers": 4, "each_cpus": 0.65}, 7),  # seven fill the CPUs
        ({"cpus": 4.0, "workers": 4, "each_cpus": 0.55}, 8),
    ],
)
def test_no_more_are_started_than_there_is_room_for(changes: dict[str, float], workers: int) -> None:
    host = Host(**changes)  # type: ignore[arg-type]
    one = growth(workers=host.workers, most=64)
    ((_, decision),) = decisions(one, host, FIRST_S)
    assert (decision.workers, decision.final) == (workers, False)


def test_those_that_are_not_ready_in_time_are_stopped() -> None:
    one, host = growth(), Host()
    assert [decision.workers for _, decision in decisions(one, host, FIRST_S, start=False)] == [4]
    ((second, decision),) = decisions(one, host, START_UP_S + 5, start=False)
    assert second >= START_UP_S
    assert decision == Decision(2, "no further one was ready within 60 s", final=True)


def test_those_of_them_that_are_ready_are_judged() -> None:
    one, host = growth(), Host()
    assert [decision.workers for _, decision in decisions(one, host, FIRST_S, start=False)] == [4]
    host.workers = 3
    made = list(decisions(one, host, START_UP_S + ROUND_S + 5, start=False))
    assert one.kept == 4
    assert made[0][1].why.startswith("ranks wait for this host")


def test_another_feed_begins_another_measurement() -> None:
    one, host = growth(), Host()
    assert not list(decisions(one, host, WARM_UP_S + 3))
    host.feed_id, host.batches, host.feed_s, host.short_s = "second", 0.0, 0.0, 0.0
    ((second, decision),) = decisions(one, host, WINDOW_S + 2)
    assert second >= WINDOW_S
    assert decision.workers == 4
    assert one.measured == {2: 160.0}


def test_few_batches_take_longer_to_measure_and_none_are_no_measurement() -> None:
    one, host = growth(), Host(each_per_s=0.5)
    ((second, decision),) = decisions(one, host, LONGEST_WINDOWS * WINDOW_S + 5)
    assert second > 10
    assert decision.workers == 4
    host.each_per_s = 0.0
    assert not list(decisions(one, host, 200))
    host.each_per_s = 0.5
    assert [decision.workers for _, decision in decisions(one, host, 60)][:1] == [8]


def test_to_give_up_leaves_those_that_were_there_before() -> None:
    one, host = growth(), Host()
    assert [decision.workers for _, decision in decisions(one, host, FIRST_S + ROUND_S)] == [4, 8]
    assert one.give_up("worker-5 died") == Decision(4, "worker-5 died", final=True)
    assert (one.workers, one.kept, one.why, one.decided) == (4, 4, "worker-5 died", True)
