"""What is kept for a coordinator that comes after this one."""

from __future__ import annotations

import json

import pytest
from control_job import FakeClock

from hetero.control.split_journal import WRITE_INTERVAL_S, Memory, SplitJournal
from hetero.control.split_lists import Home, Splits
from hetero.control.split_mail import Past, Skipped

MEMORY = Memory(
    splits=Splits(('"a"', '{"b": 1}'), (None, Home("d2", "training"))),
    attempt=77,
    size=2,
    closed=(1,),
    replayed=3,
    skipped=(Skipped(0, 1, '"a"', "d1", "ValueError: odd"),),
    ended=(0, 1),
    past=(Past(1, 2, 40),),
    epochs={2: (b"\x01\x80", 17)},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "work" / "splits.json"


def test_all_of_it_comes_back(path):
    SplitJournal(path, "run-1").write(1, 1, lambda: MEMORY)
    assert SplitJournal(path, "run-1").read() == MEMORY
    SplitJournal(path, "run-1").write(1, 1, Memory)
    assert SplitJournal(path, "run-1").read() == Memory()


def test_another_runs_is_not_used(path):
    SplitJournal(path, "run-1").write(1, 1, lambda: MEMORY)
    assert SplitJournal(path, "run-2").read() is None


def test_without_a_file_there_is_nothing(path):
    assert SplitJournal(path, "run-1").read() is None


@pytest.mark.parametrize(
    "change",
    [
        {"splits": 7},
        {"splits": [[1], []]},
        {"splits": [["1"], [None, None]]},
        {"splits": [["1"], ["d"]]},
        {"attempt": "x"},
        {"closed": None},
        {"skipped": [[1]]},
        {"epochs": {"0": ["zz", 1]}},
        {"epochs": []},
        {"past": [[]]},
    ],
)
def test_garbage_is_not_used_and_said_so(path, caplog, change):
    SplitJournal(path, "run-1").write(1, 1, lambda: MEMORY)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert SplitJournal(path, "run-1").read() is None
    assert "asking everybody what is done" in caplog.text


def test_half_a_file_is_not_used(path):
    SplitJournal(path, "run-1").write(1, 1, lambda: MEMORY)
    path.write_text(path.read_text()[:-20])
    assert SplitJournal(path, "run-1").read() is None


def test_it_is_written_at_most_every_half_second_but_for_what_is_important(path):
    clock = FakeClock()
    journal = SplitJournal(path, "run-1", clock=clock)
    written = []

    def memory() -> Memory:
        written.append(clock.now_s)
        return MEMORY

    journal.write(1, 0, memory)
    journal.write(1, 0, memory)
    journal.write(2, 0, memory)
    assert len(written) == 1
    clock.now_s += WRITE_INTERVAL_S
    journal.write(2, 0, memory)
    assert len(written) == 2
    journal.write(3, 3, memory)
    assert len(written) == 3
    journal.write(4, 3, memory)
    assert len(written) == 3
    journal.write(4, 3, memory, now=True)
    assert len(written) == 4


def test_a_full_disk_stops_nothing(path, caplog):
    path.parent.parent.joinpath("work").write_text("a file in the way")
    SplitJournal(path, "run-1").write(1, 1, lambda: MEMORY)
    assert "cannot write the journal" in caplog.text
