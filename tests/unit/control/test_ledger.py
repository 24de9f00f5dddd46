from __future__ import annotations

import json

import pytest

from hetero.control.ledger import Ledger, Refused, UnknownHost
from hetero.control.state import HostReport, Outcome, Phase, ProcessReport

WORKING = HostReport(workers_alive=1)
RANKS = HostReport(ranks=1)


class FakeClock:
    """Time that passes only when a test says so; wall time runs with it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now_s


class Job:
    """A ledger with hands: reports of all hosts but the silent ones come every second."""

    def __init__(self, config, clock) -> None:
        self.config, self.clock = config, clock
        self.ledger = Ledger(config, clock=clock, wall=clock.wall)
        self.reports: dict[str, HostReport] = {}

    def come(self, *names: str) -> None:
        for name in names:
            report, role = (WORKING, "data") if name in self.config.data else (RANKS, "trainer")
            self.reports[name] = report
            self.ledger.register(name, role, f"{name}.local", report)

    def start(self) -> None:
        self.come(*self.config.data, *self.config.trainers)
        if self.config.data:
            self.ledger.publish("d1", "dispatcher", "d1:6000")
        assert self.state.phase is Phase.TRAINING

    def silence(self, *names: str) -> None:
        for name in names:
            del self.reports[name]

    def beat(self, name: str, **fields: object) -> bool:
        self.reports[name] = HostReport(**fields)
        return self.ledger.heartbeat(name, self.reports[name])

    def leave(self, name: str, reason: str = "", report: HostReport | None = None) -> None:
        self.reports.pop(name, None)
        self.ledger.leave(name, reason, report)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.now_s += 1.0
            for name, report in self.reports.items():
                self.ledger.heartbeat(name, report)
            self.ledger.tick()

    def restart(self) -> None:
        self.ledger.save()
        self.ledger = Ledger(self.config, clock=self.clock, wall=self.clock.wall)

    def fail(self, name: str, message: str, *, secondary: bool = False, age_s: float = 0.0, wait_s: float = 5.0) -> None:
        self.ledger.report_failure(name, {"host": name, "message": message, "secondary": secondary}, age_s, wait_s)

    @property
    def state(self):
        return self.ledger.state()

    @property
    def end(self) -> tuple[Outcome, str | None]:
        cause = self.state.cause
        return self.state.outcome, None if cause is None else str(cause["message"])


@pytest.fixture
def make_job(make_config):
    def make(**changes: object) -> Job:
        return Job(make_config(**changes), FakeClock())

    return make


# --- the start -------------------------------------------------------------------------------------------------------


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
        (("d1", "t1"), "trainer host t2 did not come"),
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


@pytest.mark.parametrize(("endpoint", "address"), [("", "d1:1"), ("dispatcher", ""), ("x" * 257, "d1:1"), ("x", "y" * 513)])
def test_endpoints_without_sense_are_refused(make_job, endpoint, address):
    job = make_job()
    with pytest.raises(Refused, match="characters"):
        job.ledger.publish("d1", endpoint, address)
    assert job.state.endpoints == {}


# --- leases ----------------------------------------------------------------------------------------------------------


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


def test_the_first_data_host_is_the_dispatcher_and_cannot_be_lost(make_job):
    job = make_job()
    job.start()
    job.silence("d1")
    job.pass_time(11)
    text = "data host d1, which runs the dispatcher, gave no sign of life for 10 s"
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


# --- data hosts that go ----------------------------------------------------------------------------------------------


def test_a_data_host_that_leaves_before_the_end_is_lost(make_job):
    job = make_job()
    job.start()
    job.leave("d2", "SIGTERM")
    host = job.state.host("d2")
    assert (host.left, host.lost, host.leave_reason) == (True, True, "SIGTERM")
    assert not job.state.ended
    job.leave("d1", "SIGTERM")
    assert job.end == (Outcome.DATA_LOST, "data host d1, which runs the dispatcher, left before the end: SIGTERM")


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


# --- the end of training ---------------------------------------------------------------------------------------------


def test_only_the_chief_says_that_training_succeeded(make_job):
    job = make_job()
    job.start()
    with pytest.raises(Refused, match="only the chief, 't1'"):
        job.ledger.end_training("t2", Outcome.SUCCEEDED, None, 0, 0)
    with pytest.raises(Refused, match="data host 'd1' cannot end training"):
        job.ledger.end_training("d1", Outcome.FAILED, None, 0, 0)
    with pytest.raises(Refused, match="never_started"):
        job.ledger.end_training("t1", Outcome.NEVER_STARTED, None, 0, 0)
    assert not job.state.ended
    job.ledger.end_training("t1", Outcome.SUCCEEDED, None, 0, 0)
    assert job.end == (Outcome.SUCCEEDED, None)


def test_the_first_end_counts(make_job):
    job = make_job()
    job.start()
    job.ledger.end_training("t1", Outcome.SUCCEEDED, None, 0, 0)
    job.fail("t2", "too late")
    job.leave("t2", "SIGTERM")
    job.pass_time(100)
    assert job.end == (Outcome.SUCCEEDED, None)
    assert not job.state.host("d1").lost


def test_a_primary_failure_of_any_trainer_ends_the_job(make_job):
    job = make_job()
    job.start()
    job.fail("t2", "boom")
    assert job.end == (Outcome.FAILED, "boom")


def test_the_earliest_primary_failure_is_the_cause_whoever_reports_first(make_job):
    job = make_job()
    job.start()
    job.clock.now_s += 3
    job.fail("t1", "second", age_s=0.1)
    version = job.state.version
    job.fail("t2", "first", age_s=0.5)
    assert job.end == (Outcome.FAILED, "first")
    assert job.state.version > version
    job.fail("t2", "third", age_s=0.0)
    assert job.end == (Outcome.FAILED, "first")


def test_a_secondary_failure_waits_for_the_primary_one(make_job):
    job = make_job()
    job.start()
    cause = {"message": "HorovodInternalError", "secondary": True}
    job.ledger.end_training("t1", Outcome.FAILED, cause, 0.0, 5.0)
    job.pass_time(3)
    assert not job.state.ended
    job.fail("t2", "killed by SIGKILL", age_s=0.2)
    assert job.end == (Outcome.FAILED, "killed by SIGKILL")


def test_a_secondary_failure_is_the_cause_when_no_primary_one_comes(make_job):
    job = make_job()
    job.start()
    job.fail("t1", "HorovodInternalError", secondary=True, wait_s=5.0)
    job.pass_time(4)
    assert not job.state.ended
    job.pass_time(1)
    assert job.end == (Outcome.FAILED, "HorovodInternalError")
    job.fail("t2", "the real reason", age_s=1)  # even now it is worth more
    assert job.end == (Outcome.FAILED, "the real reason")


def test_a_secondary_failure_without_waiting_ends_at_once(make_job):
    job = make_job()
    job.start()
    job.fail("t1", "peer gone", secondary=True, wait_s=0.0)
    assert job.end == (Outcome.FAILED, "peer gone")


def test_success_after_a_pending_failure_is_a_failure(make_job):
    job = make_job()
    job.start()
    job.fail("t2", "peer gone", secondary=True)
    job.ledger.end_training("t1", Outcome.SUCCEEDED, None, 0, 0)
    assert job.end == (Outcome.FAILED, "peer gone")


def test_a_failure_without_a_cause_names_the_host(make_job):
    job = make_job()
    job.start()
    job.ledger.end_training("t1", Outcome.FAILED, None, 0, 0)
    assert job.end == (Outcome.FAILED, "training failed on t1; its launcher gave no cause")


@pytest.mark.parametrize("age_s", [float("nan"), float("inf"), -5.0])
def test_senseless_ages_mean_now(make_job, age_s):
    job = make_job()
    job.start()
    job.fail("t1", "boom", age_s=age_s)
    assert job.end == (Outcome.FAILED, "boom")


# --- trainers that go ------------------------------------------------------------------------------------------------


def test_a_trainer_that_has_done_its_part_needs_no_lease(make_job):
    job = make_job()
    job.start()
    job.leave("t2")
    job.pass_time(60)
    assert not job.state.ended
    job.ledger.end_training("t1", Outcome.SUCCEEDED, None, 0, 0)
    assert job.state.outcome is Outcome.SUCCEEDED


def test_a_trainer_that_leaves_with_a_reason_stops_the_job(make_job):
    job = make_job()
    job.start()
    job.fail("t1", "peer gone", secondary=True)
    job.leave("t2", "SIGTERM")
    assert job.end == (Outcome.STOPPED, "trainer host t2 left before the end: SIGTERM")


def test_a_trainer_that_leaves_before_training_stops_the_job(make_job):
    job = make_job()
    job.come("t1")
    job.leave("t1")
    assert job.end == (Outcome.STOPPED, "trainer host t1 left before training began")


def test_a_chief_that_leaves_well_has_succeeded(make_job):
    job = make_job()
    job.start()
    job.leave("t1")
    assert job.end == (Outcome.SUCCEEDED, None)


def test_numbers_of_a_host_are_kept_after_it_left(make_job):
    job = make_job()
    job.start()
    processes = (ProcessReport("worker-0", 7, "running", 6001),)
    job.beat("d2", workers_alive=1, cpu_s=12.5, workers_lost=2, processes=processes)
    job.ledger.end_training("t1", Outcome.SUCCEEDED, None, 0, 0)
    job.leave("d2", "", HostReport(cpu_s=13.0, workers_lost=2))
    assert (job.state.host("d2").cpu_s, job.state.host("d2").workers_lost) == (13.0, 2)
    job.beat("d2", cpu_s=1.0)  # a heartbeat that was on its way
    assert job.state.host("d2").cpu_s == 13.0


# --- changes and the journal -----------------------------------------------------------------------------------------


def test_weighty_changes_are_versions_at_once_others_soon_and_cpu_time_never(make_job):
    job = make_job()
    job.start()
    version = job.state.version
    job.beat("d1", workers_alive=1, cpu_s=5.0)
    job.pass_time(5)
    assert job.state.version == version
    assert job.state.host("d1").cpu_s == 5.0
    job.beat("d1", workers_alive=1, workers_busy=1)
    assert job.state.version == version
    job.pass_time(1)
    assert job.state.version == version + 1
    job.beat("d1", workers_alive=2, workers_busy=1)
    assert job.state.version == version + 2


def test_a_restarted_coordinator_goes_on_where_it_was(make_job):
    job = make_job()
    job.start()
    job.beat("d2", workers_alive=3, cpu_s=4.0)
    job.pass_time(5)
    before = job.state
    job.clock.now_s += 2
    job.restart()
    after = job.state
    assert (after.phase, after.endpoints, after.restarts) == (Phase.TRAINING, before.endpoints, before.restarts + 1)
    assert after.host("d2").workers_alive == 3
    assert after.uptime_s == pytest.approx(before.uptime_s + 2)
    assert after.version > before.version


def test_no_lease_is_judged_before_a_whole_one_has_passed_since_the_restart(make_job):
    job = make_job()
    job.start()
    job.silence("t2")
    job.pass_time(9)
    job.clock.now_s += 100
    job.restart()
    job.pass_time(10)
    assert not job.state.ended
    job.pass_time(1)
    assert job.end[0] is Outcome.TRAINER_LOST


def test_the_start_deadline_and_a_pending_failure_outlive_a_restart(make_job):
    job = make_job()
    job.come("t1", "d1")
    job.pass_time(50)
    job.restart()
    job.pass_time(10)
    assert job.end[0] is Outcome.NEVER_STARTED

    job = make_job(run_id="run-2")
    job.start()
    job.fail("t1", "peer gone", secondary=True, wait_s=5)
    job.restart()
    job.pass_time(5)
    assert job.end == (Outcome.FAILED, "peer gone")


def test_an_end_outlives_a_restart(make_job):
    job = make_job()
    job.start()
    job.fail("t1", "boom")
    job.restart()
    assert job.end == (Outcome.FAILED, "boom")


def test_the_journal_of_another_run_is_not_used(make_job, make_config):
    job = make_job()
    job.start()
    job.ledger.save()
    assert Ledger(make_config(run_id="run-2")).state().phase is Phase.WAITING


@pytest.mark.parametrize("text", ["", "{", "[1]", json.dumps({"run_id": "run-1"})])
def test_a_broken_journal_means_a_new_start(make_job, make_config, text):
    make_config().journal.write_text(text)
    job = make_job()
    job.start()
    assert job.state.restarts == 0


def test_a_journal_that_cannot_be_written_does_not_stop_the_job(make_job, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    job = make_job(journal=tmp_path / "file" / "journal.json")
    job.start()
    job.ledger.save()
    assert "cannot write the journal" in caplog.text
