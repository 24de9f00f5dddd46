"""The launcher's side of local workers: started, stopped, given up, and told of, without a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetero import spare_cpus
from hetero.crew import Crew
from hetero.errors import ChildFailed
from hetero.host import HostConfig
from hetero.mpi import MpiRank
from hetero.plan import Hardware, HostPlan, plan_host
from hetero.process.cpu_quota import CpuQuota, QuotaFigures
from hetero.process.failure import Failure
from hetero.rundir import write_json_atomic
from hetero.settings import Settings
from hetero.spare_cpus import LocalWorkers
from hetero.spec import ProcessSpec
from hetero.topology import Host, Role, Topology

DATA = (Host("data-1", Role.DATA, "data_group", "data-1"),)
TRAINERS = (Host("trainer-1", Role.TRAINER, "dnn_group", "trainer-1"),)


@dataclass
class Fake:
    """The host's life, as local workers see it; its clock goes a second forward with each tick."""

    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tunings: list[dict[str, Any]] = field(default_factory=list)
    serves: int = 0
    used_s: float = 0.0
    now_s: float = 100.0
    broken: str = ""

    def start(self, spec: ProcessSpec) -> None:
        if spec.name == self.broken:
            raise ChildFailed(f"Cannot start {spec.name}: no memory.")
        self.started.append(spec.name)

    def give_up(self, names: Collection[str]) -> None:
        self.ended += names

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts]

    def _tuned(self, text: str) -> None:
        self.tunings.append(json.loads(text))

    def crew(self) -> Crew:
        return Crew(self.start, self.give_up, lambda: self.serves, lambda: self.used_s, self.texts.append, self._tuned)


class Job:
    """A trainer host of a job in a folder, with one rank whose pace can be set."""

    def __init__(
        self,
        folder: Path,
        local_workers: int | str,
        engine: str = "grpc",
        cpus: int = 4,
        mpi: MpiRank | None = None,
        *,
        quota_cpus: float | None = None,
        cap_cpus: float | None = None,
    ) -> None:
        self.life = Fake()
        settings = Settings(job="job.py:job", local_workers=local_workers, local_workers_cpus=cap_cpus)
        topology = Topology(TRAINERS[0], DATA, TRAINERS, None, "a test")
        self.plan: HostPlan = plan_host(topology, settings, engine, Hardware(cpus, 0, quota_cpus), mpi)
        self.config = HostConfig(
            settings, topology, engine, "digits", str(folder), "run-1", "data-1:16000", 0.0, mpi=mpi
        )
        self.steps = self.rows_per_step = 0.0
        self.wait = 0.5
        self.seconds = 0.0
        self.local = LocalWorkers(self.config, self.plan, self.life.crew(), clock=lambda: self.life.now_s)

    def tick(self, seconds: int, rows_per_s: float = 100.0) -> None:
        for _ in range(seconds):
            self.life.now_s += 1.0
            self.life.used_s += 0.5
            self.seconds += 1.0
            self.steps += rows_per_s / 10
            sums = {"steps": int(self.steps), "rows": int(self.steps) * 10, "step_s": self.seconds}
            path = self.config.run().meter("trainer-1", "rank-0")
            write_json_atomic(path, {**sums, "wait_s": self.seconds * self.wait})
            self.local.tick()


@pytest.fixture(autouse=True)
def _four_cpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_cpus, "cpu_quota", lambda _pinned: 4.0)
    monkeypatch.setattr(spare_cpus, "tightest_quota", lambda _pinned: None)
    monkeypatch.setattr(spare_cpus, "idle_cpu_s", lambda: None)


def failure(process: str) -> Failure:
    return Failure("trainer-1", process, 1.0, exit_code=1, message="no such library")


