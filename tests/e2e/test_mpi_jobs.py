"""Jobs whose trainer group SageMaker's toolkit starts by mpirun: one launcher a rank. Needs root, OpenMPI and sshd.

The toolkit sleeps for half a minute after every MPI job that went well, and on a host without mpirun after any, so jobs
that only have to end well run at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_job import wait_until
from sagemaker_cluster import RUN_DIR, End, SageMakerCluster

MPI = Path(__file__).resolve().parents[2] / ".venv" / "mpi-horovod" / "bin"
ROWS = dict.fromkeys(range(400), 1)  # what both jobs make: 8 splits of 50 rows
UNSORTED = ["algo-4", "algo-2", "algo-1", "algo-3"]  # trainers algo-4, where mpirun and rank 0 are, and algo-1
LEASE_S = 5
SLEEP_S = 31  # of the toolkit, on a trainer host without mpirun, after orted has ended
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs sshd: apt-get install openssh-server"),
]
needs_mpi_build = pytest.mark.skipif(not MPI.exists(), reason="needs a Horovod for MPI: tests/e2e/mpi_horovod.sh")


def grpc(folder: Path, hyperparameters: dict[str, Any] | None = None, **options: Any) -> SageMakerCluster:
    """Return a cluster whose job needs no TensorFlow, so that its image has none; two ranks a trainer host."""
    settings = {"engine": "grpc", "lease-s": LEASE_S, "remainder": "pad", **(hyperparameters or {})}
    return SageMakerCluster(folder, hyperparameters=settings, **{"data": 2, "tensorflow": False, "mpi": 2, **options})


def tf_data(folder: Path, hyperparameters: dict[str, Any] | None = None, **options: Any) -> SageMakerCluster:
    """Return a cluster with a TensorFlow job; two ranks a trainer host."""
    settings = {"engine": "tf_data", "lease-s": 20, "remainder": "pad", **(hyperparameters or {})}
    return SageMakerCluster(folder, 2, job="rows.py", hyperparameters=settings, **{"mpi": 2, **options})


def built_for_mpi() -> dict[str, str]:
    """Return the environment of images whose Horovod was built for MPI."""
    return {"PATH": f"{MPI}:{os.environ['PATH']}"}


@contextlib.contextmanager
def running(*clusters: SageMakerCluster) -> Iterator[None]:
    """Run jobs at the same time; clean up after all."""
    with contextlib.ExitStack() as stack:
        for cluster in clusters:
            stack.enter_context(cluster)
        for cluster in clusters:
            cluster.start()
        yield


def left(cluster: SageMakerCluster, host: str) -> list[str]:
    """Return what still runs on a host, but for the toolkit's sshd, which in a container ends with the toolkit."""
    return [command for command in cluster.processes(host) if not command.startswith("sshd")]


def succeeded(cluster: SageMakerCluster, ends: dict[str, End], ranks: int, epochs: int = 1) -> dict[str, Any]:
    """Assert that the job went well everywhere and saw each row once; return its summary."""
    for host, end in ends.items():
        assert (end.code, end.success, end.failure) == (0, True, None), cluster.logs()
        assert left(cluster, host) == []
        models = list((cluster.folder(host) / "model").iterdir())
        assert [model.name for model in models] == (["model.json"] if host == cluster.chief else [])
    assert [cluster.rows(epoch) for epoch in range(epochs)] == [ROWS] * epochs
    summary = cluster.summary()
    assert (summary["outcome"], summary["ranks"], summary["rows"]) == ("succeeded", ranks, 400 * epochs)
    return summary


def launcher(cluster: SageMakerCluster, host: str, local_rank: int) -> psutil.Process:
    """Return one of a host's launchers."""
    found = [
        process
        for process in cluster.hosts[host].processes()
        if "launcher.py" in process.cmdline()  # mpirun's command line has it too, but mpirun is no rank
        and process.environ().get("OMPI_COMM_WORLD_LOCAL_RANK") == str(local_rank)
    ]
    assert len(found) == 1
    return found[0]


# Jobs that go well


