"""How a child process ends."""

from __future__ import annotations

import pytest

from hetero.children import lost_workers
from hetero.control.state import HostState, JobState, Phase, ProcessReport


@pytest.mark.parametrize(
    ("trainer", "lost"),
    [
        ({}, []),
        ({"workers_gone_for_good": True}, ["t1:6000", "t1:6001"]),
        ({"left": True}, ["t1:6000", "t1:6001"]),
        ({"processes": (ProcessReport("worker-0", 0, "failed"), ProcessReport("worker-1", 9, "running"))}, ["t1:6000"]),
        (
            {"processes": (ProcessReport("worker-0", 0, "waiting"), ProcessReport("worker-1", 0, "stopped"))},
            ["t1:6001"],
        ),
    ],
)
def test_workers_that_are_gone_for_good_are_also_those_of_trainer_hosts(
    trainer: dict[str, object], lost: list[str]
) -> None:
    hosts = (HostState("d1", "data"), HostState("t1", "trainer", **trainer), HostState("t2", "trainer", left=True))
    endpoints = {"worker/d1/worker-0": "d1:6001 2", "dispatcher": "d1:6000", "local/t1": "{}"}
    endpoints |= {f"worker/t1/worker-{index}": f"t1:600{index} 1" for index in range(2)}
    assert lost_workers(JobState(1, 0, "run", 1.0, Phase.TRAINING, hosts=hosts, endpoints=endpoints)) == lost
    assert lost_workers(None) == []
