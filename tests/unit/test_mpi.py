"""What mpirun says of a process, and what follows from it for a host's plan, its launchers and the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hetero.clusters.local import LocalCluster, topology
from hetero.control.config import CoordinatorConfig
from hetero.control.ledger import Ledger, Refused
from hetero.control.state import HostReport, Outcome, ProcessReport, first_rank_key
from hetero.errors import HeteroError, SettingsError
from hetero.mpi import MpiRank
from hetero.plan import Hardware, HostPlan, plan_host
from hetero.rundir import RunDir
from hetero.settings import Settings
from hetero.siblings import Siblings
from hetero.topology import Topology
from hetero.training import by_mpi, horovod

LAUNCHER = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2138898433",
}


# What mpirun says


def test_a_process_that_mpirun_started_knows_its_place() -> None:
    assert MpiRank.from_environ(LAUNCHER) == MpiRank(5, 8, 1, 4, "2138898433", kill_after_s=1.0)


@pytest.mark.parametrize("environ", [{}, {"OMPI_COMM_WORLD_SIZE": ""}, {"OMPI_MCA_btl": "^openib"}])
def test_without_its_variables_there_was_no_mpirun(environ: Mapping[str, str]) -> None:
    assert MpiRank.from_environ(environ) is None
    assert not MpiRank.started(environ)


@pytest.mark.parametrize(("value", "seconds"), [("60", 60.0), ("0", 1.0), ("", 1.0), ("soon", 1.0)])
def test_how_soon_mpirun_kills_is_what_it_was_told(value: str, seconds: float) -> None:
    mpi = MpiRank.from_environ({**LAUNCHER, "OMPI_MCA_odls_base_sigkill_timeout": value})
    assert mpi is not None
    assert mpi.kill_after_s == seconds
    assert mpi.aborted_within_s > 2 * seconds


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK is ''"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE is 'two'"),
        ({"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK=8"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK=4"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "OMPI_COMM_WORLD_LOCAL_SIZE=9"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0"),
    ],
)
def test_variables_that_cannot_be_are_named(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        MpiRank.from_environ({**LAUNCHER, **wrong})
    assert said in str(caught.value)
    assert "unset" in str(caught.value).lower()


# The plan


@pytest.fixture
def hosts(tmp_path: Path) -> Topology:
    cluster = LocalCluster.create(tmp_path / "cluster.json", data_hosts=0, trainer_hosts=2)
    return topology(cluster.environ("trainer-1"), "data_group", "dnn_group")


def plan(hosts: Topology, mpi: MpiRank, **settings: object) -> HostPlan:
    return plan_host(hosts, Settings(job="job.py:job", **settings), "local", Hardware(cpus=8, gpus=8), mpi)


def test_the_first_launcher_of_a_host_runs_what_the_host_has_once(hosts: Topology) -> None:
    first = plan(hosts, MpiRank(2, 4, 0, 2))  # mpirun counts this host second; it is the coordinator's all the same
    assert [process.name for process in first.processes] == ["coordinator", "rank-0"]
    assert (first.first_rank, first.expected_ranks, first.ranks) == (2, 4, 2)
    companion = plan(hosts, MpiRank(3, 4, 1, 2))
    assert [process.name for process in companion.processes] == ["rank-1"]
    assert companion.global_rank(companion.processes[0]) == 3
    assert (companion.runs_coordinator, companion.ranks) == (False, 2)


def test_a_number_of_ranks_that_mpirun_does_not_start_is_refused(hosts: Topology) -> None:
    assert plan(hosts, MpiRank(0, 4, 0, 2), ranks_per_host=2).ranks == 2
    with pytest.raises(SettingsError) as caught:
        plan(hosts, MpiRank(0, 4, 0, 2), ranks_per_host=8)
    assert "--ranks-per-host is 8, but mpirun starts 2 on trainer-1" in str(caught.value)
    assert "processes_per_host" in str(caught.value)


# The chief


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(CoordinatorConfig(0, (), ("algo-1", "algo-4"), tmp_path / "journal.json", "run"))
    for host in ("algo-1", "algo-4"):
        made.register(host, "trainer", host, HostReport(ranks=2))
    return made


def test_the_chief_is_the_host_that_mpirun_gave_the_first_rank(ledger: Ledger) -> None:
    ledger.publish("algo-4", first_rank_key("algo-4"), "0")
    ledger.publish("algo-1", first_rank_key("algo-1"), "2")
    with pytest.raises(Refused, match="only the chief, 'algo-4'"):
        ledger.end_training("algo-1", Outcome.SUCCEEDED, None, 0.0, 0.0)
    ledger.leave("algo-1", "")
    assert not ledger.ended
    ledger.end_training("algo-4", Outcome.SUCCEEDED, None, 0.0, 0.0)
    assert ledger.state().outcome is Outcome.SUCCEEDED


def test_without_mpirun_the_chief_is_the_first_host(ledger: Ledger) -> None:
    with pytest.raises(Refused, match="only the chief, 'algo-1'"):
        ledger.end_training("algo-4", Outcome.SUCCEEDED, None, 0.0, 0.0)


# Launchers of one host


def launchers(tmp_path: Path, *jobs: str) -> list[Siblings]:
    """Return as many launchers of one host, each started by the mpirun of that name."""
    worlds = [MpiRank(n, len(jobs), n, len(jobs), job) for n, job in enumerate(jobs)]
    return [Siblings(RunDir(tmp_path), "algo-1", mpi) for mpi in worlds]


def report(rank: int, cpu_s: float) -> HostReport:
    return HostReport(ranks=2, cpu_s=cpu_s, processes=(ProcessReport(f"rank-{rank}", 100 + rank, "running"),))


def test_the_first_launcher_reports_what_all_run_and_have_used(tmp_path: Path) -> None:
    first, second = launchers(tmp_path, "a", "a")
    assert first.with_others(report(0, 2.0)) == report(0, 2.0)
    second.tell(report(1, 3.5))
    whole = first.with_others(report(0, 2.0))
    assert (whole.cpu_s, whole.ranks) == (5.5, 2)
    assert [process.name for process in whole.processes] == ["rank-0", "rank-1"]


def test_what_an_earlier_run_left_is_not_a_siblings(tmp_path: Path) -> None:
    first, earlier = launchers(tmp_path, "a", "b")
    earlier.tell(report(1, 3.5))
    assert first.others() == []
    (tmp_path / "work" / "algo-1" / "launcher-1.json").write_text('{"job": "a"')
    assert first.others() == []


@pytest.fixture
def ended_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_launcher_that_was_killed_is_told_from_one_that_has_ended(
    tmp_path: Path, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = launchers(tmp_path, "a", "a")
    second.tell(report(1, 1.0))
    assert [sibling.vanished for sibling in first.others()] == [False]  # it has this process's pid
    monkeypatch.setattr(os, "getpid", lambda: ended_pid)
    second.tell(report(1, 1.0))
    assert [(sibling.local_rank, sibling.vanished) for sibling in first.others()] == [(1, True)]
    second.tell(report(1, 1.0), done=True)
    assert [sibling.vanished for sibling in first.others()] == [False]


# A rank


def test_a_call_that_does_not_return_is_given_up() -> None:
    import threading

    by_mpi.call_within(5.0, lambda: None)
    with pytest.raises(ZeroDivisionError):
        by_mpi.call_within(5.0, lambda: 1 / 0)
    forever = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        by_mpi.call_within(0.05, forever.wait)
    forever.set()


def test_under_mpi_a_rank_takes_its_number_from_mpi_and_the_interface_from_its_own_host() -> None:
    slot = {"HOROVOD_RANK": "1", "HOROVOD_CONTROLLER": "gloo", "NCCL_SOCKET_IFNAME": "ens5"}
    environ = by_mpi.rank_env(slot)
    assert environ == {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", "NCCL_SOCKET_IFNAME": "ens5"}


class FakeHorovod:
    """Horovod as it was built; its world is as large as MPI says."""

    def __init__(self, *, mpi: bool, gloo: bool, size: int = 2) -> None:
        self.mpi_built, self.gloo_built = (lambda: mpi), (lambda: gloo)
        self.rank = self.local_rank = lambda: 0
        self.size = lambda: size
        self.started = False

    def init(self) -> None:
        self.started = True


SLOT = horovod.slot_env([("algo-1", 2)], "algo-1", 0, "algo-1:1234", interface="lo")


def join(monkeypatch: pytest.MonkeyPatch, hvd: FakeHorovod, *, under_mpirun: bool) -> str:
    """Have a rank join the others; return the controller that it chose."""
    monkeypatch.setattr(horovod, "_horovod", lambda: hvd)
    monkeypatch.setattr(horovod, "_has_gpu", lambda: True)
    monkeypatch.setattr(os, "environ", {})
    horovod.init_rank(SLOT, under_mpirun=under_mpirun)
    assert hvd.started
    return os.environ["HOROVOD_CONTROLLER"]


@pytest.mark.parametrize(
    ("mpi", "under_mpirun", "chosen"),
    [(False, False, "gloo"), (False, True, "gloo"), (True, False, "gloo"), (True, True, "mpi")],
)
def test_ranks_meet_through_mpi_where_mpirun_started_them_and_horovod_can(
    monkeypatch: pytest.MonkeyPatch, mpi: bool, under_mpirun: bool, chosen: str
) -> None:
    assert join(monkeypatch, FakeHorovod(mpi=mpi, gloo=True), under_mpirun=under_mpirun) == chosen


def test_a_horovod_for_mpi_alone_needs_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = FakeHorovod(mpi=True, gloo=False)
    assert join(monkeypatch, hvd, under_mpirun=True) == "mpi"
    with pytest.raises(HeteroError, match=r"built for MPI alone.*HOROVOD_WITH_GLOO=1"):
        join(monkeypatch, hvd, under_mpirun=False)


def test_another_mpi_than_mpiruns_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeteroError, match=r"MPI knows 1 ranks, mpirun started 2"):
        join(monkeypatch, FakeHorovod(mpi=True, gloo=True, size=1), under_mpirun=True)
