"""Local workers in whole jobs: rows once, whatever becomes of the workers; nothing ends with them; what `auto` does.

Each fault test proves that its fault happened: `LocalJob.kill` waits for the death of the process it killed, and the
rows tell which process prepared them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_job import REPOSITORY, LocalJob, wait_until

from hetero.process.priority import LOWEST

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(900)]
JOBS = Path(__file__).parent / "jobs" / "spare.py"
JOB_OF = {"grpc": "slow", "tf_data": "graph"}
ROWS, PIECES = 100, 12
TOTAL = ROWS * PIECES
COMMON = ["--workers-per-host=1", "--grace-s=2", "--lease-s=20", f"--pieces={PIECES}"]
UP_S = 90.0
both_engines = pytest.mark.parametrize("engine", ["grpc", "tf_data"])


def job_of(folder: Path, engine: str, *options: str, trainers: int = 1, prepare_s: float = 0.03) -> LocalJob:
    """Return a job with one data host; its training waits until `begin` lets it go on."""
    given = [*COMMON, f"--rows={ROWS}", f"--prepare-s={prepare_s}", f"--gate={folder / 'gate'}", *options]
    return LocalJob(folder, 1, trainers, given, job=f"{JOBS}:{JOB_OF[engine]}")


def begin(job: LocalJob, *, started: bool = False) -> dict[str, int]:
    """Start a job, wait until local workers serve on all trainer hosts, let training go on; return their pids."""
    if not started:
        job.start()

    def all_serve() -> bool:
        state = job.status()
        return state is not None and all(host.workers_alive for host in state.trainer_hosts)

    wait_until("local workers on all trainer hosts", all_serve, UP_S)
    pids = {host: job.pid(host, "worker-0") for host in job.cluster.trainer_hosts}
    (job.folder / "gate").touch()
    return pids


def kill_another(job: LocalJob, process: str, but: set[int]) -> int:
    """Kill a process of the first trainer host that is none of those killed before, and return its pid."""
    pid = wait_until(
        f"another {process}",
        lambda: (pid := job.pid("trainer-1", process)) not in but and psutil.pid_exists(pid) and pid,
    )
    victim = psutil.Process(pid)
    assert "hetero.children" in victim.cmdline(), victim
    victim.kill()
    wait_until(f"the death of {process}", lambda: not victim.is_running() or victim.status() == "zombie", 10)
    return pid


def workers(job: LocalJob, epoch: int | None = None) -> Counter[int]:
    """Return how many rows each worker prepared, by pid."""
    steps = [step for rank in range(len(job.cluster.trainer_hosts)) for step in job.seen(rank)]
    return Counter(pid for step in steps if epoch in (None, step["epoch"]) for pid in step["workers"])


def assert_exactly_once(job: LocalJob, epoch: int = 0, total: int = TOTAL) -> None:
    assert job.rows(epoch, len(job.cluster.trainer_hosts)) == dict.fromkeys(range(total), 1), f"epoch {epoch}"


def assert_all_well(job: LocalJob, timeout_s: float = 120.0) -> dict[str, Any]:
    """Wait for the end, and return what the summary says of the first trainer host's local workers."""
    codes = job.wait(timeout_s)
    assert set(codes.values()) == {0}, job.outputs()
    assert job.summary()["outcome"] == "succeeded"
    assert not (job.run_dir / "failure.json").exists()
    told: dict[str, Any] = job.summary()["local_workers"]["trainer-1"]
    return told


# --- rows -------------------------------------------------------------------------------------------------------------


