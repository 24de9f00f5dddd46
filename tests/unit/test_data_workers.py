"""The launcher's side of a data host's workers: tried, stopped, given up, and told of, without a process."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetero import data_workers
from hetero.crew import Crew
from hetero.data_workers import DataWorkers
from hetero.errors import ChildFailed
from hetero.host import HostConfig
from hetero.plan import Hardware, plan_host
from hetero.process.failure import Failure
from hetero.process.group import ChildState, ChildStatus
from hetero.rundir import write_json_atomic
from hetero.settings import Settings
from hetero.spec import ProcessSpec
from hetero.topology import Host, Role, Topology
from hetero.worker_count import Figures

DATA = (Host("data-1", Role.DATA, "data_group", "data-1"),)
TRAINERS = (Host("trainer-1", Role.TRAINER, "dnn_group", "trainer-1"),)


@dataclass
class Life:
    """The host's life, as its workers see it; its clock goes a second forward with each tick."""

    running: dict[str, int] = field(default_factory=dict)  # restarts by name
    ended: list[str] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    used_s: float = 0.0
    now_s: float = 100.0
    broken: str = ""

    def start(self, spec: ProcessSpec) -> None:
        if spec.name == self.broken:
            raise ChildFailed(f"Cannot start {spec.name}: no memory.")
        self.running[spec.name] = 0

    def give_up(self, names: Collection[str]) -> None:
        self.ended += names
        for name in names:
            del self.running[name]

    def tell(self, text: str) -> None:
        assert len(text) <= 512
        self.told.append(json.loads(text)["workers_per_host"])

    def children(self) -> tuple[ChildStatus, ...]:
        return tuple(
            ChildStatus(name, 1, ChildState.RUNNING, restarts, None, None, 1.0)
            for name, restarts in self.running.items()
        )

    def crew(self) -> Crew:
        serving, used = (lambda: len(self.running)), (lambda: self.used_s)
        return Crew(self.start, self.give_up, serving, used, tell_tuning=self.tell, children=self.children)


class Job:
    """A data host of a job in a folder, whose workers give ten batches a second each, up to `most_per_s`."""

    def __init__(self, folder: Path, engine: str = "grpc", cpus: float = 2.0, **settings: Any) -> None:
        self.life = Life()
        config = Settings(job="job.py:job", **settings)
        topology = Topology(DATA[0], DATA, TRAINERS, None, "a test")
        self.plan = plan_host(topology, config, engine, Hardware(cpus, 0))
        self.config = HostConfig(config, topology, engine, "digits", str(folder), "run-1", "data-1:16000", 0.0)
        self.first = [spec.name for spec in self.plan.processes if spec.name.startswith("worker")]
        self.life.running = dict.fromkeys(self.first, 0)
        self.batches, self.most_per_s = 0.0, 1e9
        self.workers = DataWorkers(self.config, self.plan, self.life.crew(), clock=lambda: self.life.now_s)

    def tick(self, seconds: int) -> None:
        for _ in range(seconds):
            self.life.now_s += 1.0
            self.life.used_s += 0.02
            self.batches += min(10 * len(self.life.running), self.most_per_s)
            seen_s = self.life.now_s
            figures = Figures("feed", seen_s, int(self.batches) * 8, int(self.batches), 0.9 * seen_s)
            write_json_atomic(self.config.run().meter("data-1", "feed"), asdict(figures))
            self.workers.tick()

    @property
    def chosen(self) -> int:
        return int(self.workers.summary()["workers_per_host"]["chosen"])


@pytest.fixture(autouse=True)
def _two_idle_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_workers, "cpu_quota", lambda _pinned: 2.0)
    monkeypatch.setattr(data_workers, "idle_cpu_s", lambda: None)
    monkeypatch.setattr(data_workers, "available_bytes", lambda: 2**40)
    monkeypatch.setattr(data_workers, "resident_bytes", lambda _pid: 2**28)


def failure(process: str) -> Failure:
    return Failure("data-1", process, 1.0, exit_code=1, message="no such library")


def test_those_that_pay_are_kept_and_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path)
    job.tick(60)
    assert sorted(job.life.running) == sorted(f"worker-{index}" for index in range(16))
    assert job.life.ended == []
    told = job.workers.summary()["workers_per_host"]
    assert told == job.life.told[-1]
    assert (told["chosen"], told["measured"]) == (16, {"2": 160.0, "4": 320.0, "8": 640.0, "16": 1280.0})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == ("[data data-1] workers: starting 2 more: ranks wait for this host, 1.98 of 2 CPUs are idle")
    assert said[-1].startswith("[data data-1] workers: keeping 16: 640 rows/s with 8, 1280 rows/s with 16 (+100.0%)")
    assert len(said) == 4


