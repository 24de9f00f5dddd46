"""Launchers of a container cluster: the chief's ends first, so that a compose run ends with its exit code."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from local_job import LocalJob, wait_until

from hetero.clusters import LEAVE_AFTER_CHIEF_ENV

QUICK = ["--rows=16", "--pieces=4", "--lease-s=5", "--grace-s=2"]


@pytest.fixture(autouse=True)
def _containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEAVE_AFTER_CHIEF_ENV, "1")


def end_as_compose(job: LocalJob) -> str:
    """Stop all once the first has ended, as `up --abort-on-container-exit` does; return which one that was."""
    first = wait_until(
        "the end of a launcher",
        lambda: [host for host, launcher in job.launchers.items() if launcher.poll() is not None],
    )
    assert (job.run_dir / "summary.json").exists(), "the chief had not written what the run leaves"
    for launcher in job.launchers.values():
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
    assert len(first) == 1, f"{first} ended together\n{job.outputs()}"
    return first[0]


@pytest.mark.parametrize(
    ("options", "code"), [([], 0), (["--fail-epoch=0", "--fail-step=1"], 1)], ids=["well", "failed"]
)
def test_the_chief_ends_first_and_the_stop_that_follows_changes_no_exit_code(
    tmp_path: Path, options: list[str], code: int
) -> None:
    with LocalJob(tmp_path, 2, 1, [*QUICK, *options]) as job:
        job.start()
        assert end_as_compose(job) == "trainer-1"
        assert job.wait() == {"data-1": 0, "data-2": 0, "trainer-1": code}, job.outputs()
        assert job.summary()["outcome"] == ("failed" if code else "succeeded")
        assert all((job.run_dir / "work" / host / "launcher.pulse").exists() for host in job.launchers)


@pytest.mark.slow
def test_the_chief_ends_first_where_it_has_the_coordinator(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 0, 2, QUICK) as job:
        job.start()
        assert end_as_compose(job) == "trainer-1"
        assert set(job.wait().values()) == {0}, job.outputs()


@pytest.mark.slow
def test_where_nobody_stops_them_the_others_end_by_themselves(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, QUICK) as job:
        job.start()
        assert job.wait() == {"data-1": 0, "trainer-1": 0}, job.outputs()
        assert job.ended_s["trainer-1"] < job.ended_s["data-1"]


@pytest.mark.slow
def test_a_chief_that_vanishes_is_not_waited_for_beyond_its_lease(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 1, 1, [*QUICK, "--epochs=1000", "--step-s=0.05"]) as job:
        job.start().wait_for_steps(3)
        job.launchers["trainer-1"].kill()
        killed_s = time.monotonic()
        assert job.wait()["data-1"] == 5, job.outputs()
        assert job.ended_s["data-1"] - killed_s < 5 + 12, "it waited for a chief that was lost"
