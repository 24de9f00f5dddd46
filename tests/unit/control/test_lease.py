from __future__ import annotations

import itertools
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from control_running import free_port

from hetero.control import lease as lease_module
from hetero.control.lease import Lease, heartbeat_interval_s
from hetero.control.state import HostReport

DEADLINE_S = 10.0


@pytest.mark.parametrize(("lease_s", "interval_s"), [(300.0, 2.0), (30.0, 2.0), (10.0, 1.0), (2.0, 0.2)])
def test_a_lease_is_renewed_ten_times_or_every_other_second(lease_s, interval_s):
    assert heartbeat_interval_s(lease_s) == interval_s


def test_the_first_beat_is_given_at_once_and_others_on_demand():
    beaten = threading.Semaphore(0)
    lease = Lease(3600.0, beaten.release, lambda _: None)
    lease.start()
    assert beaten.acquire(timeout=DEADLINE_S)
    lease.beat_now()
    assert beaten.acquire(timeout=DEADLINE_S)
    lease.stop()
    lease.stop()


def test_silence_is_told_with_its_length_and_outlives_a_broken_listener():
    told, enough = [], threading.Event()

    def beat():
        raise RuntimeError("no answer")

    def listen(silent_s):
        told.append(silent_s)
        if len(told) == 3:
            enough.set()
        raise ValueError("a broken listener")

    lease = Lease(0.01, beat, listen)
    lease.start()
    assert enough.wait(DEADLINE_S)
    lease.stop()
    assert told == sorted(told)
    assert told[2] > told[0] >= 0


def test_an_answer_ends_the_silence(monkeypatch):
    looks = itertools.count()
    # Each look at the clock takes a millisecond, so that nothing depends on what else the machine does.
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(monotonic=lambda: next(looks) / 1000))
    told, answers = [], iter([True, False, False, True, False])
    done = threading.Event()

    def beat():
        answer = next(answers, None)
        if answer is None:
            done.set()
        elif not answer:
            raise RuntimeError("no answer")

    lease = Lease(0.02, beat, told.append)
    lease.start()
    assert done.wait(DEADLINE_S)
    lease.stop()
    assert len(told) == 3
    assert told[2] < told[1]


def test_time_in_which_the_process_itself_stood_still_is_no_silence_of_others_but_only_once(monkeypatch):
    monkeypatch.setattr(lease_module, "HELD_UP_S", 0.2)
    told: list[float] = []
    done = threading.Event()

    def beat():
        if len(told) == 2:
            done.set()
        time.sleep(0.4)  # as a process that was stopped in the middle of it
        raise RuntimeError("no answer")

    lease = Lease(0.01, beat, told.append)
    lease.start()
    assert done.wait(DEADLINE_S)
    lease.stop()
    assert told[0] < 0.2
    assert told[1] >= 0.4


def test_a_lease_may_be_stopped_from_its_own_thread():
    stopped = threading.Event()

    def beat():
        lease.stop()
        stopped.set()

    lease = Lease(0.01, beat, lambda _: None)
    lease.start()
    assert stopped.wait(DEADLINE_S)
    lease.stop()


def test_each_answer_to_a_heartbeat_is_told_and_no_silence_is(spawn_coordinator, make_client):
    port = free_port()
    coordinator = spawn_coordinator(port=port, data=(), trainers=("t1",))
    coordinator.wait_ready()
    client = make_client(f"127.0.0.1:{port}", "t1", None)
    client.register(HostReport(ranks=1), DEADLINE_S)
    answers, silences = threading.Semaphore(0), threading.Semaphore(0)
    client.start_lease(lambda: HostReport(ranks=1), lambda _: silences.release(), 0.02, answers.release)
    for _ in range(3):
        assert answers.acquire(timeout=DEADLINE_S)
    coordinator.end(signal.SIGKILL)
    for _ in range(3):
        assert silences.acquire(timeout=DEADLINE_S)
    while answers.acquire(blocking=False):
        pass
    assert silences.acquire(timeout=DEADLINE_S)
    assert not answers.acquire(blocking=False)
