"""Whom a launcher stays for: the rules, and that each wait has a bound."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hetero import departure
from hetero.control.state import HostState, JobState, Outcome, Phase
from hetero.departure import LAST_WORD_KEY, Departure, chief_to_come, others_to_come
from hetero.errors import CoordinatorUnreachable


def state(*hosts: HostState, ended: bool = True, **endpoints: str) -> JobState:
    phase = Phase.ENDED if ended else Phase.TRAINING
    return JobState(1, 0, "run", 1.0, phase, Outcome.SUCCEEDED if ended else Outcome.NONE, None, hosts, endpoints)


def chief(**values: Any) -> HostState:
    return HostState("algo-1", "trainer", registered=True, **values)


def data(name: str = "algo-2", **values: Any) -> HostState:
    return HostState(name, "data", **{"registered": True, **values})


WORD = {LAST_WORD_KEY: "algo-1"}


def test_a_chief_is_waited_for_from_the_end_of_the_job_to_its_last_word() -> None:
    assert chief_to_come(state(chief(), data()), "algo-1")
    assert chief_to_come(state(chief(left=True), data()), "algo-1"), "it says goodbye before it stops its children"
    assert not chief_to_come(state(chief(left=True), data(), **WORD), "algo-1")


@pytest.mark.parametrize(
    "seen",
    [
        None,
        state(chief(lost=True), data()),
        state(HostState("algo-1", "trainer"), data()),
        state(data()),
    ],
    ids=["nothing known", "lost", "never came", "not expected"],
)
def test_a_chief_that_will_not_end_this_job_is_not_waited_for(seen: JobState | None) -> None:
    assert not chief_to_come(seen, "algo-1")


def test_the_chief_waits_for_those_that_are_there() -> None:
    assert others_to_come(state(chief(), data()), "algo-1")
    assert not others_to_come(state(chief(), data(left=True), data("algo-3", lost=True)), "algo-1")
    assert not others_to_come(state(chief(), data(registered=False)), "algo-1")
    assert not others_to_come(None, "algo-1")


class Fakes:
    """What a departure is given: a state that a script changes with each look, and what was published."""

    def __init__(
        self, *states: JobState | None, is_chief: bool, reachable: bool = True, asked: JobState | None = None
    ) -> None:
        self.script, self.is_chief, self.host, self.looks = (
            list(states),
            is_chief,
            "algo-1" if is_chief else "algo-2",
            0,
        )
        self.topology = SimpleNamespace(chief=SimpleNamespace(name="algo-1"))
        self.settings = SimpleNamespace(grace_s=0.1, lease_s=0.1)
        self.published: list[str] = []
        self.reachable, self.asked = reachable, asked

    @property
    def state(self) -> JobState | None:
        return self.script[min(self.looks, len(self.script) - 1)]

    def next_event(self, timeout_s: float) -> None:
        self.looks += 1
        time.sleep(min(timeout_s, 0.001))

    def status(self, _timeout_s: float) -> JobState | None:
        if not self.reachable:
            raise CoordinatorUnreachable("nobody")
        return self.asked if self.asked is not None else self.state

    def publish(self, name: str, _address: str, timeout_s: float) -> None:
        if not self.reachable:
            raise CoordinatorUnreachable("nobody")
        self.published.append(name)

    def departure(self) -> Departure:
        return Departure(self, self, self)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOODBYES_S", "CHIEF_MARGIN_S", "CHIEF_EXIT_S"):
        monkeypatch.setattr(departure, name, 0.1)


def test_the_chief_says_its_last_word_once_all_others_have_left() -> None:
    fakes = Fakes(state(chief(), data()), state(chief(), data()), state(chief(), data(left=True)), is_chief=True)
    fakes.departure().let_chief_end_first(lambda: False)
    assert (fakes.looks, fakes.published) == (2, [LAST_WORD_KEY])


@pytest.mark.parametrize("reachable", [True, False])
def test_the_chief_does_not_wait_for_ever(reachable: bool) -> None:
    fakes = Fakes(state(chief(), data()), is_chief=True, reachable=reachable)
    fakes.departure().let_chief_end_first(lambda: False)
    assert len(fakes.published) == reachable


def test_another_host_stays_beyond_the_last_word_until_it_is_stopped() -> None:
    fakes = Fakes(state(chief(), data()), state(chief(), data(), **WORD), is_chief=False)
    fakes.departure().let_chief_end_first(lambda: fakes.looks == 5)
    assert fakes.looks == 5
    assert not fakes.published


@pytest.mark.parametrize("last", [state(chief(), data()), state(chief(), data(), **WORD)], ids=["no word", "no stop"])
def test_another_host_does_not_wait_for_ever(last: JobState) -> None:
    fakes = Fakes(last, is_chief=False)
    fakes.departure().let_chief_end_first(lambda: False)
    assert fakes.looks > 1


def test_a_host_that_is_told_to_stop_waits_for_nobody() -> None:
    fakes = Fakes(state(chief(), data()), is_chief=False)
    fakes.departure().let_chief_end_first(lambda: True)
    assert fakes.looks == 0


TRAINING = state(chief(), data(), ended=False)


def test_a_host_whose_part_is_done_waits_for_the_jobs_end_and_then_for_the_chief() -> None:
    fakes, answers = Fakes(*[TRAINING] * 3, state(chief(), data()), state(chief(), **WORD), is_chief=False), []
    fakes.departure().let_chief_end_first(lambda: fakes.looks == 6, lambda: answers.append(1))
    assert (fakes.looks, len(answers)) == (6, 3)


def test_it_does_not_wait_for_ever_for_a_coordinator_that_is_gone() -> None:
    fakes = Fakes(TRAINING, is_chief=False, reachable=False)
    began_s = time.monotonic()
    fakes.departure().let_chief_end_first(lambda: False)
    assert time.monotonic() - began_s > 0.4, "the chief has a lease, its grace and two margins"


def test_an_end_that_was_not_pushed_yet_is_asked_for() -> None:
    fakes = Fakes(TRAINING, state(chief(), **WORD), is_chief=False, asked=state(chief(), data()))
    fakes.departure().let_chief_end_first(lambda: fakes.looks == 4)
    assert fakes.looks == 4, "it went before the chief"