def test_without_any_nothing_is_done_or_told(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    job.life.serves = 3
    job.tick(20)
    job.local.tell()
    assert (job.life.started, job.life.ended, job.life.told) == ([], [], [])


def test_a_number_is_what_the_plan_starts_and_the_chief_is_told_once_they_serve(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    assert [spec.name for spec in job.plan.processes] == ["rank-0", "feed", "worker-0", "worker-1"]
    job.tick(5)
    assert job.life.told == []
    job.life.serves = 2
    job.tick(5)
    expected = {"asked": 2, "used": 2, "why": "as asked for", "cap_cpus": None}
    assert job.life.told == [expected]
    assert job.local.summary() == expected
    assert job.life.started == job.life.ended == []


def test_those_that_were_not_ready_before_the_end_are_not_called_used(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.tick(5)
    why = "as asked for; training ended before one of them was ready"
    assert job.local.summary() == {"asked": 2, "used": 0, "why": why, "cap_cpus": None}
    job.life.serves = 1
    job.local.note()
    job.life.serves = 0
    assert job.local.summary() == {"asked": 2, "used": 1, "why": "as asked for", "cap_cpus": None}


def test_auto_starts_keeps_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "auto")
    assert [spec.name for spec in job.plan.processes] == ["rank-0"]
    job.tick(12)
    assert job.life.started == ["feed", "worker-0", "worker-1", "worker-2"]
    job.life.serves = 3
    job.tick(12, rows_per_s=150.0)
    assert job.life.ended == []
    assert job.local.summary() == {
        "asked": "auto",
        "used": 3,
        "why": "100 rows/s before, 150 rows/s with them (+50.0%)",
        "cap_cpus": None,
    }
    assert [told["used"] for told in job.life.told] == [0, 3]
    assert capsys.readouterr().out.splitlines() == [
        "[trainer trainer-1] local workers: starting 3: ranks wait for input 50.0% of the time, 3.5 of 4 CPUs are idle",
        "[trainer trainer-1] local workers: keeping 3: 100 rows/s before, 150 rows/s with them (+50.0%)",
    ]


def test_auto_stops_workers_that_do_not_help_under_grpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "auto")
    job.tick(12)
    job.life.serves = 3
    job.tick(12)
    assert job.life.ended == job.life.started == ["feed", "worker-0", "worker-1", "worker-2"]
    assert job.local.summary()["used"] == 0
    assert job.life.told[-1]["used"] == 0
    assert "local workers: stopping 3: 100 rows/s before, 100 rows/s with them (+0.0%), less" in capsys.readouterr().out
    job.tick(50)
    assert len(job.life.started) == 4


def test_auto_stops_nothing_under_tf_data(tmp_path: Path) -> None:
    job = Job(tmp_path, "auto", engine="tf_data")
    job.tick(12)
    assert job.life.started == ["worker-0"]
    job.life.serves = 1
    job.tick(12)
    assert job.life.ended == []
    assert job.local.summary()["used"] == 1
    assert job.local.summary()["why"].endswith("but stopping them would lose the rows in their hands")


def test_auto_without_need_ends_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "auto")
    job.wait = 0.01
    job.tick(40)
    assert job.life.started == []
    assert capsys.readouterr().out.splitlines() == [
        "[trainer trainer-1] local workers: none: ranks wait for input 1.0% of the time, 3% would be worth it"
    ]
    assert job.life.told[-1] == job.local.summary()


def test_auto_uses_what_training_leaves_of_less_than_two_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_cpus, "cpu_quota", lambda _pinned: 1.0)
    job = Job(tmp_path, "auto", cpus=1)
    job.tick(12)
    assert job.life.started == ["feed", "worker-0"]
    job.life.serves = 1
    job.tick(12, rows_per_s=150.0)
    assert job.local.tuning() == {
        "local_workers": {
            "chosen": 1,
            "measured": {"0": 100.0, "1": 150.0},
            "why": "100 rows/s before, 150 rows/s with them (+50.0%)",
        }
    }
    assert job.life.tunings[-1] == job.local.tuning()


def test_a_quota_that_is_set_later_on_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, "auto")
    monkeypatch.setattr(spare_cpus, "cpu_quota", lambda _pinned: 0.55)
    job.tick(40)
    assert job.life.started == []
    assert job.local.summary()["why"] == (
        "ranks wait for input 50.0% of the time, but 0.05 of 0.55 CPUs are idle; 20% of them would be worth it"
    )


@pytest.mark.parametrize("asked", [2, "auto"])
def test_under_mpirun_the_first_launcher_of_a_host_has_them(tmp_path: Path, asked: int | str) -> None:
    for local_rank, used in ((0, 2 if asked == 2 else 3), (1, 0)):
        job = Job(tmp_path / str(local_rank), asked, mpi=MpiRank(local_rank, 2, local_rank, 2))
        job.life.serves = 3
        job.tick(12)
        job.local.tell()
        assert job.local.summary()["used"] == used
        assert bool(job.life.told) == (used > 0)
        assert bool(job.life.started) == (used == 3)


def test_figures_of_an_earlier_run_in_the_folder_do_not_count(tmp_path: Path) -> None:
    stale = tmp_path / "work" / "trainer-1" / "rank-7.meter.json"
    write_json_atomic(stale, {"steps": 9, "rows": 9, "step_s": 9.0, "wait_s": 9.0})
    Job(tmp_path, "auto")
    assert not stale.exists()


def test_figures_that_cannot_be_read_are_as_if_there_were_none(tmp_path: Path) -> None:
    job = Job(tmp_path, "auto")
    for number, text in enumerate(("{", "[1, 2]", '{"steps": 1}', "7")):
        path = tmp_path / "work" / "trainer-1" / f"rank-{number + 1}.meter.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    job.tick(12)
    assert job.life.started[:1] == ["feed"]


def test_one_worker_that_fails_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, 2)
    job.life.serves = 1
    job.local.on_failed(job.plan.processes[3], failure("worker-1"))
    assert job.life.ended == ["worker-1"]
    assert job.local.summary()["used"] == 1
    assert "no such library" in job.local.summary()["why"]
    assert "local workers: 1 left; given up: " in capsys.readouterr().out


