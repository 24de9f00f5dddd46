"""Every end of a job: who is killed, what the others do, with which exit code, and what failure.json says.

Each test proves that its fault happened: `LocalJob.kill` waits for the death of the process that the coordinator named.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from local_job import LocalJob, wait_until

from hetero.control.config import CONTROL_PORTS

LEASE_S = 3.0
SLOW = ["--rows=60", "--pieces=10", "--step-s=0.05", f"--lease-s={LEASE_S}", "--grace-s=2"]
HELD = [*SLOW, "--hold-step=10"]  # until `LocalJob.kill`
ENDLESS = [*SLOW, "--epochs=1000"]  # only the fault ends it
TOTAL = 600


def test_a_killed_worker_is_replaced_and_the_epoch_ends(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, HELD) as job:
        job.start().wait_for_steps(5)
        job.kill("data-1", "worker-0")
        codes = job.wait()
        assert codes == {"data-1": 0, "trainer-1": 0}, job.outputs()
        counts = job.rows(0, ranks=1)
        assert max(counts.values()) == 1, "a row was seen twice"
        assert 0 < len(counts) <= TOTAL
        summary = job.summary()
        assert summary["lost_workers"] == 1
        assert summary["rows_lost"] is None
        assert "killed by SIGKILL" in job.output("data-1")


def test_a_killed_dispatcher_resumes_and_no_row_comes_twice_or_never(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 2, 1, [*HELD, "--epochs=2"]) as job:
        job.start().wait_for_steps(5)
        job.kill("data-1", "dispatcher")
        codes = job.wait()
        assert set(codes.values()) == {0}, job.outputs()
        for epoch in range(2):
            assert job.rows(epoch, ranks=1) == dict.fromkeys(range(TOTAL), 1)


@pytest.mark.slow
def test_a_killed_coordinator_is_restarted_and_nothing_is_lost(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, [*HELD, "--epochs=2"]) as job:
        job.start().wait_for_steps(5)
        job.kill("data-1", "coordinator")
        assert set(job.wait().values()) == {0}, job.outputs()
        for epoch in range(2):
            assert job.rows(epoch, ranks=1) == dict.fromkeys(range(TOTAL), 1)


def test_killed_ranks_fail_the_trainer_and_free_the_data_hosts(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 2, 1, [*ENDLESS, "--ranks-per-host=2"]) as job:
        job.start().wait_for_steps(5)
        for rank in ("rank-0", "rank-1"):
            psutil.Process(job.pid("trainer-1", rank)).send_signal(signal.SIGKILL)
        assert job.wait() == {"data-1": 0, "data-2": 0, "trainer-1": 1}, job.outputs()
        failure = job.failure()
        assert failure["process"].startswith("rank-")
        assert failure["signal"] == "SIGKILL"
        assert failure["host"] == "trainer-1"
        assert job.summary()["outcome"] == "failed"


def test_the_chief_host_vanishes_and_the_data_hosts_leave_when_the_lease_lapses(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 2, 1, ENDLESS) as job:
        job.start().wait_for_steps(5)
        rank = psutil.Process(job.pid("trainer-1", "rank-0"))
        job.launchers["trainer-1"].kill()
        killed_s = time.monotonic()
        wait_until("the end of the ranks", lambda: not rank.is_running() or rank.status() == "zombie", 5)
        codes = job.wait()
        assert codes == {"data-1": 5, "data-2": 5, "trainer-1": -signal.SIGKILL}, job.outputs()
        assert max(job.ended_s.values()) - killed_s <= LEASE_S + 2
        assert "trainer-1" in str(job.failure()["message"])


def test_what_training_raises_is_the_cause(tmp_path: Path) -> None:
    options = [*SLOW, "--ranks-per-host=2", "--fail-epoch=0", "--fail-step=3"]
    with LocalJob(tmp_path, 1, 1, options) as job:
        assert job.start().wait() == {"data-1": 0, "trainer-1": 1}, job.outputs()
        failure = job.failure()
        assert failure["exception"] == "ValueError"
        assert failure["message"] == "the loss is not a number"
        assert failure["process"] == "rank-0"
        assert "rows.py" in failure["traceback"]


@pytest.mark.slow
def test_a_failure_on_another_host_is_the_cause_on_the_chief_too(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 2, ENDLESS) as job:
        job.start().wait_for_steps(5)
        job.kill("trainer-2", "rank-0")
        assert job.wait() == {"data-1": 0, "trainer-1": 1, "trainer-2": 1}, job.outputs()
        assert (job.failure()["host"], job.failure()["signal"]) == ("trainer-2", "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_training_goes_on_when_the_second_data_host_is_lost(tmp_path: Path, how: str) -> None:
    with LocalJob(tmp_path, 2, 1, [*SLOW, "--epochs=2"]) as job:
        job.start().wait_for_steps(5)
        job.launchers["data-2"].send_signal(signal.Signals[how])
        codes = job.wait()
        gone = 128 + signal.SIGTERM if how == "SIGTERM" else -signal.SIGKILL
        assert codes == {"data-1": 0, "data-2": gone, "trainer-1": 0}, job.outputs()
        assert job.summary()["lost_workers"] == 1
        assert job.summary()["rows_lost"] is None
        for epoch in range(2):
            assert max(job.rows(epoch, ranks=1).values()) == 1
        assert len(job.rows(1, ranks=1)) == TOTAL, "the survivor prepares the whole of the next epoch"


def test_training_ends_when_the_only_data_host_is_told_to_go(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, ENDLESS) as job:
        job.start().wait_for_steps(5)
        job.launchers["data-1"].terminate()
        told_s = time.monotonic()
        assert job.wait() == {"data-1": 128 + signal.SIGTERM, "trainer-1": 4}, job.outputs()
        assert job.ended_s["trainer-1"] - told_s < LEASE_S + 2
        assert "SIGTERM" in str(job.failure()["message"])


@pytest.mark.slow
def test_training_ends_when_the_only_data_host_vanishes(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, ENDLESS) as job:
        job.start().wait_for_steps(5)
        job.launchers["data-1"].kill()
        killed_s = time.monotonic()
        assert job.wait() == {"data-1": -signal.SIGKILL, "trainer-1": 4}, job.outputs()
        assert job.ended_s["trainer-1"] - killed_s < LEASE_S + 3
        assert job.failure()["exception"] == "DataServiceLost"


@pytest.mark.slow
def test_training_ends_when_the_first_of_two_data_hosts_vanishes(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 2, 1, ENDLESS) as job:
        job.start().wait_for_steps(5)
        job.launchers["data-1"].kill()
        assert job.wait() == {"data-1": -signal.SIGKILL, "data-2": 4, "trainer-1": 4}, job.outputs()
        assert "data-1" in job.failure()["message"]


@pytest.mark.slow
def test_the_chief_vanishes_from_a_homogeneous_job(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 0, 2, ENDLESS) as job:
        job.start().wait_for_steps(5)
        job.launchers["trainer-1"].kill()
        killed_s = time.monotonic()
        assert job.wait() == {"trainer-1": -signal.SIGKILL, "trainer-2": 5}, job.outputs()
        assert job.ended_s["trainer-2"] - killed_s <= LEASE_S + 5
        assert "trainer-1" in job.failure()["message"]


@pytest.mark.slow
def test_a_train_function_that_calls_exit_0_has_ended_well(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 0, 1, [*SLOW, "--ranks-per-host=2", "--exit-step=3"]) as job:
        assert job.start().wait() == {"trainer-1": 0}, job.outputs()
        assert job.summary()["rank_steps"] == [4, 4]


@pytest.mark.slow
def test_a_worker_that_cannot_live_ends_the_job(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, [*SLOW, "--rows=6000"]) as job:
        job.start().wait_for_steps(5)
        last = 0

        def dead_again() -> bool:
            nonlocal last
            state = job.status()
            host = state.host("data-1") if state else None
            pid = next((p.pid for p in host.processes if p.name == "worker-0"), 0) if host else 0
            if pid and pid != last:
                last = pid
                psutil.Process(pid).kill()
            return job.launchers["trainer-1"].poll() is not None

        wait_until("the end of the trainer", dead_again, 90)
        codes = job.wait()
        assert codes["trainer-1"] == 4, job.outputs()
        assert codes["data-1"] == 4
        assert (job.failure()["process"], job.failure()["signal"]) == ("worker-0", "SIGKILL")


def test_no_trainer_ever_comes(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 2, 1, [*SLOW, "--start-timeout-s=8"]) as job:
        started_s = time.monotonic()
        assert job.start("data-1", "data-2").wait(30) == {"data-1": 3, "data-2": 3}, job.outputs()
        assert 8 <= max(job.ended_s.values()) - started_s < 8 + 6
        assert "trainer-1" in str(job.failure()["message"])


@pytest.mark.slow
def test_no_data_host_ever_comes(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, [*SLOW, "--start-timeout-s=6"]) as job:
        assert job.start("trainer-1").wait(40) == {"trainer-1": 3}, job.outputs()
        assert "data-1" in str(job.failure()["message"])


@pytest.mark.slow
def test_a_wrong_token_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, [*SLOW, "--token=right"]) as job:
        job.start("data-1")
        wait_until("the coordinator", lambda: job.status("right"))
        job.start("trainer-1", options=("--token=wrong",))
        assert wait_until("the refusal", lambda: job.launchers["trainer-1"].poll(), 30) == 2
        assert "token" in job.output("trainer-1").lower()
        state = job.status("right")
        assert state is not None
        assert not state.host("trainer-1").registered
        job.start("trainer-1")
        assert job.wait() == {"data-1": 0, "trainer-1": 0}, job.outputs()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_chief_stops_the_job_everywhere(tmp_path: Path, signum: signal.Signals) -> None:
    with LocalJob(tmp_path, 1, 2, ENDLESS) as job:
        job.start().wait_for_steps(5)
        job.launchers["trainer-1"].send_signal(signum)
        codes = job.wait()
        assert codes == {"data-1": 0, "trainer-1": 128 + signum, "trainer-2": 143}, job.outputs()
        assert signum.name in job.failure()["message"]


@pytest.mark.slow
def test_where_the_coordinators_port_is_taken_the_next_one_serves(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, ["--lease-s=5"]) as job:
        with socket.create_server(("127.0.0.1", job.cluster.control_port)):
            assert job.start().wait() == {"data-1": 0, "trainer-1": 0}, job.outputs()
        assert job.summary()["rows"] == 400
        log = (job.run_dir / "logs" / "data-1" / "coordinator.log").read_text()
        assert f"Taking port {job.cluster.control_port + 1}" in log


@pytest.mark.slow
def test_coordinator_ports_that_are_all_taken_are_named(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, SLOW) as job, contextlib.ExitStack() as squatters:
        for number in range(CONTROL_PORTS):
            squatters.enter_context(socket.create_server(("127.0.0.1", job.cluster.control_port + number)))
        job.start("data-1")
        assert job.wait(30) == {"data-1": 2}, job.outputs()
        assert str(job.cluster.control_port) in job.output("data-1")
        assert "--control-port" in job.output("data-1")


@pytest.mark.slow
def test_idle_and_garbage_connections_and_a_port_scan_disturb_nothing(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, [*SLOW, "--epochs=2"]) as job:
        job.start().wait_for_steps(5)
        state = job.status()
        assert state is not None
        addresses = [job.address, state.endpoints["dispatcher"]]
        addresses += [value.split()[0] for name, value in state.endpoints.items() if name.startswith("worker/")]
        assert len(addresses) == 3
        connections = []
        for address in addresses:
            host, _, port = address.rpartition(":")
            for number in range(200):
                connection = socket.create_connection((host, int(port)), timeout=5)
                if number % 2:
                    connection.sendall(bytes((number * 7 + i * i) % 256 for i in range(500)))
                connections.append(connection)
            for _ in range(50):
                socket.create_connection((host, int(port)), timeout=5).close()
        assert len(connections) == 600
        assert job.wait() == {"data-1": 0, "trainer-1": 0}, job.outputs()
        for connection in connections:
            connection.close()
        for epoch in range(2):
            assert job.rows(epoch, ranks=1) == dict.fromkeys(range(TOTAL), 1)
        assert job.summary()["lost_workers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("trainer_hosts", [1, 2])
def test_a_rank_that_does_not_end_after_training_does_not_hold_the_job(tmp_path: Path, trainer_hosts: int) -> None:
    # The last rank, on the chief's own host or on another one, hands in its result and then never ends.
    options = [*SLOW, f"--ranks-per-host={3 - trainer_hosts}", "--linger-rank=1", "--rows=10"]
    with LocalJob(tmp_path, 0, trainer_hosts, options) as job:
        codes = job.start().wait(60)
        assert set(codes.values()) == {0}, job.outputs()
        assert job.summary()["outcome"] == "succeeded"
        assert (job.run_dir / "lingering").exists(), "the fault was not injected"


@pytest.mark.slow
@pytest.mark.parametrize("process", ["coordinator", "dispatcher", "worker-0"])
def test_a_service_that_is_frozen_is_replaced(tmp_path: Path, process: str) -> None:
    with LocalJob(tmp_path, 1, 1, [*SLOW, "--rows=120", "--lease-s=6"]) as job:
        job.start().wait_for_steps(5)
        victim = psutil.Process(job.pid("data-1", process))
        victim.send_signal(signal.SIGSTOP)
        wait_until("the stop", lambda: victim.status() == psutil.STATUS_STOPPED, 10)
        codes = job.wait(120)
        assert codes == {"data-1": 0, "trainer-1": 0}, job.outputs()
        assert "does not answer" in job.output("data-1")
        assert max(job.rows(0, ranks=1).values()) == 1


@pytest.mark.slow
def test_a_rank_that_leaves_with_code_0_in_mid_epoch_has_failed(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 0, 1, [*SLOW, "--vanish-step=3"]) as job:
        assert job.start().wait() == {"trainer-1": 1}, job.outputs()
        assert "before its training was over" in job.failure()["message"]
        assert job.summary()["outcome"] == "failed"
