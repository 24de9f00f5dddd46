"""How many workers a data host has, found in whole jobs: more where they wait, rows once, and nothing ends with them.

Each fault test proves that its fault happened in the middle of a trial: the launcher has said that it starts more, and
has not said what became of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_job import REPOSITORY, LocalJob, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(300)]
JOB = Path(__file__).parent / "jobs" / "spare.py"
PIECES = 24
QUICK = {"WARM_UP_S": 0.5, "SETTLE_S": 0.5, "WINDOW_S": 1.0, "LEAST_BATCHES": 10, "WATCH_S": 4.0}
UP_S = 60.0


def tuned_job(folder: Path, *options: str, rows: int = 200, prepare_s: float = 0.05, **constants: float) -> LocalJob:
    """Return a job with one data host of two CPUs of its own, whose trials take little time."""
    given = [f"--pieces={PIECES}", f"--rows={rows}", f"--prepare-s={prepare_s}", "--grace-s=2", "--lease-s=20"]
    job = LocalJob(folder, 1, 1, [*given, *options], job=f"{JOB}:slow")
    job.launcher = folder / "launcher.py"
    lines = [f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\nimport hetero.launcher, hetero.worker_count"]
    lines += ["import hetero.data_workers\nhetero.data_workers.cpu_quota = hetero.launcher.cpu_quota = lambda _: 2.0"]
    lines += [f"hetero.worker_count.{name} = {value}" for name, value in (QUICK | constants).items()]
    job.launcher.write_text("\n".join([*lines, "hetero.launcher.launch()\n"]))
    return job


def said(job: LocalJob) -> list[str]:
    """Return what the data host's launcher printed of its workers."""
    return re.findall(r"\[data data-1\] workers: (.*)", job.output("data-1"))


def await_trial(job: LocalJob) -> list[int]:
    """Wait until the added workers of the first trial run, and return their pids."""
    wait_until("a trial", lambda: said(job), UP_S)
    assert said(job)[0].startswith("starting 2 more: ranks wait for this host")
    return [job.pid("data-1", name) for name in ("worker-2", "worker-3")]


def assert_all_well(job: LocalJob, rows: int = 200, epochs: int = 1) -> dict[str, Any]:
    """Wait for the end, prove that every row came once, and return what the summary says of the data host's workers."""
    codes = job.wait(120)
    assert set(codes.values()) == {0}, job.outputs()
    assert job.summary()["outcome"] == "succeeded"
    for epoch in range(epochs):
        assert job.rows(epoch, 1) == dict.fromkeys(range(PIECES * rows), 1), f"epoch {epoch}"
    told: dict[str, Any] = job.summary()["tuning"]["data-1"]["workers_per_host"]
    return told


def test_inputs_that_wait_get_more_workers_which_share_the_work(tmp_path: Path) -> None:
    with tuned_job(tmp_path, "--epochs=2") as job:
        job.start()
        told = assert_all_well(job, epochs=2)
        assert told["chosen"] > 2
        assert told["measured"]["4"] > 1.03 * told["measured"]["2"]
        assert said(job)[0] == "starting 2 more: ranks wait for this host, " + said(job)[0].partition(", ")[2]
        workers = {pid for step in job.seen(0) for pid in step["workers"]}
        assert len(workers) > 2
        assert not [pid for pid in workers if psutil.pid_exists(pid)]
        assert job.summary()["lost_workers"] == 0
        assert job.summary()["tuning"]["trainer-1"]["local_workers"]["why"] == "as asked for"


def test_a_deterministic_job_gives_the_same_batches_as_with_a_fixed_number(tmp_path: Path) -> None:
    digests = []
    for number, options in enumerate(((), ("--workers-per-host=3", "--prepare-s=0"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with tuned_job(folder, "--deterministic", *options, rows=150, LEAST_SHORT=0.05) as job:
            job.start()
            told = assert_all_well(job, rows=150)
            assert (told["chosen"] > 2, bool(said(job))) == (True, number == 0)
            if number:
                assert told == {"chosen": 3, "measured": {}, "why": "as asked for"}
            # The column `worker` says who prepared a row; what is the same are the rows and their order.
            digests.append([step["rows"] for step in job.seen(0)])
    assert digests[0] == digests[1]


@pytest.mark.quiet
def test_a_host_whose_cpus_are_used_up_keeps_the_workers_that_it_has(tmp_path: Path) -> None:
    with tuned_job(tmp_path, "--burn-ms=20", prepare_s=0.0, rows=150) as job:
        job.start()
        told = assert_all_well(job, rows=150)
        assert told["chosen"] == 2
        assert re.search(r"of 2 CPUs are used, \d\.\d\d are idle", told["why"])
        assert not [line for line in said(job) if line.startswith("starting")]


def test_added_workers_that_bring_nothing_are_stopped_and_no_row_is_lost(tmp_path: Path) -> None:
    with tuned_job(tmp_path, f"--turns={tmp_path / 'turns'}", rows=100, prepare_s=0.03) as job:
        job.start()
        told = assert_all_well(job, rows=100)
        assert told["chosen"] == 2
        assert told["why"].endswith(", less than 3% more")
        assert any(line.startswith("stopping 2: ") for line in said(job))
        assert job.summary()["lost_workers"] == 0


def test_an_added_worker_that_is_killed_ends_the_trial_and_nothing_else(tmp_path: Path) -> None:
    with tuned_job(tmp_path, rows=100, SETTLE_S=60.0) as job:
        job.start()
        pids = await_trial(job)
        assert len(said(job)) == 1
        job.kill("data-1", "worker-2")
        wait_until("the end of the trial", lambda: len(said(job)) > 1, UP_S)
        assert said(job)[1] == "stopping 2: one of the added workers died while they were being tried"
        wait_until("the end of the added workers", lambda: not any(map(psutil.pid_exists, pids)), UP_S)
        told = assert_all_well(job, rows=100)
        assert told["chosen"] == 2
        assert told["why"] == "one of the added workers died while they were being tried"
        assert job.summary()["lost_workers"] == 1


def test_a_job_that_is_stopped_in_the_middle_of_a_trial_ends_with_all_its_processes(tmp_path: Path) -> None:
    with tuned_job(tmp_path, SETTLE_S=60.0) as job:
        job.start()
        pids = [*await_trial(job), *(job.pid("data-1", name) for name in ("worker-0", "feed"))]
        assert len(said(job)) == 1
        for launcher in job.launchers.values():
            launcher.terminate()
        assert job.wait(30) == {"data-1": 143, "trainer-1": 143}, job.outputs()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