def test_a_job_trains_under_mpirun_as_it_does_without(tmp_path: Path) -> None:
    plain = grpc(tmp_path / "plain", {"epochs": 2, "ranks-per-host": 2}, mpi=None)
    one = grpc(tmp_path / "one", {"epochs": 2})
    two = grpc(
        tmp_path / "two",
        {"epochs": 2, "local-workers": 1},
        trainers=2,
        names=UNSORTED,
        environment={"HETERO_TOKEN": "of the container's environment".replace(" ", "-")},
    )
    homogeneous = grpc(tmp_path / "none", {"engine": "local", "epochs": 2}, data=0, trainers=2, names=UNSORTED[::2])
    with running(plain, one, two, homogeneous):
        by_launcher = succeeded(plain, plain.wait(120), ranks=2, epochs=2)
        by_mpirun = succeeded(one, one.wait(120), ranks=2, epochs=2)
        for key in ("steps", "rank_steps", "rows", "dropped_rows", "hosts", "ranks"):
            assert by_mpirun[key] == by_launcher[key], key
        assert "[1,0]<stdout>:[trainer algo-1 rank-0] hetero_step_ms=" in one.log("algo-1")  # for metric definitions
        summary = succeeded(two, two.wait(120), ranks=4, epochs=2)
        assert two.chief == "algo-4"
        assert summary["rank_steps"] == [26] * 4
        for host in two.trainer_hosts:  # each trainer host has its local worker once, and not once a rank
            logs = {path.name for path in (two.folder(host) / RUN_DIR / "logs" / host).iterdir()}
            assert logs == {"rank-0.log", "rank-1.log", "feed.log", "worker-0.log"}
        assert succeeded(homogeneous, homogeneous.wait(120), ranks=4, epochs=2)["engine"] == "local"
        # The first host's first launcher runs the coordinator, though rank 0 is on the other one.
        assert (homogeneous.folder("algo-1") / RUN_DIR / "logs" / "algo-1" / "coordinator.log").exists()


@needs_mpi_build
def test_tensorflow_jobs_train_whichever_way_horovod_was_built(tmp_path: Path) -> None:
    mpi = tf_data(tmp_path / "mpi", environment=built_for_mpi())
    gloo = tf_data(tmp_path / "gloo", trainers=2, names=UNSORTED)
    with running(mpi, gloo):
        assert succeeded(mpi, mpi.wait(300), ranks=2)["results"]["controller"] == "mpi"
        assert succeeded(gloo, gloo.wait(120), ranks=4)["results"]["controller"] == "gloo"


# Jobs that fail


def test_an_exception_in_training_is_what_sagemaker_shows(tmp_path: Path) -> None:
    cluster = grpc(tmp_path, {"fail_epoch": 0, "fail_step": 3, "fail_length": 3000, "step_s": 0.02})
    with running(cluster):
        ends = cluster.wait(60)
        failed(cluster, ends, "ValueError: the loss is not a number !!!", "rank-0 on algo-1")


@pytest.mark.parametrize(
    ("local_rank", "signum", "said"),
    [
        (0, signal.SIGKILL, "the launcher of rank-0 is gone without a word"),
        (1, signal.SIGKILL, "the launcher of rank-1 is gone without a word"),
        (1, signal.SIGTERM, "Stopped: stopped by SIGTERM"),
    ],
)
def test_a_launcher_that_is_hit_ends_the_job_with_that_cause(
    tmp_path: Path, local_rank: int, signum: int, said: str
) -> None:
    cluster = grpc(tmp_path, {"step_s": 0.2, "epochs": 20})
    with running(cluster):
        cluster.wait_for_steps(3)
        launcher(cluster, "algo-1", local_rank).send_signal(signum)
        hit_s = time.monotonic()
        ends = cluster.wait(60)
        failed(cluster, ends, said)
        assert max(end.ended_s for end in ends.values()) - hit_s < LEASE_S + 10


def test_mpirun_that_is_stopped_ends_the_job(tmp_path: Path) -> None:
    cluster = grpc(tmp_path, {"step_s": 0.2, "epochs": 20})
    with running(cluster):
        cluster.wait_for_steps(3)
        (mpirun,) = (process for process in cluster.hosts["algo-1"].processes() if process.name() == "mpirun")
        mpirun.send_signal(signal.SIGTERM)
        ends = cluster.wait(LEASE_S + 10)
        failed(cluster, ends, "Stopped: stopped by SIGTERM: mpirun does so")


