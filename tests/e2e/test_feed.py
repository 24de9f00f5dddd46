"""The grpc engine in whole jobs: exactly once whatever is lost, what a bad split does, the same order whoever prepares.

Each fault test proves that its fault happened: `LocalJob.kill` waits for the death of the process it killed, and what
the summary counts shows that the fault bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from local_job import LocalJob, wait_until

NUMBERS_JOB = f"{Path(__file__).parent / 'jobs' / 'numbers.py'}:job"
LEASE_S = 3.0
ROWS, PIECES = 100, 12
TOTAL = ROWS * PIECES
SLOWLY = [f"--rows={ROWS}", f"--pieces={PIECES}", "--prepare-s=0.03", f"--lease-s={LEASE_S}", "--grace-s=2"]
SLOWLY += ["--workers-per-host=2", "--batch-size=10", "--rows-per-batch=5"]
FIRE_SEEDS = range(int(os.environ.get("HETERO_FIRE_SEEDS", "2")))


def numbers(folder: Path, data_hosts: int, trainer_hosts: int, *options: str) -> LocalJob:
    return LocalJob(folder, data_hosts, trainer_hosts, [*SLOWLY, *options], job=NUMBERS_JOB)


def assert_exactly_once(job: LocalJob, ranks: int, epochs: int = 1, total: int = TOTAL) -> None:
    for epoch in range(epochs):
        assert job.rows(epoch, ranks) == dict.fromkeys(range(total), 1), f"epoch {epoch}"
    assert len({len(job.seen(rank)) for rank in range(ranks)}) == 1, "ranks took different numbers of steps"


def test_two_ranks_on_two_hosts_get_every_row_once_from_four_workers(tmp_path: Path) -> None:
    with numbers(tmp_path, 2, 2, "--epochs=2") as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=2, epochs=2)
        workers = {pid for rank in range(2) for step in job.seen(rank) for pid in step["workers"]}
        assert len(workers) == 4
        summary = job.summary()
        assert (summary["engine"], summary["replayed_batches"], summary["rows_lost"]) == ("grpc", 0, 0)
        assert summary["rows"] == 2 * TOTAL
        assert summary["cpu_s"]["data"] > 0


def test_a_killed_worker_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    with numbers(tmp_path, 1, 1) as job:
        job.start()
        for kills in range(3):  # one of them may come just when nothing of a split is done
            job.wait_for_steps(8 + 16 * kills)
            job.kill("data-1", "worker-0")
        assert set(job.wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=1)
        assert job.summary()["lost_workers"] == 3
        assert job.summary()["replayed_batches"] > 0


def test_a_lost_data_host_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    with numbers(tmp_path, 2, 2, "--epochs=2") as job:
        job.start().wait_for_steps(8)
        job.launchers["data-2"].kill()
        codes = job.wait()
        gone = {"data-2": -signal.SIGKILL}
        assert codes == {"data-1": 0, "trainer-1": 0, "trainer-2": 0} | gone, job.outputs()
        assert_exactly_once(job, ranks=2, epochs=2)
        assert job.summary()["replayed_batches"] > 0
        assert job.summary()["lost_workers"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("process", ["coordinator", "feed"])
def test_a_killed_service_costs_no_row_and_doubles_none(tmp_path: Path, process: str) -> None:
    with numbers(tmp_path, 2, 2, "--epochs=2") as job:
        job.start().wait_for_steps(8)
        job.kill("data-1", process)
        assert set(job.wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=2, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("process", ["coordinator", "feed", "worker-0"])
def test_a_process_that_somebody_else_told_to_end_is_started_again(tmp_path: Path, process: str) -> None:
    with numbers(tmp_path, 2, 1, "--epochs=2") as job:
        job.start().wait_for_steps(8)
        victim = psutil.Process(job.pid("data-1", process))
        victim.terminate()
        wait_until(f"the end of {process}", lambda: not victim.is_running() or victim.status() == "zombie", 10)
        assert set(job.wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=1, epochs=2)


@pytest.mark.slow
def test_a_coordinator_that_lost_its_journal_too_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    with numbers(tmp_path, 2, 1, "--epochs=2") as job:
        job.start().wait_for_steps(8)
        coordinator = psutil.Process(job.pid("data-1", "coordinator"))
        journals = list((job.run_dir / "work" / "data-1").glob("*.json"))
        assert any(path.name == "splits.json" for path in journals)
        coordinator.suspend()  # or it would write them again
        for path in journals:
            path.write_text("{garbage")
        coordinator.kill()
        wait_until("the death of the coordinator", lambda: not coordinator.is_running(), 10)
        assert set(job.wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=1, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("process", ["feed", "worker-0"])
def test_a_frozen_process_is_replaced_and_costs_no_row(tmp_path: Path, process: str) -> None:
    with numbers(tmp_path, 1, 1, "--prepare-s=0.1", "--lease-s=6") as job:
        job.start().wait_for_steps(5)
        victim = psutil.Process(job.pid("data-1", process))
        victim.send_signal(signal.SIGSTOP)
        wait_until("the stop", lambda: victim.status() == psutil.STATUS_STOPPED, 10)
        assert set(job.wait(120).values()) == {0}, job.outputs()
        assert "does not answer" in job.output("data-1")
        assert_exactly_once(job, ranks=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", FIRE_SEEDS)
def test_exactly_once_under_fire(tmp_path: Path, seed: int) -> None:
    """A random worker is killed each second, and a whole data host in the middle of an epoch."""
    choose = random.Random(seed)
    rows, pieces = 500, 40
    options = [f"--rows={rows}", f"--pieces={pieces}", "--rows-per-batch=20", "--batch-size=20", "--epochs=2"]
    options += ["--prepare-s=0.015"]
    with numbers(tmp_path, 2, 1, *options, "--ranks-per-host=2") as job:
        job.start().wait_for_steps(choose.randint(5, 50))
        kills, host_lost_at = 0, choose.randint(150, 350)
        while job.launchers["trainer-1"].poll() is None:
            due_s = time.monotonic() + 1.0
            kills += _kill_a_worker(job, choose)
            if job.launchers["data-2"].poll() is None and len(job.seen(0)) >= host_lost_at:
                job.launchers["data-2"].kill()
                host_lost_at = -1
            while time.monotonic() < due_s and job.launchers["trainer-1"].poll() is None:
                time.sleep(0.02)
        codes = job.wait()
        assert codes == {"data-1": 0, "data-2": -signal.SIGKILL, "trainer-1": 0}, job.outputs()
        assert kills >= 3
        assert host_lost_at == -1, "the data host was never lost"
        assert_exactly_once(job, ranks=2, epochs=2, total=rows * pieces)
        assert job.summary()["replayed_batches"] > 0


def _kill_a_worker(job: LocalJob, choose: random.Random) -> int:
    """SIGKILL a random worker; return how many were killed."""
    state = job.status()
    hosts = [host for host in (state.data_hosts if state else ()) if not host.lost and not host.left]
    pids = [process.pid for host in hosts for process in host.processes if process.name.startswith("worker-")]
    pids = [pid for pid in pids if pid and psutil.pid_exists(pid)]
    if not pids:
        return 0
    try:
        os.kill(choose.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def test_a_split_in_which_the_jobs_code_fails_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    with numbers(tmp_path, 2, 1, "--bad-piece=5") as job:
        assert job.start().wait() == {"data-1": 0, "data-2": 0, "trainer-1": 1}, job.outputs()
        failure = job.failure()
        assert failure["exception"] == "ValueError"
        assert "cannot read piece 5" in failure["message"]
        assert "split 5" in failure["message"]
        assert failure["host"] in ("data-1", "data-2")
        assert failure["process"].startswith("worker-")
        assert "numbers.py" in failure["traceback"]


def test_a_splits_function_that_fails_is_the_cause_also_where_the_trainer_comes_late(tmp_path: Path) -> None:
    with numbers(tmp_path, 1, 1, "--bad-splits") as job:
        job.start("data-1")
        wait_until("a worker", lambda: (state := job.status()) is not None and state.workers_alive)
        job.start("trainer-1")
        assert job.wait() == {"data-1": 0, "trainer-1": 1}, job.outputs()
        assert (job.failure()["exception"], job.failure()["host"]) == ("ValueError", "data-1")
        assert "cannot list the pieces" in job.failure()["message"]


@pytest.mark.slow
def test_a_bad_split_is_skipped_counted_and_reported_where_that_is_asked_for(tmp_path: Path) -> None:
    with numbers(tmp_path, 1, 1, "--bad-piece=5", "--bad-split=skip") as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        missing = set(range(TOTAL)) - set(job.rows(0, ranks=1))
        assert missing == set(range(5 * ROWS + 10, 6 * ROWS))
        assert max(job.rows(0, ranks=1).values()) == 1
        assert job.summary()["skipped_splits"] == 1
        assert "cannot read piece 5" in job.output("data-1")


@pytest.mark.slow
def test_a_split_that_kills_every_worker_is_found_out(tmp_path: Path) -> None:
    with numbers(tmp_path, 1, 1, "--deadly-piece=5", "--workers-per-host=1") as job:
        assert job.start().wait(120) == {"data-1": 0, "trainer-1": 1}, job.outputs()
        assert "split 5" in job.failure()["message"]
        assert job.failure()["host"] == "data-1"


@pytest.mark.slow
def test_deterministic_batches_are_the_same_for_any_number_of_workers_and_after_a_death(tmp_path: Path) -> None:
    def digests(folder: Path, workers: int, fault: Callable[[LocalJob], object] | None = None) -> list[str]:
        folder.mkdir()
        options = [f"--workers-per-host={workers}", "--deterministic", "--track=false", "--epochs=2"]
        options += [f"--step-s={0.01 if fault is None else 0.1}"]  # a lost host is noticed after a lease
        with numbers(folder, 2, 1, *options, "--ranks-per-host=2") as job:
            job.start()
            if fault is not None:
                job.wait_for_steps(10)
                fault(job)
            codes = job.wait()
            assert codes["trainer-1"] == 0, job.outputs()
            assert_exactly_once(job, ranks=2, epochs=2)
            summary = job.summary()
            assert (summary["lost_workers"] > 0) == (fault is not None)
            found: list[str] = summary["batch_digests"]
            assert len(found) == 2
            assert found[0] != found[1]
            return found

    first = digests(tmp_path / "1", 1)
    assert digests(tmp_path / "2", 2) == first
    assert digests(tmp_path / "5", 5) == first
    assert digests(tmp_path / "killed", 2, lambda job: job.kill("data-1", "worker-0")) == first
    assert digests(tmp_path / "lost", 2, lambda job: job.launchers["data-2"].kill()) == first


@pytest.mark.slow
def test_a_job_over_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    names = ("cert", "key", "ca")
    with numbers(tmp_path, 2, 2, *(f"--tls-{name}={tmp_path / name}.pem" for name in names), "--token=s3cret") as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=2)


def make_certificate(folder: Path) -> None:
    """Write cert.pem and key.pem for 127.0.0.1, signed by themselves, and ca.pem."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hetero", "-addext",
         "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "ca.pem").write_bytes((folder / "cert.pem").read_bytes())


@pytest.mark.slow
def test_input_that_does_not_fit_the_buffers_still_arrives(tmp_path: Path) -> None:
    options = ["--prefetch-bytes=1", "--buffer-bytes=1", "--size=2000", "--prepare-s=0"]
    with numbers(tmp_path, 1, 1, *options, "--ranks-per-host=2") as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        assert_exactly_once(job, ranks=2)
