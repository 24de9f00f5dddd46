"""For whom the coordinator stays when its job is over."""

from __future__ import annotations

import pytest

from hetero.control.farewells import FAREWELL_S, left_s, patience_s
from hetero.control.state import HostState, JobState, Phase


def state(*hosts: HostState, uptime_s: float = 100.0) -> JobState:
    return JobState(1, 0, "run", uptime_s, Phase.ENDED, hosts=hosts)


@pytest.mark.parametrize(
    ("host", "stopped", "expected"),
    [
        (HostState("d2", "data", registered=True, age_s=1.0), False, 29.0),
        (HostState("d2", "data", registered=True, age_s=1.0), True, 29.0),
        (HostState("d2", "data", registered=True, age_s=29.9), False, FAREWELL_S),
        (HostState("d2", "data"), False, 30.0),
        (HostState("d2", "data"), True, FAREWELL_S),
        (HostState("d2", "data", registered=True, left=True), False, 0.0),
        (HostState("d2", "data", registered=True, lost=True), False, 0.0),
    ],
)
def test_a_peer_that_has_not_left_is_waited_for_as_long_as_it_may_still_come(
    host: HostState, stopped: bool, expected: float
) -> None:
    now = state(HostState("d1", "data", registered=True), host)
    assert left_s(now, patience_s(now, 30.0, 600.0, stopped=stopped), "d1") == expected


def test_who_has_not_come_is_not_waited_for_longer_than_the_start_may_take() -> None:
    now = state(HostState("d1", "data", registered=True), HostState("d2", "data"), uptime_s=595.0)
    assert left_s(now, patience_s(now, 30.0, 600.0, stopped=False), "d1") == 5.0


def test_the_longest_patience_counts_until_that_host_has_left() -> None:
    one, two = HostState("t1", "trainer", registered=True, age_s=20.0), HostState("t2", "trainer", registered=True)
    at_the_end = state(one, two)
    patience = patience_s(at_the_end, 30.0, 600.0, stopped=False)
    assert left_s(at_the_end, patience, "d1") == 30.0
    assert left_s(state(one, HostState("t2", "trainer", registered=True, left=True)), patience, "d1") == 10.0