def test_a_job_that_is_stopped_leaves_its_checkpoint_under_mpirun_too(tmp_path: Path) -> None:
    settings = {"grace-s": 8, "sagemaker_mpi_custom_mpi_options": "-mca odls_base_sigkill_timeout 10"}
    cluster = grpc(tmp_path, settings, job="stops.py")
    with running(cluster):
        cluster.wait_for_steps(3)
        launcher(cluster, "algo-1", 1).send_signal(signal.SIGTERM)
        ends = cluster.wait(60)
        failed(cluster, ends, "Stopped: stopped by SIGTERM", "a checkpoint was written at epoch 0, step")
        weights = json.loads((cluster.folder("algo-1") / "checkpoints" / "weights-0.json").read_text())
        assert weights[0] == weights[1] > 0  # those of whole steps


def test_a_trainer_host_without_mpirun_that_fails_or_vanishes_ends_the_job(tmp_path: Path) -> None:
    killed, unplugged = (
        grpc(tmp_path / name, {"step_s": 0.2, "epochs": 30, "lease-s": lease_s}, trainers=2, names=UNSORTED)
        for name, lease_s in (("a", 4 * LEASE_S), ("b", LEASE_S))
    )
    with running(killed, unplugged):
        for cluster in (killed, unplugged):
            cluster.wait_for_steps(3)
        killed.signal("algo-1", "rank-1", signal.SIGKILL)
        killed_s = time.monotonic()
        unplugged.unplug("algo-1")
        unplugged_s = time.monotonic()
        ends = killed.wait(90)
        failed(killed, ends, "rank-1 on algo-1 was killed by SIGKILL", also="algo-1")
        assert seconds(killed, ends, killed_s, "algo-1") < 4 * LEASE_S  # nobody had to wait for its lease
        # No mpirun there, so all that the toolkit has to report is that it has waited; but not for minutes.
        assert (ends["algo-1"].code, ends["algo-1"].success) == (0, True)
        assert ends["algo-1"].ended_s - killed_s < SLEEP_S + LEASE_S + 10

        ends = unplugged.wait(90)
        assert ends["algo-4"].code == 1, unplugged.logs()
        assert ends["algo-4"].failure is not None
        assert ends["algo-4"].failure.startswith("trainer host algo-1 gave no sign of life")
        assert [ends[host].code for host in unplugged.data_hosts] == [1, 1]
        assert seconds(unplugged, ends, unplugged_s, "algo-1") < LEASE_S + 10  # mpirun itself would wait for ever
        for host in ends:
            assert left(unplugged, host) == []


@needs_mpi_build
def test_a_killed_rank_ends_a_job_whose_horovod_uses_mpi(tmp_path: Path) -> None:
    cluster = tf_data(tmp_path, {"step_s": 0.2, "epochs": 30}, environment=built_for_mpi())
    with running(cluster):
        cluster.wait_for_steps(3, timeout_s=150)
        cluster.signal("algo-1", "rank-1", signal.SIGKILL)
        killed_s = time.monotonic()
        ends = cluster.wait(60)
        failed(cluster, ends, "rank-1 on algo-1 was killed by SIGKILL")
        assert max(end.ended_s for end in ends.values()) - killed_s < LEASE_S + 10


def failed(cluster: SageMakerCluster, ends: dict[str, End], *said: str, also: str = "") -> None:
    """Assert that the host with mpirun reports the cause, first thing, and that nobody else failed or runs on."""
    chief = ends[cluster.chief]
    assert (chief.code, chief.success) == (1, False), cluster.logs()
    assert chief.failure is not None
    assert chief.failure.startswith(said[0]), chief.failure
    assert all(part in chief.failure for part in said)
    assert len(chief.failure) <= 1024
    for host, end in ends.items():
        wait_until(f"an empty {host}", lambda host=host: not left(cluster, host), 5)
        if host not in (cluster.chief, also):
            assert (end.code, end.success, end.failure) == (0, True, None), cluster.logs()


def seconds(cluster: SageMakerCluster, ends: dict[str, End], since_s: float, but: str) -> float:
    """Return after how many seconds all hosts but one had ended."""
    return max(end.ended_s for host, end in ends.items() if host != but) - since_s
