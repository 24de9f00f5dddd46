"""Jobs under SageMaker's own toolkit: `train` on every host, hosts that share nothing but a network. Needs root."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from local_job import wait_until
from sagemaker_cluster import RUN_DIR, End, SageMakerCluster

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

ROWS = dict.fromkeys(range(400), 1)  # what both jobs make: 8 splits of 50 rows
SHAPES = [pytest.param(1, id="1 trainer"), pytest.param(2, id="2 trainers")]


def grpc_cluster(folder: Path, hyperparameters: dict[str, Any], **options: Any) -> SageMakerCluster:
    """Return a cluster whose job needs no TensorFlow, so that its image has none."""
    settings = {"engine": "grpc", "lease-s": 5, **hyperparameters}
    return SageMakerCluster(folder, hyperparameters=settings, **{"data": 2, "tensorflow": False, **options})


def succeeded(cluster: SageMakerCluster, ends: dict[str, End]) -> None:
    """Assert that SageMaker would call the job Completed, and that no host is held open by anything."""
    for host, end in ends.items():
        assert (end.code, end.success, end.failure) == (0, True, None), cluster.logs()
        assert "Reporting training SUCCESS" in cluster.log(host)
        assert cluster.processes(host) == []


def model(cluster: SageMakerCluster) -> dict[str, Any]:
    """Return the model, which only the chief may have."""
    others = [host for host in cluster.data_hosts + cluster.trainer_hosts if host != cluster.chief]
    assert [host for host in others if list((cluster.folder(host) / "model").iterdir())] == []
    return json.loads((cluster.folder(cluster.chief) / "model" / "model.json").read_text())


@pytest.mark.parametrize("trainers", SHAPES)
def test_a_grpc_job_ends_with_success_everywhere(tmp_path: Path, trainers: int) -> None:
    with grpc_cluster(tmp_path, {"epochs": 2}, trainers=trainers) as cluster:
        cluster.start()
        succeeded(cluster, cluster.wait(120))
        assert [cluster.rows(epoch) for epoch in range(2)] == [ROWS, ROWS]
        assert model(cluster)["steps"] == 100 / trainers
        summary = cluster.summary()
        assert (summary["engine"], summary["ranks"], summary["rows"]) == ("grpc", trainers, 800)
        assert summary["hosts"] == {"data": 2, "trainer": trainers}
        for host in cluster.data_hosts:
            assert (cluster.folder(host) / RUN_DIR / "logs" / host / "feed.log").exists()


@pytest.mark.parametrize("trainers", SHAPES)
def test_a_tf_data_job_ends_with_success_everywhere(tmp_path: Path, trainers: int) -> None:
    settings = {"engine": "tf_data", "epochs": 2, "lease-s": 10}
    with SageMakerCluster(tmp_path, 2, trainers, "rows.py", settings) as cluster:
        cluster.start()
        succeeded(cluster, cluster.wait(120))
        assert [cluster.rows(epoch) for epoch in range(2)] == [ROWS, ROWS]
        assert model(cluster)["steps"] == 100 / trainers
        summary = cluster.summary()
        assert (summary["engine"], summary["ranks"], summary["rows"]) == ("tf_data", trainers, 800)


def test_the_failure_of_training_is_what_sagemaker_shows(tmp_path: Path) -> None:
    failing = {"fail_epoch": 0, "fail-step": 3, "fail_length": 3000, "step_s": 0.02}
    with grpc_cluster(tmp_path, failing, trainers=2) as cluster:
        cluster.start()
        ends = cluster.wait(120)
        chief, other = cluster.trainer_hosts
        for host in cluster.data_hosts:
            assert (ends[host].code, ends[host].success, ends[host].failure) == (0, True, None), cluster.logs()
        for host in (chief, other):
            assert (ends[host].code, ends[host].success) == (1, False), cluster.logs()
            text = ends[host].failure
            assert text is not None
            assert text.startswith("ValueError: the loss is not a number !!!")
            assert f"rank-0 on {chief}" in text
            assert len(text) <= 1024
            assert "Reporting training FAILURE" in cluster.log(host)
            assert cluster.processes(host) == []
        assert cluster.failure(chief)["exception"] == "ValueError"
        assert model_is_missing(cluster)


def model_is_missing(cluster: SageMakerCluster) -> bool:
    """Return whether no host has a model."""
    hosts = cluster.data_hosts + cluster.trainer_hosts
    return not any(list((cluster.folder(host) / "model").iterdir()) for host in hosts)


# --- a link that is cut, and plugged again ----------------------------------------------------------------------------

CUT_S, LEASE_S = 5.0, 20.0
WHO = {
    "first data host": ("data", 0),
    "other data host": ("data", 1),
    "chief": ("trainer", 0),
    "trainer": ("trainer", 1),
}


def host_of(cluster: SageMakerCluster, who: str) -> str:
    role, index = WHO[who]
    return (cluster.data_hosts if role == "data" else cluster.trainer_hosts)[index]


def reaches(cluster: SageMakerCluster, host: str, other: str) -> bool:
    """Return whether a connection from one host to another comes about or is refused, which both need the link."""
    connect = f"import socket; socket.create_connection(({other!r}, 1), 1)"
    return "ConnectionRefusedError" in cluster.exec(host, ["python", "-S", "-c", connect]).stderr


def cut_the_link(cluster: SageMakerCluster, who: str) -> None:
    """Cut a host's link for CUT_S."""
    host = host_of(cluster, who)
    other = next(name for name in cluster.data_hosts if name != host)
    assert reaches(cluster, other, host)
    cluster.unplug(host)
    plug_s = time.monotonic() + CUT_S
    assert not reaches(cluster, other, host)
    time.sleep(max(0.0, plug_s - time.monotonic()))
    cluster.plug(host)
    assert len(cluster.running()) == len(cluster.data_hosts + cluster.trainer_hosts), cluster.logs()