def test_those_that_do_not_pay_are_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path)
    job.most_per_s = 20.0
    job.tick(60)
    assert job.life.ended == ["worker-2", "worker-3"]
    assert job.chosen == 2
    assert job.life.told[-1]["measured"] == {"2": 160.0, "4": 160.0}
    assert "[data data-1] workers: stopping 2: 160 rows/s with 2, 160 rows/s with 4 (+0.0%), less" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("engine", "settings", "chosen", "why"),
    [
        ("grpc", {"workers_per_host": 3}, 3, "as asked for"),
        ("tf_data", {"workers_per_host": 3}, 3, "as asked for"),
        ("tf_data", {}, 2, "one for each CPU begun, at most two: a tf.data worker that is stopped would lose rows"),
    ],
)
def test_where_nothing_is_tried_it_is_said_what_there_is(
    tmp_path: Path, engine: str, settings: dict[str, Any], chosen: int, why: str
) -> None:
    job = Job(tmp_path, engine, cpus=1.35, **settings)
    job.tick(60)
    job.workers.tell()
    assert job.life.told == [{"chosen": chosen, "measured": {}, "why": why}]
    assert sorted(job.life.running) == job.first
    assert not job.workers.on_failed(job.plan.processes[-1], failure("worker-0"))


def test_memory_bounds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_workers, "available_bytes", lambda: data_workers.SPARED_BYTES + 2**28)
    job = Job(tmp_path)
    job.tick(8)
    assert job.chosen == 3
    monkeypatch.setattr(data_workers, "available_bytes", lambda: data_workers.SPARED_BYTES)
    job.tick(30)
    assert job.chosen == 3
    assert job.workers.summary()["workers_per_host"]["why"].endswith("; there is no memory for more")


def test_without_any_word_of_memory_they_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_workers, "available_bytes", lambda: None)
    job = Job(tmp_path)
    job.tick(8)
    assert job.chosen == 4


def test_one_that_dies_while_it_is_tried_ends_the_trial(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.tick(8)
    job.life.running["worker-0"] = 1  # it was there before
    job.tick(1)
    assert job.life.ended == []
    job.life.running["worker-3"] = 1
    job.tick(60)
    assert job.life.ended == ["worker-2", "worker-3"]
    assert job.chosen == 2
    assert job.life.told[-1]["why"] == "one of the added workers died while they were being tried"


def test_one_that_fails_for_good_while_it_is_tried_does_too(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.tick(8)
    specs = {spec.name: spec for spec in job.plan.later_processes}
    assert job.workers.on_failed(specs["worker-2"], failure("worker-2"))
    job.tick(60)
    assert job.life.ended == ["worker-2", "worker-3"]
    assert job.life.told[-1]["why"].startswith("given up: ")
    assert not job.workers.on_failed(job.plan.processes[-1], failure("worker-1"))


def test_one_that_fails_for_good_later_on_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path)
    job.tick(60)
    spec = job.plan.later_processes[-1]
    assert job.workers.on_failed(spec, failure(spec.name))
    assert job.life.ended == [spec.name]
    assert job.chosen == 15
    assert "no such library" in job.life.told[-1]["why"]
    assert "[data data-1] workers: 15 left; given up: " in capsys.readouterr().out


def test_those_that_cannot_be_started_are_done_without(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.life.broken = "worker-3"
    job.tick(60)
    assert job.life.ended == ["worker-2"]
    assert sorted(job.life.running) == job.first
    assert job.life.told[-1]["why"] == "given up: Cannot start worker-3: no memory."


def test_figures_that_cannot_be_read_or_are_an_earlier_runs_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "work" / "data-1" / "feed.meter.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    job = Job(tmp_path)
    assert not path.exists()
    for text in ("{", "[1]", '{"rows": 1}'):
        path.write_text(text)
        job.life.now_s += 1.0
        job.workers.tick()
    job.tick(8)
    assert job.chosen == 4


def test_what_is_told_fits_an_announcement(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.tick(8)
    spec = job.plan.later_processes[0]
    long = Failure("data-1", spec.name, 1.0, exit_code=1, message='ä"\n' * 5000)
    assert job.workers.on_failed(spec, long)
    assert job.life.told[-1]["why"].startswith("given up: ")