@both_engines
def test_rows_come_once_and_local_workers_prepare_some(tmp_path: Path, engine: str) -> None:
    with job_of(tmp_path, engine, "--local-workers=1", "--epochs=2", trainers=2, prepare_s=0.1) as job:
        local = begin(job)
        assert {psutil.Process(pid).nice() for pid in local.values()} == {LOWEST}
        own = {"asked": 1, "used": 1, "why": "as asked for", "cap_cpus": None}
        assert assert_all_well(job) == own
        for epoch in range(2):
            assert_exactly_once(job, epoch)
        prepared = workers(job)
        assert all(prepared[pid] for pid in local.values()), prepared
        assert len(prepared) == 3
        assert not [pid for pid in prepared if psutil.pid_exists(pid)]
        summary = job.summary()
        assert summary["local_workers"] == {"trainer-1": own, "trainer-2": own}
        assert (summary["lost_workers"], summary["rows_lost"], summary["replayed_batches"]) == (0, 0, 0)


@pytest.mark.parametrize("process", ["worker-0", "feed"])
def test_under_grpc_a_killed_process_of_them_costs_no_row_and_doubles_none(tmp_path: Path, process: str) -> None:
    with job_of(tmp_path, "grpc", "--local-workers=2", "--epochs=2") as job:
        local = begin(job)["trainer-1"]
        wait_until("rows of a local worker", lambda: workers(job)[local], UP_S)
        job.kill("trainer-1", process)
        assert assert_all_well(job)["used"] == 2
        for epoch in range(2):
            assert_exactly_once(job, epoch)
        assert job.summary()["lost_workers"] == (process == "worker-0")


def test_under_tf_data_a_killed_one_is_replaced_and_takes_rows_along_at_most(tmp_path: Path) -> None:
    with job_of(tmp_path, "tf_data", "--local-workers=1", "--epochs=2") as job:
        local = begin(job)["trainer-1"]
        wait_until("rows of the local worker", lambda: workers(job)[local], UP_S)
        job.kill("trainer-1", "worker-0")
        assert assert_all_well(job)["used"] == 1
        assert set(job.rows(0, 1).values()) == {1}
        assert_exactly_once(job, epoch=1)
        assert (job.summary()["lost_workers"], job.summary()["rows_lost"]) == (1, None)
        assert set(workers(job, epoch=1)) - {local} == set(workers(job, epoch=1))


# --- given up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "process"), [("grpc", "feed"), ("tf_data", "worker-0")])
def test_those_that_cannot_live_are_given_up_and_the_job_goes_on(tmp_path: Path, engine: str, process: str) -> None:
    with job_of(tmp_path, engine, "--local-workers=1", "--epochs=2", prepare_s=0.1) as job:
        begin(job)
        wait_until("rows", lambda: workers(job), UP_S)
        killed: set[int] = set()
        while len(killed) < 6:  # its launcher starts it again five times
            killed.add(kill_another(job, process, killed))
        wait_until("the end of the local workers", lambda: "given up" in job.output("trainer-1"), UP_S)
        told = assert_all_well(job)
        assert (told["asked"], told["used"]) == (1, 0)
        assert f"{process} on trainer-1" in told["why"]
        assert "SIGKILL" in told["why"]
        assert len(set(workers(job, epoch=1))) <= 2
        assert_exactly_once(job, epoch=1)
        if engine == "grpc":
            assert_exactly_once(job, epoch=0)


def test_a_host_on_which_the_jobs_code_fails_does_without_them(tmp_path: Path) -> None:
    with job_of(tmp_path, "grpc", "--local-workers=2", "--only-on=data", prepare_s=0.1) as job:
        begin(job)
        told = assert_all_well(job)
        assert told["used"] == 0
        assert "FileNotFoundError: no such split here" in told["why"]
        assert "The job goes on with the data hosts" in job.output("trainer-1")
        assert_exactly_once(job)


