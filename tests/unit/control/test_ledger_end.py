from __future__ import annotations

import json

import pytest

from hetero.control.ledger import Ledger, Refused
from hetero.control.state import HostReport, Outcome, Phase, ProcessReport


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


def test_a_failure_that_the_coordinator_heard_of_ends_the_job(make_job):
    job = make_job()
    job.start()
    job.ledger.fail({"host": "d1", "message": "odd"})
    assert job.end == (Outcome.FAILED, "odd")


def test_an_earlier_primary_failure_stays_the_cause(make_job):
    job = make_job()
    job.start()
    job.fail("t1", "boom")
    job.ledger.fail({"host": "d1", "message": "odd"})
    assert job.end == (Outcome.FAILED, "boom")


def test_totals_of_the_input_are_told_soon_never_sink_and_outlive_a_restart(make_job):
    job = make_job()
    job.start()
    version = job.state.version
    job.ledger.note_input(3, 1)
    assert job.state.version == version
    job.pass_time(1)
    assert job.state.version == version + 1
    job.ledger.note_input(3, 1)
    job.pass_time(1)
    assert job.state.version == version + 1
    job.restart()
    job.ledger.note_input(0, 2)
    assert (job.state.replayed_batches, job.state.skipped_splits) == (3, 2)
