"""A feed's tasks with everything around them faked."""

from __future__ import annotations

import pytest
from feed_parts import Coordinator, FakeOutlet

from hetero.data.feed_tasks import Tasks


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outlet() -> FakeOutlet:
    return FakeOutlet()


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def connected() -> list[str]:
    return []


@pytest.fixture
def tasks(clock: Clock, outlet: FakeOutlet, coordinator: Coordinator, connected: list[str]) -> Tasks:
    return Tasks("algo-1", coordinator.hear, outlet, no_worker_s=5.0, on_worker=connected.append, clock=clock)
