from __future__ import annotations

import json

import pytest

from hetero.control.state import (
    MAX_CAUSE_BYTES,
    HostReport,
    HostState,
    JobState,
    Outcome,
    Phase,
    ProcessReport,
    cause_from_json,
    cause_to_json,
    outcome_from_proto,
    report_from_json,
    report_from_proto,
    report_to_json,
    report_to_proto,
    state_from_proto,
    state_to_proto,
)

PROCESSES = (ProcessReport("worker-0", 41, "running", 6001), ProcessReport("rank-0", 42, "exited", None))
REPORT = HostReport(2, 1, 1, 3, True, 12.5, PROCESSES)
HOST = HostState("algo-1", "data", "10.0.0.1", True, 2, 1, 1, 3, True, 12.5, PROCESSES, True, True, "SIGTERM", 0.5)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("outcome", Outcome)
def test_a_state_survives_the_wire(phase, outcome):
    state = JobState(
        7, 2, "run-1", 3.5, phase, outcome, {"message": "boom"}, (HOST,), {"dispatcher": "algo-1:6000"}, 14, 2
    )
    message = state_to_proto(state)
    assert state_from_proto(type(message).FromString(message.SerializeToString())) == state
    json.dumps(state.to_dict())


def test_a_report_survives_the_wire_and_the_journal():
    assert report_from_proto(report_to_proto(REPORT)) == REPORT
    assert report_from_json(json.loads(json.dumps(report_to_json(REPORT)))) == REPORT


def test_an_unknown_outcome_is_refused():
    with pytest.raises(ValueError, match="99"):
        outcome_from_proto(99)


def test_causes_are_json_objects_or_absent():
    assert cause_from_json(cause_to_json(None)) is None
    assert cause_from_json(cause_to_json({"message": "boom"})) == {"message": "boom"}
    for text in ("[1]", "3", "{"):
        with pytest.raises(ValueError, match=r"JSON|Expecting"):
            cause_from_json(text)


def test_a_long_cause_is_shortened_in_the_middle_of_its_texts():
    cause = {"message": "a" * 100_000 + "end", "last_lines": ["b" * 70_000] * 100, "exit_code": 1}
    text = cause_to_json(cause)
    assert len(text) <= MAX_CAUSE_BYTES
    short = cause_from_json(text)
    assert short["message"].endswith("end")
    assert "characters left out" in short["message"]
    assert short["exit_code"] == 1
    assert len(short["last_lines"]) == 40


def test_workers_of_lost_hosts_do_not_count():
    hosts = (HostState("d1", "data", workers_alive=2), HostState("d2", "data", workers_alive=3, lost=True))
    state = JobState(1, 0, "r", 0.0, Phase.TRAINING, hosts=hosts)
    assert state.workers_alive == 2
    assert state.host("d2") is hosts[1]
    assert state.host("d3") is None
