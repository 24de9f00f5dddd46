"""Children that run until they are told to end: ending by themselves is a failure, whatever the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from process_probe import Lines, MakeSpec

from hetero.process import ChildEnded, ChildRestarted, Supervisor
from hetero.spec import RestartPolicy


@pytest.fixture
def supervisor(lines: Lines) -> Iterator[Supervisor]:
    with Supervisor(grace_s=5.0, sink=lines, janitor=False, host="algo-1") as made:
        yield made


def ended(supervisor: Supervisor) -> ChildEnded:
    event = supervisor.next_event(10.0)
    assert isinstance(event, ChildEnded), event
    return event


def test_a_child_that_never_ends_has_failed_when_it_ends_well_by_itself(
    supervisor: Supervisor, python: MakeSpec
) -> None:
    once = RestartPolicy(attempts=1, backoff_s=0.01)
    supervisor.start(replace(python("pass", restarts=once), endless=True))
    first = ended(supervisor)
    assert isinstance(supervisor.next_event(10), ChildRestarted)
    second = ended(supervisor)
    for event in (first, second):
        assert event.failure is not None
        assert event.failure.exit_code == 0
        assert "ended by itself" in str(event.failure.message)
    assert (first.final, second.final) == (False, True)


def test_a_child_that_never_ends_has_not_failed_when_it_was_told_to(
    supervisor: Supervisor, python: MakeSpec, lines: Lines
) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    supervisor.start(replace(python(code), endless=True))
    lines.wait_for("up")
    (event,) = supervisor.stop()
    assert event.failure is None
