"""The simulated accelerator: with a clock of the test's own, and asleep for real."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetero.training.device import SimulatedDevice, stall


class World:
    """A device, the seconds that pass for it, and what is told of it."""

    def __init__(self, step_s: float = 1.0, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 50.0, late_s
        self.slept_s: list[float] = []
        self.idle_ms: list[float] = []
        self.device = SimulatedDevice(step_s, clock=lambda: self.now_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds + self.late_s

    def log(self, *, device_idle_ms: float) -> None:
        self.idle_ms.append(device_idle_ms)

    def epoch(self, waits_s: list[float]) -> Iterator[int]:
        return self.device.drive(self.input(waits_s), self.log)

    def input(self, waits_s: list[float]) -> Iterator[int]:
        for number, wait_s in enumerate(waits_s):
            self.now_s += wait_s
            yield number

    @property
    def figures(self) -> tuple[float, float]:
        return self.device.busy_s, self.device.idle_s


def train(world: World, waits_s: list[float], own_s: float = 0.0, leave_at: int = -1) -> list[int]:
    taken = []
    for number in world.epoch(waits_s):
        taken.append(number)
        world.now_s += own_s
        if number == leave_at:
            break
    return taken


def test_input_own_code_and_late_wake_ups_are_idle_time_and_what_is_before_the_second_step_is_not() -> None:
    world = World(step_s=1.0, late_s=0.25)
    assert train(world, [9.0, 0.5, 3.0], own_s=0.125) == [0, 1, 2]
    assert world.slept_s == [1.0, 1.0, 1.0]
    assert world.idle_ms == [875.0, 3375.0]  # 0.25 late, the wait, 0.125 of its own
    assert world.figures == (2.0, 4.25)
    assert world.now_s == 50.0 + 9.0 + 3 * (0.125 + 1.0 + 0.25) + 3.5


def test_a_loop_that_comes_back_at_once_and_awakes_in_time_leaves_the_device_no_idle_time() -> None:
    world = World()
    train(world, [5.0, 0.0, 0.0, 0.0])
    assert world.figures == (3.0, 0.0)
    assert stall(*world.figures) == 0.0


def test_what_lies_between_two_epochs_is_idle_time() -> None:
    world = World()
    train(world, [0.0, 0.0])
    world.now_s += 7.0  # an evaluation
    train(world, [0.5])
    assert world.idle_ms == [0.0, 7500.0]
    assert world.figures == (2.0, 7.5)


def test_one_step_is_no_figure_yet() -> None:
    world = World()
    train(world, [1.0])
    assert world.figures == (0.0, 0.0)
    assert stall(*world.figures) is None
    assert world.device.describe() == "simulated_device_ms=1000"


def test_the_lines_say_how_long_it_was_idle_so_far() -> None:
    world = World(step_s=0.0125)
    train(world, [1.0, 0.0375])
    assert world.device.describe() == "simulated_device_ms=12.5 simulated_stall=0.7500"


def test_the_step_of_a_batch_with_which_the_loop_leaves_is_taken_and_waited_for_later() -> None:
    world = World()
    assert train(world, [0.0, 0.0, 0.0], leave_at=1) == [0, 1]
    assert world.slept_s == [1.0]
    world.now_s += 0.25
    assert world.device.finish() == 0.75
    assert world.device.finish() == 0.0
    assert world.slept_s == [1.0, 0.75]
    train(world, [2.0])
    assert world.idle_ms == [0.0, 2000.0]
    assert world.figures == (2.0, 2.0)


def test_a_loop_that_fails_does_not_wait() -> None:
    world = World(step_s=60.0)

    def failing() -> None:
        for _ in world.epoch([0.0, 0.0]):
            raise ValueError("the loss is not a number")

    with pytest.raises(ValueError, match="the loss"):
        failing()
    assert world.slept_s == []


def test_steps_follow_each_other_where_two_are_begun_at_once() -> None:
    world = World()
    train(world, [0.0], leave_at=0)
    train(world, [0.25], leave_at=0)
    assert world.device.finish() == 1.75
    assert world.figures == (1.0, 0.0)


def test_a_sleep_that_ends_early_is_not_gone_back_to() -> None:
    asked: list[float] = []
    device = SimulatedDevice(60.0, clock=lambda: 0.0, sleep=asked.append)
    given = list(device.drive(iter("ab"), lambda **_: None))
    assert given == ["a", "b"]
    assert asked == [60.0, 120.0], "the clock stood still: the second step is to be over at 120"


def test_each_rank_has_its_own() -> None:
    one, other = World(), World()
    train(one, [0.0, 4.0])
    train(other, [0.0, 0.0])
    assert (one.figures, other.figures) == ((1.0, 4.0), (1.0, 0.0))


def test_an_error_of_the_input_passes_through() -> None:
    def broken() -> Iterator[Any]:
        yield 1
        raise OSError("gone")

    world = World()
    with pytest.raises(OSError, match="gone"):
        list(world.device.drive(broken(), world.log))
    assert world.slept_s == [1.0]


def test_a_real_step_takes_its_time_and_neither_cpu_nor_a_thread() -> None:
    device = SimulatedDevice(0.2)
    threads, cpu_s, began_s = threading.active_count(), time.thread_time(), time.monotonic()
    for _ in device.drive(iter(range(2)), lambda **_: None):
        assert threading.active_count() == threads
    assert time.monotonic() - began_s >= 0.4
    assert time.thread_time() - cpu_s < 0.2, "a loop that looks at the clock would take 0.4 s"
    assert device.busy_s == 0.2
    assert 0 < device.idle_s < math.inf