@pytest.mark.parametrize("order", [["worker-0", "worker-1"], ["feed"]])
def test_with_the_last_worker_or_their_feed_all_are_given_up(
    tmp_path: Path, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, 2)
    specs = {spec.name: spec for spec in job.plan.processes}
    for name in order:
        job.local.on_failed(specs[name], failure(name))
    assert sorted(job.life.ended) == ["feed", "worker-0", "worker-1"]
    summary = job.local.summary()
    assert (summary["used"], job.life.told[-1]) == (0, summary)
    assert summary["why"].startswith("given up: ")
    assert order[-1] in summary["why"]
    assert capsys.readouterr().out.endswith("The job goes on with the data hosts\n")


def test_a_trial_ends_with_its_workers(tmp_path: Path) -> None:
    job = Job(tmp_path, "auto")
    job.tick(12)
    feed = job.plan.local_processes(3)[0]
    job.local.on_failed(feed, failure("feed"))
    job.local.on_failed(feed, failure("feed"))  # a late word changes nothing
    job.life.serves = 3
    job.tick(60, rows_per_s=200.0)
    assert len(job.life.started) == len(job.life.ended) == 4
    assert job.local.summary()["why"].startswith("given up: ")


def test_workers_that_cannot_be_started_do_not_end_the_host(tmp_path: Path) -> None:
    job = Job(tmp_path, "auto")
    job.life.broken = "worker-1"
    job.tick(12)
    assert job.life.started == job.life.ended == ["feed", "worker-0"]
    assert job.local.summary()["why"] == "given up: Cannot start worker-1: no memory."


def test_what_the_chief_is_told_fits_an_announcement(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    long = Failure("trainer-1", "worker-0", 1.0, exit_code=1, message='ä"\n' * 5000)
    job.local.on_failed(job.plan.processes[2], long)
    assert [0 < len(text) <= 512 for text in job.life.texts] == [True]
    assert job.life.told[0]["why"].startswith("given up: ")


def quota_of(folder: Path, cpus: float, *, used_s: Callable[[], float]) -> Callable[[object], CpuQuota]:
    """Return what finds a quota of version 2 whose group uses so much."""

    class Group(CpuQuota):
        def read(self) -> QuotaFigures:
            return QuotaFigures(0, 0, 0.0, used_s())

    return lambda _pinned: Group(cpus, 0.1, folder, 2)


def test_auto_tries_one_under_a_quota_of_less_than_a_cpu_if_that_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job: list[Job] = []
    find = quota_of(tmp_path, 0.4, used_s=lambda: job[0].seconds * 0.1 if job else 0.0)
    monkeypatch.setattr(spare_cpus, "tightest_quota", find)
    monkeypatch.setattr(spare_cpus, "idle_cpu_s", lambda: 0.0)  # the machine is none of ours
    job.append(Job(tmp_path, "auto", cpus=1, quota_cpus=0.4))
    job[0].tick(12)
    assert job[0].life.started == ["feed", "worker-0"]
    assert "starting 1: ranks wait for input 50.0% of the time, 0.30 of 0.4 CPUs are idle" in capsys.readouterr().out
    assert 0 < job[0].local.summary()["cap_cpus"] <= 0.4


def test_auto_tries_none_where_the_quota_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job: list[Job] = []
    find = quota_of(tmp_path, 0.4, used_s=lambda: job[0].seconds * 0.38 if job else 0.0)
    monkeypatch.setattr(spare_cpus, "tightest_quota", find)
    job.append(Job(tmp_path, "auto", cpus=1, quota_cpus=0.4))
    job[0].tick(40)
    assert job[0].life.started == []
    assert job[0].local.summary()["why"].startswith("ranks wait for input 50.0% of the time, but 0.02 of 0.4 CPUs are")


def test_a_quota_that_is_set_or_changed_or_lifted_while_workers_run_is_the_one_that_they_are_paced_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, 1)
    seen = [job.local.summary()["cap_cpus"]]
    for cpus in (0.4, 1.5, None):
        find = (lambda _pinned: None) if cpus is None else quota_of(tmp_path, cpus, used_s=lambda: 0.0)
        monkeypatch.setattr(spare_cpus, "tightest_quota", find)
        job.tick(3)
        seen.append(job.local.summary()["cap_cpus"])
    job.local.close()
    assert (seen[0], seen[3]) == (None, None)
    assert 0 < seen[1] <= 0.4 < seen[2] <= 1.5


def test_a_cap_holds_without_a_quota_and_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, cap_cpus=0.5)
    assert job.local.summary()["cap_cpus"] == 0.5
    job.tick(2)
    job.local.close()
    job.local.close()


@pytest.mark.parametrize(("quota", "cap", "threads"), [(0.4, None, 1), (2.5, None, 3), (2.5, 1.0, 1), (None, 3.2, 4)])
def test_a_worker_has_as_many_threads_as_it_may_keep_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: float | None, cap: float | None, threads: int
) -> None:
    find = quota_of(tmp_path, quota, used_s=float) if quota else lambda _pinned: None
    monkeypatch.setattr(spare_cpus, "tightest_quota", find)
    assert spare_cpus.worker_threads(Job(tmp_path, 1, cap_cpus=cap).config) == threads


def test_without_quota_and_cap_threads_are_left_as_they_are(tmp_path: Path) -> None:
    assert spare_cpus.worker_threads(Job(tmp_path, 1).config) is None