@pytest.mark.parametrize("who", WHO)
def test_a_link_cut_for_seconds_ends_nothing_and_loses_nothing_under_grpc(tmp_path: Path, who: str) -> None:
    # 1.3 MB a batch, so that some are on their way when the link goes; an epoch outlasts the cut.
    settings = {"lease-s": LEASE_S, "pieces": 16, "step_s": 0.08, "size": 40_000, "epochs": 2}
    with grpc_cluster(tmp_path, settings, trainers=1 if "data" in who else 2) as cluster:
        cluster.start()
        cluster.wait_for_steps(5)
        cut_the_link(cluster, who)
        assert {step["epoch"] for step in cluster.seen(0)} == {0}, "the cut was not within the epoch"
        succeeded(cluster, cluster.wait(120))
        assert [cluster.rows(epoch) for epoch in range(2)] == [dict.fromkeys(range(800), 1)] * 2
        summary = cluster.summary()
        assert (summary["lost_workers"], summary["rows_lost"], summary["replayed_batches"]) == (0, 0, 0)


@pytest.mark.parametrize("who", ["first data host", "chief"])
def test_a_link_cut_for_seconds_ends_nothing_and_loses_nothing_under_tf_data(tmp_path: Path, who: str) -> None:
    settings = {"engine": "tf_data", "lease-s": LEASE_S, "pieces": 16, "step_s": 0.08}
    with SageMakerCluster(tmp_path, 2, 1 if "data" in who else 2, "rows.py", settings) as cluster:
        cluster.start()
        cluster.wait_for_steps(5)
        cut_the_link(cluster, who)
        succeeded(cluster, cluster.wait(120))
        assert cluster.rows(0) == dict.fromkeys(range(800), 1)
        summary = cluster.summary()
        assert (summary["lost_workers"], summary["rows_lost"]) == (0, 0)


def test_a_link_that_is_cut_when_training_ends_makes_no_failure_of_success(tmp_path: Path) -> None:
    with grpc_cluster(tmp_path, {"lease-s": LEASE_S, "step_s": 0.02}) as cluster:
        cluster.start()
        cluster.wait_for_steps(45)
        cluster.unplug(cluster.data_hosts[1])
        plug_s = time.monotonic() + CUT_S
        cluster.wait_for_steps(50)
        time.sleep(max(0.0, plug_s - time.monotonic()))
        cluster.plug(cluster.data_hosts[1])
        succeeded(cluster, cluster.wait(40))


def test_a_data_host_that_comes_when_all_is_over_has_not_failed(tmp_path: Path) -> None:
    with grpc_cluster(tmp_path, {"lease-s": 20}) as cluster:  # for so long a coordinator waits for those that come late
        cluster.start(cluster.chief, cluster.data_hosts[0])
        wait_until("the chief's end", lambda: cluster.chief not in cluster.running(), 60)
        cluster.start(cluster.data_hosts[1])
        ends = cluster.wait(120)
        succeeded(cluster, ends)
        assert ends[cluster.data_hosts[0]].ended_s > ends[cluster.chief].ended_s + 0.5, "the coordinator did not wait"


# --- names and noise --------------------------------------------------------------------------------------------------

NOISE = {
    "learning-rate": 0.001,
    "weight_decay": 1e-05,
    "x": 1,
    "negative": -3,
    "flag": True,
    "nothing": None,
    "empty": "",
    "text": "two words, and more",
    "quotes": 'it\'s "quoted" $HOME `id` \\ * ; exit 1',
    "lines": "one\ntwo",
    "unicode": "größe 大",
    "dash": "-x",
    "flag-like": "--epochs 7",
    "list": [1, "two words", None, {"three": [3.5]}],
    "dict": {"a": {"b": [1, 2]}, "c": 'x=y, "z"'},
}


def test_names_groups_and_hyperparameters_of_any_kind(tmp_path: Path) -> None:
    names = ["algo-10", "algo-11", "algo-2", "algo-3", "algo-1"]  # trainer, data, trainer, data, data
    model_dir = "s3://bucket/job/model"
    noise = {**NOISE, "model_dir": model_dir, "data-group": "cpu prep", "trainer_group": "gpu.train"}
    noise |= {f"more-{number}": number for number in range(100 - len(noise) - 6)}
    options = {"names": names, "groups": ("cpu prep", "gpu.train"), "trainers": 2, "data": 3}
    with grpc_cluster(tmp_path, noise, **options) as cluster:
        file = cluster.folder("algo-1") / "input" / "config" / "hyperparameters.json"
        assert len(json.loads(file.read_text())) == 100  # the most that SageMaker takes
        assert (cluster.trainer_hosts, cluster.data_hosts) == (["algo-2", "algo-10"], ["algo-1", "algo-3", "algo-11"])
        cluster.start()
        coordinator, first_rank = cluster.pid("algo-1", "coordinator"), cluster.pid("algo-2", "rank-0")
        assert coordinator
        assert first_rank
        succeeded(cluster, cluster.wait(120))
        assert cluster.rows(0) == ROWS
        assert cluster.summary()["hosts"] == {"data": 3, "trainer": 2}
        params = model(cluster)["params"]
        written = {name.replace("-", "_"): value for name, value in noise.items()}
        for name in ("model_dir", "data_group", "trainer_group"):  # options of the run
            del written[name]
        assert {name: params[name] for name in written} == written
