from __future__ import annotations

import pytest
from control_job import RANKS, WORKING

from hetero.control.ledger import Refused, UnknownHost
from hetero.control.state import HostReport, Outcome, Phase


def test_training_starts_when_trainers_dispatcher_and_one_worker_are_there(make_job):
    job = make_job()
    job.come("t1", "d1")
    job.ledger.publish("d1", "dispatcher", "d1:6000")
    assert job.state.phase is Phase.WAITING
    job.come("t2")
    assert job.state.phase is Phase.TRAINING
    assert job.state.endpoints == {"dispatcher": "d1:6000"}


def test_training_waits_for_the_dispatcher(make_job):
    job = make_job()
    job.come("t1", "t2", "d1", "d2")
    assert job.state.phase is Phase.WAITING
    job.ledger.publish("d1", "dispatcher", "d1:6000")
    assert job.state.phase is Phase.TRAINING


def test_training_waits_for_a_living_worker(make_job):
    job = make_job()
    job.come("t1", "t2")
    job.ledger.register("d1", "data", "d1", HostReport())
    job.ledger.publish("d1", "dispatcher", "d1:6000")
    assert job.state.phase is Phase.WAITING
    job.beat("d1", workers_alive=1)
    assert job.state.phase is Phase.TRAINING


def test_a_job_without_data_hosts_needs_only_its_trainers(make_job):
    job = make_job(data=())
    job.come("t1")
    assert job.state.phase is Phase.WAITING
    job.come("t2")
    assert job.state.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (("d1", "t1"), "trainer host t2 did not come; d1 did not announce its dispatcher"),
        (("t1", "t2"), "data host d1 did not come; data host d2 did not come"),
        (("d1", "d2", "t1", "t2"), "d1 did not announce its dispatcher"),
    ],
)
def test_start_deadline_names_what_is_missing(make_job, there, missing):
    job = make_job()
    job.come(*there)
    job.pass_time(59)
    assert not job.state.ended
    job.pass_time(1)
    assert job.end == (Outcome.NEVER_STARTED, f"training did not start within 60 s: {missing}")
    assert job.state.cause["suggested_exit_code"] == 3


def test_unknown_hosts_and_wrong_roles_are_refused_with_nothing_changed(make_job):
    job = make_job()
    before = job.state
    with pytest.raises(UnknownHost, match="'x9' is not part of this job; it has d1, d2, t1, t2"):
        job.ledger.register("x9", "data", "x9", WORKING)
    with pytest.raises(UnknownHost, match="registers as trainer, this job expects it as data"):
        job.ledger.register("d1", "trainer", "d1", RANKS)
    for ask in (
        lambda: job.ledger.heartbeat("x9", WORKING),
        lambda: job.ledger.publish("x9", "dispatcher", "x9:1"),
        lambda: job.ledger.end_training("x9", Outcome.FAILED, None, 0, 0),
        lambda: job.ledger.report_failure("x9", {}, 0, 0),
        lambda: job.ledger.leave("x9", "bye"),
    ):
        with pytest.raises(UnknownHost):
            ask()
    assert job.state == before


@pytest.mark.parametrize(
    ("endpoint", "address"), [("", "d1:1"), ("dispatcher", ""), ("x" * 257, "d1:1"), ("x", "y" * 513)]
)
def test_endpoints_without_sense_are_refused(make_job, endpoint, address):
    job = make_job()
    with pytest.raises(Refused, match="characters"):
        job.ledger.publish("d1", endpoint, address)
    assert job.state.endpoints == {}


def test_a_silent_trainer_ends_the_job_after_a_lease(make_job):
    job = make_job()
    job.start()
    job.silence("t2")
    job.pass_time(10)
    assert not job.state.ended
    job.pass_time(1)
    assert job.end == (Outcome.TRAINER_LOST, "trainer host t2 gave no sign of life for 10 s")
    assert job.state.host("t2").lost
    assert job.state.cause["suggested_exit_code"] == 5


def test_a_silent_trainer_ends_the_job_even_before_training(make_job):
    job = make_job()
    job.come("t1")
    job.silence("t1")
    job.pass_time(11)
    assert job.end[0] is Outcome.TRAINER_LOST


def test_a_silent_data_host_is_lost_and_the_job_goes_on_with_the_other(make_job):
    job = make_job()
    job.start()
    job.silence("d2")
    job.pass_time(11)
    assert not job.state.ended
    assert job.state.host("d2").lost
    assert job.state.workers_alive == 1
    job.beat("d2", workers_alive=1)
    assert not job.state.host("d2").lost
    assert job.state.host("d2").workers_lost == 1, "what its worker had in hand was given up when it fell silent"


