"""A job that is told to stop ends with a checkpoint, if it has one, on all hosts within the grace period.

How long an end may take is the grace and what a launcher needs around it, `AROUND_S`.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from local_job import LocalJob, wait_until

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parent / "jobs"
GRACE_S, AROUND_S = 3.0, 3.0
SETTINGS = [f"--grace-s={GRACE_S}", "--lease-s=3"]


def stopping_job(folder: Path, data_hosts: int, trainer_hosts: int, *options: str) -> LocalJob:
    return LocalJob(folder, data_hosts, trainer_hosts, [*SETTINGS, *options], job=f"{JOBS / 'stops.py'}:job")


def stop(job: LocalJob, *hosts: str, signum: int = signal.SIGTERM) -> tuple[dict[str, int], float]:
    """Signal the launchers of these hosts; return all exit codes and how long the end took, which must be in time."""
    for host in hosts:
        job.launchers[host].send_signal(signum)
    signalled_s = time.monotonic()
    codes = job.wait(GRACE_S + 30)
    seconds = max(job.ended_s.values()) - signalled_s
    assert seconds < GRACE_S + AROUND_S, job.outputs()
    return codes, seconds


def weights(job: LocalJob) -> list[int]:
    """Return what was saved, by rank 0 alone."""
    (path,) = (job.run_dir / "checkpoints").iterdir()
    assert path.name == "weights-0.json"
    return json.loads(path.read_text())


def steps_in(line: str) -> int:
    found = re.search(r"at epoch 0, step (\d+)", line)
    assert found, line
    return int(found[1])


@pytest.mark.parametrize(
    ("data_hosts", "told", "signum"),
    [
        (0, "trainer-1", signal.SIGTERM),
        (0, "trainer-2", signal.SIGINT),
        (1, "trainer-1", signal.SIGINT),
        (1, "trainer-2", signal.SIGTERM),
    ],
)
def test_whichever_trainer_host_is_told_the_chief_leaves_the_weights_of_whole_steps(
    tmp_path: Path, data_hosts: int, told: str, signum: signal.Signals
) -> None:
    with stopping_job(tmp_path, data_hosts, 2) as job:
        job.start().wait_for_steps(5)
        codes, _ = stop(job, told, signum=signum)
        hosts = {"trainer-1": 143, "trainer-2": 143, **({"data-1": 0} if data_hosts else {})}
        assert codes == hosts | {told: 128 + signum}, job.outputs()
        name = signum.name if told == "trainer-1" else "SIGTERM"  # what its own launcher got, or sends
        line = re.search(rf"stopped by {name} at .* checkpoint written in \d\.\d s", job.output("trainer-1"))
        assert line, job.outputs()
        first, second = weights(job)
        assert first == second == steps_in(line[0]) == len(job.seen(0))
        message = job.failure()["message"]
        assert f"stopped by {signum.name}; a checkpoint was written at epoch 0, step {first} in 0." in message
        assert job.summary()["outcome"] == "stopped"
        assert "whether a checkpoint was written is told on trainer-1" in job.output("trainer-2")
        assert "Traceback" not in job.outputs()


def test_all_hosts_told_at_once_is_a_stop_with_a_checkpoint(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 1, 2) as job:
        job.start().wait_for_steps(5)
        codes, _ = stop(job, *job.launchers)
        assert codes == {"data-1": 143, "trainer-1": 143, "trainer-2": 143}, job.outputs()
        first, second = weights(job)
        assert first == second
        assert job.summary()["outcome"] == "stopped"
        assert "stopped by SIGTERM; a checkpoint was written" in job.failure()["message"]


def test_a_job_that_loses_its_input_leaves_a_checkpoint_too(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 1, 2) as job:
        job.start().wait_for_steps(5)
        codes, _ = stop(job, "data-1")
        assert codes == {"data-1": 143, "trainer-1": 4, "trainer-2": 4}, job.outputs()
        first, second = weights(job)
        assert first == second
        assert re.search("stopped by SIGTERM; a checkpoint was written", job.failure()["message"])
        assert job.summary()["outcome"] == "failed"


def test_a_job_that_fails_leaves_none(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 0, 2) as job:
        job.start().wait_for_steps(5)
        job.kill("trainer-2", "rank-0")
        assert job.wait() == {"trainer-1": 1, "trainer-2": 1}, job.outputs()
        assert job.failure()["signal"] == "SIGKILL"
        assert not (job.run_dir / "checkpoints").exists()


@pytest.mark.parametrize("data_hosts", [0, 1])
def test_rank_0_that_waits_for_input_leaves_a_checkpoint(tmp_path: Path, data_hosts: int) -> None:
    # 5 batches of the first split, and then none, whichever engine it is.
    with stopping_job(tmp_path, data_hosts, 1, "--hang=input", "--hang-step=5", "--workers-per-host=1") as job:
        job.start().wait_for_steps(5)
        codes, _ = stop(job, "trainer-1")
        assert codes["trainer-1"] == 143, job.outputs()
        assert weights(job) == [5, 5]
        assert "a checkpoint was written at epoch 0, step 5" in job.failure()["message"]


@pytest.mark.parametrize(
    ("data_hosts", "told", "code"), [(0, "trainer-1", 143), (1, "trainer-2", 143), (1, "data-1", 4)]
)
def test_a_stop_does_not_wait_for_a_step_of_a_simulated_device(
    tmp_path: Path, data_hosts: int, told: str, code: int
) -> None:
    with stopping_job(tmp_path, data_hosts, 2, "--device-step-ms=60000") as job:
        job.start().wait_for_steps(1)
        job.wait_for_steps(1, rank=1)
        codes, _ = stop(job, told)
        assert (codes["trainer-1"], codes["trainer-2"]) == (code, code), job.outputs()
        assert weights(job) == [1, 1]
        assert "at epoch 0, step 1: checkpoint written" in job.output("trainer-1")  # and not after a third of the grace


def test_a_job_without_a_checkpoint_is_stopped_in_a_step_of_a_simulated_device_too(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 0, 1, "--device-step-ms=60000", "--saves=never") as job:
        job.start().wait_for_steps(1)
        codes, _ = stop(job, "trainer-1")
        assert codes == {"trainer-1": 143}, job.outputs()


@pytest.mark.parametrize("trainer_hosts", [1, 2])
def test_rank_0_in_the_middle_of_a_collective_leaves_a_checkpoint_after_a_third_of_the_grace(
    tmp_path: Path, trainer_hosts: int
) -> None:
    with stopping_job(tmp_path, 0, trainer_hosts, "--hang-step=5") as job:
        job.start().wait_for_steps(6)
        codes, seconds = stop(job, f"trainer-{trainer_hosts}")
        assert set(codes.values()) == {143}, job.outputs()
        assert weights(job) == [6, 6]
        assert "at epoch 0, step 5 (no end of the step within 1.0 s): checkpoint written" in job.output("trainer-1")
        assert seconds >= GRACE_S / 3


def test_a_save_that_raises_is_told_and_changes_nothing_about_the_end(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 0, 2, "--saves=badly") as job:
        job.start().wait_for_steps(3)
        codes, _ = stop(job, "trainer-1")
        assert codes == {"trainer-1": 143, "trainer-2": 143}, job.outputs()
        assert "no checkpoint was written: OSError: [Errno 28] No space left on device" in job.failure()["message"]
        assert job.summary()["outcome"] == "stopped"
        log = (job.run_dir / "logs" / "trainer-1" / "rank-0.log").read_text()
        assert "Traceback" in log
        assert ": no checkpoint, OSError: [Errno 28] No space left on device" in log


def test_a_save_that_takes_longer_than_the_grace_is_killed_with_it(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 0, 2, "--saves=slowly") as job:
        job.start().wait_for_steps(3)
        codes, seconds = stop(job, "trainer-1")
        assert codes == {"trainer-1": 143, "trainer-2": 143}, job.outputs()
        assert "no checkpoint was written: rank 0 was killed before it was done" in job.failure()["message"]
        assert seconds >= GRACE_S
        assert "not ended 3.0 s after SIGTERM, sending SIGKILL" in job.output("trainer-1")


def test_a_second_signal_does_not_wait_for_the_checkpoint(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 0, 1, "--saves=slowly", "--grace-s=60") as job:
        job.start().wait_for_steps(3)
        launcher, report = job.launchers["trainer-1"], job.run_dir / "work" / "trainer-1" / "checkpoint.json"
        launcher.send_signal(signal.SIGTERM)
        wait_until("the beginning of the save", report.exists, 10)
        assert launcher.poll() is None
        codes, _ = stop(job, "trainer-1")
        assert codes == {"trainer-1": 143}, job.outputs()
        assert "no checkpoint was written: rank 0 was killed" in job.failure()["message"]


def test_a_job_without_a_checkpoint_ends_at_once_and_says_so(tmp_path: Path) -> None:
    with stopping_job(tmp_path, 1, 2, "--saves=never", "--grace-s=60", "--half-s=100") as job:
        job.start()
        wait_until("training", lambda: (state := job.status()) and state.phase.value == "training")
        codes, _ = stop(job, "trainer-2")
        assert codes == {"data-1": 0, "trainer-1": 143, "trainer-2": 143}, job.outputs()
        message = job.failure()["message"]
        assert (
            "stopped by SIGTERM; no checkpoint was written, since the job had registered none (ctx.on_stop)" in message
        )


def fit_job(folder: Path, data_hosts: int, trainer_hosts: int, *options: str) -> LocalJob:
    folder.mkdir()
    settings = ["--grace-s=10", "--lease-s=10", f"--checkpoint-dir={folder.parent / 'kept'}", "--epochs=3", *options]
    return LocalJob(folder, data_hosts, trainer_hosts, settings, job=f"{JOBS / 'fitted.py'}:job")


@pytest.mark.parametrize(
    ("data_hosts", "trainer_hosts", "engine"), [(0, 2, "local"), (1, 2, "tf_data"), (1, 1, "grpc")]
)
def test_a_fit_that_was_stopped_in_mid_epoch_goes_on_to_the_same_number_of_epochs(
    tmp_path: Path, data_hosts: int, trainer_hosts: int, engine: str
) -> None:
    whole = dict.fromkeys(range(320), 1)
    settings = f"--engine={engine}", "--workers-per-host=1"
    with fit_job(tmp_path / "first", data_hosts, trainer_hosts, *settings, "--pause-s=0.05") as job:
        job.start().wait_for_steps(52 // trainer_hosts)  # an epoch has 40 steps of all ranks
        job.launchers[f"trainer-{trainer_hosts}"].send_signal(signal.SIGTERM)
        codes = job.wait(30)
        assert {code for host, code in codes.items() if host.startswith("trainer")} == {143}, job.outputs()
        assert job.rows(0, trainer_hosts) == whole
        assert 0 < len(job.rows(1, trainer_hosts)) < 320, "it was not stopped in mid-epoch"
        assert re.search(r"stopped by SIGTERM at epoch 1, step \d+: checkpoint written", job.output("trainer-1"))
    with fit_job(tmp_path / "second", data_hosts, trainer_hosts, *settings) as job:
        assert set(job.start().wait(90).values()) == {0}, job.outputs()
        assert "1 of 3 epochs are done" in job.output("trainer-1")
        assert [job.rows(epoch, trainer_hosts) for epoch in range(3)] == [{}, whole, whole]
        assert job.summary()["results"]["epochs_in_history"] == 3
    if engine != "tf_data":
        return
    with fit_job(tmp_path / "third", data_hosts, trainer_hosts, *settings) as job:
        assert set(job.start().wait(90).values()) == {0}, job.outputs()
        assert "training was complete already" in job.output("trainer-1")
        assert job.summary()["steps"] == 0


def test_rank_0_in_an_allreduce_of_horovod_that_cannot_end_leaves_a_checkpoint(tmp_path: Path) -> None:
    with fit_job(tmp_path / "run", 0, 2, "--pause-s=0.05", "--grace-s=6") as job:
        job.start().wait_for_steps(3)
        peer = psutil.Process(job.pid("trainer-2", "rank-0"))
        peer.send_signal(signal.SIGSTOP)
        wait_until("the stop", lambda: peer.status() == psutil.STATUS_STOPPED, 10)
        seen = -1
        while seen != len(job.seen(0)):  # until rank 0 waits for the other
            seen = len(job.seen(0))
            time.sleep(0.5)
        job.launchers["trainer-1"].send_signal(signal.SIGTERM)
        assert job.wait(30)["trainer-1"] == 143, job.outputs()
        assert f"at epoch 0, step {seen - 1} (no end of the step within 2.0 s): checkpoint" in job.output("trainer-1")
        assert (tmp_path / "kept" / "fit.npz").exists()