@both_engines
def test_a_host_without_the_data_hosts_channel_has_none(tmp_path: Path, engine: str) -> None:
    channel = tmp_path / "files"
    channel.mkdir()
    (channel / "one").touch()
    with job_of(tmp_path, engine, "--local-workers=1") as job:
        job.start("data-1", options=(f"--channel=extra={channel}",))
        job.start("trainer-1")
        wait_until("the end of the local workers", lambda: "given up" in job.output("trainer-1"), UP_S)
        (tmp_path / "gate").touch()
        told = assert_all_well(job)
        assert told["used"] == 0
        assert "trainer host trainer-1 does not have the files of channel extra" in told["why"]
        assert_exactly_once(job)
        assert len(workers(job)) == 1


def test_with_all_data_hosts_workers_gone_local_workers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    monkeypatch.setenv("SPARE_BROKEN", str(broken))
    with job_of(tmp_path, "grpc", "--local-workers=1", "--epochs=2") as job:
        local = begin(job)["trainer-1"]
        wait_until("rows", lambda: workers(job), UP_S)
        broken.touch()
        job.kill("data-1", "worker-0")
        codes = job.wait(120)
        assert codes == {"data-1": 0, "trainer-1": 0}, job.outputs()
        for epoch in range(2):
            assert_exactly_once(job, epoch)
        assert set(workers(job, epoch=1)) == {local}
        assert job.summary()["local_workers"]["trainer-1"]["used"] == 1


# --- ends -------------------------------------------------------------------------------------------------------------


@both_engines
def test_they_end_with_a_job_that_is_stopped(tmp_path: Path, engine: str) -> None:
    with job_of(tmp_path, engine, "--local-workers=2", prepare_s=0.2) as job:
        begin(job)
        pids = [job.pid("trainer-1", name) for name in ("worker-0", "worker-1", "rank-0")]
        job.launchers["trainer-1"].terminate()
        assert job.wait(30) == {"data-1": 0, "trainer-1": 143}, job.outputs()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_homogeneous_job_refuses_them(tmp_path: Path) -> None:
    with LocalJob(tmp_path, 0, 1, ["--local-workers=auto"]) as job:
        assert job.start().wait(30) == {"trainer-1": 2}
        assert "--local-workers is auto, but" in job.output("trainer-1")


# --- paced ------------------------------------------------------------------------------------------------------------


