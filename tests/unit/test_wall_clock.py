"""What a rank knows of the data hosts, and of its own wall clock."""

from __future__ import annotations

import time

import pytest

from hetero.control.state import HostState, JobState, Phase
from hetero.engines import DataService, WallClock


def job(open_tasks: int, **second: bool) -> JobState:
    hosts = (HostState("d1", "data", registered=True), HostState("d2", "data", registered=True, **second))
    endpoints = {"worker/d1/worker-0": f"d1:6001 {open_tasks}", "worker/d2/worker-0": "d2:6001 1"}
    return JobState(1, 0, "run", 1.0, Phase.TRAINING, hosts=hosts, endpoints=endpoints)


@pytest.mark.parametrize(("open_tasks", "idle"), [(0, True), (1, False)])
def test_workers_are_idle_when_one_is_lost_and_the_others_have_nothing_open(open_tasks: int, idle: bool) -> None:
    assert DataService(lambda: job(open_tasks, lost=True)).idle(0) == idle
    assert not DataService(lambda: job(open_tasks)).idle(0), "none is lost"


def test_idleness_can_be_asked_for_though_none_is_lost() -> None:
    state = job(0)
    service = DataService(lambda: state)
    assert not service.idle(0, though_none_is_lost=True), "d2 has a task open"
    assert service.idle(1, though_none_is_lost=True)
    assert not DataService(lambda: None).idle(0, though_none_is_lost=True)


def test_a_clock_that_was_set_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s, steady_s = [5000.0], [10.0]
    monkeypatch.setattr(time, "time", lambda: wall_s[0])
    monkeypatch.setattr(time, "monotonic", lambda: steady_s[0])
    clock = WallClock()
    for elapsed_s, set_by_s, noticed in [(100, 0, False), (1, 3600, False), (1, -3600, True), (50, 0, True)]:
        steady_s[0] += elapsed_s
        wall_s[0] += elapsed_s + set_by_s
        assert clock.was_set_back() == noticed