def test_a_data_host_whose_processes_came_and_whose_launcher_never_does_is_lost_after_a_lease(make_job):
    job = make_job()
    job.come("d1", "t1", "t2")
    job.ledger.publish("d1", "dispatcher", "d1:6000")
    job.ledger.publish("d2", "feed/d2", "d2:6000")
    assert job.state.phase is Phase.TRAINING
    job.pass_time(11)
    assert job.state.host("d2").lost, "what its feed has in hand must go to others"
    assert not job.state.ended
    job.come("d2")
    assert not job.state.host("d2").lost


def test_another_launcher_of_a_trainer_host_is_refused_while_the_first_lives(make_job):
    job = make_job()
    for name in ("t1", "d1"):
        role = "trainer" if name == "t1" else "data"
        job.ledger.register(name, role, name, RANKS, "first")
        job.ledger.register(name, role, name, RANKS, "first")
    with pytest.raises(UnknownHost, match="another launcher plays host 't1' already: start one on each host"):
        job.ledger.register("t1", "trainer", "t1", RANKS, "second")
    job.ledger.register("d1", "data", "d1", WORKING, "second")
    job.ledger.register("t1", "trainer", "t1", RANKS)  # one that does not say who it is


def test_the_first_data_host_is_the_dispatcher_and_cannot_be_lost(make_job):
    job = make_job()
    job.start()
    job.silence("d1")
    job.pass_time(11)
    text = "data host d1, which runs the coordinator, gave no sign of life for 10 s"
    assert job.end == (Outcome.DATA_LOST, text)


def test_nobody_is_blamed_for_time_that_the_coordinator_did_not_live(make_job):
    job = make_job()
    job.start()
    job.clock.now_s += 300  # the machine slept
    job.ledger.tick()
    assert not job.state.ended
    job.silence("t1")
    job.pass_time(11)
    assert job.end[0] is Outcome.TRAINER_LOST


def test_a_host_that_registers_again_gets_a_new_lease(make_job):
    job = make_job()
    job.start()
    job.silence("d2")
    job.pass_time(11)
    job.come("d2")
    assert not job.state.host("d2").lost
    job.pass_time(20)
    assert not job.state.ended


def test_heartbeats_of_strangers_to_the_ledger_ask_them_to_register(make_job):
    job = make_job()
    assert job.ledger.heartbeat("t1", RANKS) is False
    job.come("t1")
    assert job.ledger.heartbeat("t1", RANKS) is True


def test_a_data_host_that_leaves_before_the_end_is_lost(make_job):
    job = make_job()
    job.start()
    job.leave("d2", "SIGTERM")
    host = job.state.host("d2")
    assert (host.left, host.lost, host.leave_reason) == (True, True, "SIGTERM")
    assert not job.state.ended
    job.leave("d1", "SIGTERM")
    assert job.end == (Outcome.DATA_LOST, "data host d1, which runs the coordinator, left before the end: SIGTERM")


def test_data_is_lost_when_no_host_can_start_a_worker_again(make_job):
    job = make_job()
    job.start()
    job.beat("d1", workers_gone_for_good=True)
    assert job.state.host("d1").lost
    assert not job.state.ended  # the dispatcher lives, d2 has a worker
    job.beat("d2", workers_gone_for_good=True)
    outcome, message = job.end
    assert outcome is Outcome.DATA_LOST
    assert "d1 has no worker left and cannot start another; d2 has no worker left" in message
    assert job.state.cause["suggested_exit_code"] == 4


def test_a_host_whose_workers_restart_is_not_lost(make_job):
    job = make_job(data=("d1",))
    job.start()
    job.beat("d1", workers_alive=0, workers_lost=1)
    job.pass_time(30)
    assert not job.state.ended
    assert job.state.workers_alive == 0


def test_a_data_host_that_has_not_come_yet_counts_until_the_start_deadline(make_job):
    job = make_job()
    job.come("d1", "t1", "t2")
    job.ledger.publish("d1", "dispatcher", "d1:6000")
    job.beat("d1", workers_gone_for_good=True)
    job.pass_time(59)
    assert not job.state.ended
    job.pass_time(1)
    outcome, message = job.end
    assert outcome is Outcome.DATA_LOST
    assert "d2 did not come" in message


def test_a_failure_that_a_lost_data_host_reported_is_the_cause_of_the_loss(make_job):
    job = make_job()
    job.start()
    job.fail("d2", "d2 ran out of memory")
    assert not job.state.ended
    job.fail("d1", "the dispatcher broke")
    job.leave("d1", "its dispatcher failed")
    assert job.end == (Outcome.DATA_LOST, "the dispatcher broke")