def is_paused(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.mark.quiet  # it has to get more than the cap, to be paused
@both_engines
def test_paced_ones_lose_no_row_and_nobody_takes_them_for_frozen_or_lost(tmp_path: Path, engine: str) -> None:
    options = ("--local-workers=1", "--local-workers-cpus=0.3", "--epochs=2", "--burn-ms=30")
    with job_of(tmp_path, engine, *options, prepare_s=0.02) as job:
        local = begin(job)["trainer-1"]
        for _ in range(5):
            wait_until("a pause", lambda: is_paused(local))
            wait_until("its end", lambda: not is_paused(local))
        told = assert_all_well(job, 300)
        assert told == {"asked": 1, "used": 1, "why": "as asked for", "cap_cpus": 0.3}
        for epoch in range(2):
            assert_exactly_once(job, epoch)
        assert workers(job)[local], "it prepared nothing"
        assert (job.summary()["lost_workers"], job.summary()["replayed_batches"]) == (0, 0)


@pytest.mark.quiet
@both_engines
def test_with_its_launcher_killed_a_paused_one_is_gone_too(tmp_path: Path, engine: str) -> None:
    with job_of(tmp_path, engine, "--local-workers=1", "--local-workers-cpus=0.3", "--burn-ms=50") as job:
        local = begin(job)["trainer-1"]
        wait_until("a pause", lambda: is_paused(local))
        job.launchers["trainer-1"].kill()
        wait_until("the end of the worker", lambda: not psutil.pid_exists(local), 10)
        job.wait(60)


# --- auto -------------------------------------------------------------------------------------------------------------


def on_an_idle_machine(job: LocalJob) -> LocalJob:
    """Have a job's launchers see only what they themselves use: whatever else runs here is none of the job's."""
    job.launcher = job.folder / "launcher.py"
    job.launcher.write_text(
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\nimport hetero.spare_cpus\n"
        "hetero.spare_cpus.idle_cpu_s = lambda: None\nhetero.spare_cpus.cpu_quota = lambda _: 2\n"
        "import hetero.launcher\nhetero.launcher.cpu_quota = lambda _: 2\nhetero.launcher.launch()\n"
    )
    (job.folder / "gate").touch()
    return job


@pytest.mark.quiet
@both_engines
def test_auto_starts_workers_for_a_job_that_waits_for_input(tmp_path: Path, engine: str) -> None:
    with on_an_idle_machine(job_of(tmp_path, engine, "--local-workers=auto", "--rows=700")) as job:
        job.start()
        told = assert_all_well(job)
        assert (told["asked"], told["used"]) == ("auto", 1)
        assert " rows/s before, " in told["why"]
        assert_exactly_once(job, total=700 * PIECES)
        assert len(workers(job)) == 2
        said = [line for line in job.output("trainer-1").splitlines() if "local workers: " in line]
        assert ["starting 1: ranks wait" in said[0], "keeping 1: " in said[1], len(said)] == [True, True, 2]


@pytest.mark.quiet
def test_auto_starts_none_for_a_job_that_computes(tmp_path: Path) -> None:
    options = ("--local-workers=auto", "--step-s=0.1")
    with on_an_idle_machine(job_of(tmp_path, "grpc", *options, prepare_s=0.0)) as job:
        job.start()
        told = assert_all_well(job)
        assert told["used"] == 0
        assert told["why"].startswith("ranks wait for input ")
        assert told["why"].endswith(", 3% would be worth it (so far)")
        assert len(workers(job)) == 1


@pytest.mark.quiet
def test_auto_stops_workers_that_do_not_help_and_no_row_is_lost(tmp_path: Path) -> None:
    options = ("--local-workers=auto", "--rows=300", f"--turns={tmp_path / 'turns'}")
    with on_an_idle_machine(job_of(tmp_path, "grpc", *options, prepare_s=0.05)) as job:
        job.start()
        told = assert_all_well(job)
        assert told["used"] == 0
        assert told["why"].endswith(", less than 3% more")
        assert "local workers: stopping 1: " in job.output("trainer-1")
        assert_exactly_once(job, total=300 * PIECES)
        assert len(workers(job)) == 2, "the local worker prepared none before it was stopped"
        assert job.summary()["lost_workers"] == 0


@pytest.fixture
def quota_group() -> Iterator[Path]:
    """Make a control group with a quota of 0.4 CPUs."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if unified else "/sys/fs/cgroup/cpu", f"hetero-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups that can be made: {error}")
    name, text = ("cpu.max", "40000 100000") if unified else ("cpu.cfs_quota_us", "40000")
    (group / name).write_text(text)
    yield group
    wait_until("the end of the group's processes", lambda: not (group / "cgroup.procs").read_text(), 10)
    group.rmdir()


@pytest.mark.quiet
@both_engines
def test_auto_starts_one_under_a_quota_of_less_than_a_cpu_and_keeps_it_within(
    tmp_path: Path, engine: str, quota_group: Path
) -> None:
    with job_of(tmp_path, engine, "--local-workers=auto", "--rows=700", prepare_s=0.05) as job:
        job.launcher = tmp_path / "launcher.py"
        job.launcher.write_text(
            f"import os, sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
            f"if os.environ['HETERO_HOST'] == 'trainer-1':\n"
            f"    open('{quota_group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "import hetero.launcher\nhetero.launcher.launch()\n"
        )
        (tmp_path / "gate").touch()
        job.start()
        told = assert_all_well(job, 300)
        assert (told["asked"], told["used"]) == ("auto", 1)
        assert 0 < told["cap_cpus"] < 0.4
        assert " of 0.4 CPUs are idle" in job.output("trainer-1")
        assert_exactly_once(job, total=700 * PIECES)
        assert len(workers(job)) == 2
