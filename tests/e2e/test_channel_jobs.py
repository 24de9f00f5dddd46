"""Input channels under SageMaker's toolkit: who has which files, and what becomes of a job that lacks them. Needs root.

The job (`jobs/files.py`) reads twelve files of twenty rows each.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_job import wait_until
from sagemaker_cluster import RUN_DIR, Channel, End, SageMakerCluster

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

FILES = {f"part-{i:02}": "\n".join(map(str, range(20 * i, 20 * i + 20))).encode() for i in range(12)}
ROWS = dict.fromkeys(range(240), 1)
LEASE_S = 4
SHARDED = Channel(FILES, on="data", distribution="ShardedByS3Key")
GRPC = {"engine": "grpc", "lease-s": LEASE_S, "grace-s": 2, "workers-per-host": 1}
TF_DATA = {"engine": "tf_data", "graph": True, "lease-s": 10, "grace-s": 2}
GROUPS = "TrainingInput(..., instance_groups=['data_group', 'dnn_group'])"


def grpc(folder: Path, channels: Mapping[str, Channel], data: int = 2, **options: Any) -> SageMakerCluster:
    """Return a cluster of a job that prepares its input in Python."""
    settings = {**GRPC, **options}
    return SageMakerCluster(folder, data, 1, "files.py", settings, channels=channels, tensorflow=False)


def tf_data(folder: Path, channels: Mapping[str, Channel], data: int = 1, **options: Any) -> SageMakerCluster:
    """Return a cluster of a job that prepares its input in TensorFlow graphs."""
    return SageMakerCluster(folder, data, 1, "files.py", {**TF_DATA, **options}, channels=channels)


def run(cluster: SageMakerCluster, timeout_s: float = 60.0) -> dict[str, End]:
    """Run the whole job."""
    cluster.start()
    return cluster.wait(timeout_s)


def codes(cluster: SageMakerCluster, ends: Mapping[str, End]) -> tuple[list[int], int]:
    """Return how the launchers of the data hosts and of the chief ended, by what `train` made of it."""

    def code(host: str) -> int:
        told = re.findall(r"^ExitCode (-?\d+)$", cluster.log(host), flags=re.MULTILINE)
        return int(told[-1]) if told else ends[host].code

    return [code(host) for host in cluster.data_hosts], code(cluster.chief)


def cause(cluster: SageMakerCluster, ends: Mapping[str, End]) -> str:
    """Return the failure that SageMaker would show for the chief, which its failure.json has in full."""
    text = ends[cluster.chief].failure
    assert text is not None
    message = str(cluster.failure(cluster.chief)["message"])
    assert message[:400] in text
    return message


def list_everywhere(cluster: SageMakerCluster, name: str, *, folder: bool) -> None:
    """Have all hosts list a channel that only some have, the others with an empty folder or without one."""
    hosts = cluster.data_hosts + cluster.trainer_hosts
    paths = [cluster.folder(host) / "input" / "config" / "inputdataconfig.json" for host in hosts]
    listed = [json.loads(path.read_text()) for path in paths]
    entry = next(one[name] for one in listed if name in one)
    assert any(name not in one for one in listed)
    for host, path, one in zip(hosts, paths, listed, strict=True):
        path.write_text(json.dumps({**one, name: entry}))
        if folder:
            (cluster.folder(host) / "input" / "data" / name).mkdir(exist_ok=True)


# ShardedByS3Key under grpc


def test_every_host_reads_its_own_files_and_every_row_comes_once(tmp_path: Path) -> None:
    fast = Channel(FILES, on="data", distribution="ShardedByS3Key", mode="FastFile")
    with grpc(tmp_path, {"training": fast}, epochs=2, deterministic=True) as cluster:
        ends = run(cluster)
        assert codes(cluster, ends) == ([0, 0], 0), cluster.logs()
        assert [cluster.rows(epoch) for epoch in range(2)] == [ROWS, ROWS]
        shares = [set((cluster.folder(host) / "input/data/training").iterdir()) for host in cluster.data_hosts]
        assert [len(share) for share in shares] == [6, 6]


def test_splits_may_be_names_that_only_one_host_knows(tmp_path: Path) -> None:
    with grpc(tmp_path, {"training": SHARDED}, splits="names") as cluster:
        assert codes(cluster, run(cluster)) == ([0, 0], 0), cluster.logs()
        assert cluster.rows(0) == ROWS


def test_the_loss_of_a_host_with_files_of_its_own_ends_the_job_and_says_so(tmp_path: Path) -> None:
    with grpc(tmp_path, {"training": SHARDED}, prepare_s=0.2) as cluster:
        cluster.start()
        cluster.wait_for_steps(4)
        first, second = cluster.data_hosts
        cluster.power_cut(second)
        ends = cluster.wait(LEASE_S + 15)
        assert codes(cluster, ends) == ([4, -signal.SIGKILL], 4), cluster.logs()
        assert cause(cluster, ends) == (
            f"data host {second} gave no sign of life for {LEASE_S} s, and it alone has files of channel 'training' "
            "(ShardedByS3Key) that are still to be read. Let it be FullyReplicated if data hosts are to replace each "
            "other."
        )
        assert ends[first].failure == ends[cluster.chief].failure
        assert Counter(cluster.rows(0).values()).keys() == {1}


def test_a_host_that_has_given_all_it_had_can_be_done_without(tmp_path: Path) -> None:
    few = Channel(dict(list(FILES.items())[:3]), on="data", distribution="ShardedByS3Key")
    with grpc(tmp_path, {"training": few}, prepare_s=0.1, step_s=0.8) as cluster:
        cluster.start()
        cluster.wait_for_steps(5)  # of twelve; all are prepared by then, and fit into the rank
        second = cluster.data_hosts[1]
        cluster.signal(second, "launcher", signal.SIGTERM)
        ends = cluster.wait(60)
        assert codes(cluster, ends) == ([0, 143], 0), cluster.logs()
        assert cluster.rows(0) == dict.fromkeys(range(60), 1)


def test_a_coordinator_that_lost_its_journals_learns_again_which_splits_are_whose(tmp_path: Path) -> None:
    with grpc(tmp_path, {"training": SHARDED}, prepare_s=0.1, epochs=2) as cluster:
        cluster.start()
        cluster.wait_for_steps(10)
        first = cluster.data_hosts[0]
        coordinator = psutil.Process(cluster.pid(first, "coordinator"))
        coordinator.suspend()  # or it would write them again
        journals = list((cluster.folder(first) / RUN_DIR / "work" / first).glob("*.json"))
        assert "splits.json" in {path.name for path in journals}
        for path in journals:
            path.write_text("{garbage")
        coordinator.kill()
        wait_until("the death of the coordinator", lambda: not coordinator.is_running(), 10)
        assert codes(cluster, cluster.wait(60)) == ([0, 0], 0), cluster.logs()
        assert [cluster.rows(epoch) for epoch in range(2)] == [ROWS, ROWS]


def test_a_host_whose_share_is_empty_idles_and_says_so(tmp_path: Path) -> None:
    one = Channel(dict(list(FILES.items())[:1]), on="data", distribution="ShardedByS3Key")
    with grpc(tmp_path, {"training": one}) as cluster:
        assert codes(cluster, run(cluster)) == ([0, 0], 0), cluster.logs()
        assert cluster.rows(0) == dict.fromkeys(range(20), 1)
        idle = next(h for h in cluster.data_hosts if not list((cluster.folder(h) / "input/data/training").iterdir()))
        assert f"warning: {idle} has nothing to prepare." in cluster.log(idle)


def test_a_share_that_went_to_a_trainer_host_is_not_left_out_in_silence(tmp_path: Path) -> None:
    with grpc(tmp_path, {"training": Channel(FILES, distribution="ShardedByS3Key")}) as cluster:
        ends = run(cluster)
        assert codes(cluster, ends) == ([0, 0], 2), cluster.logs()
        assert "the host of rank 0 has files of it that no data host would read" in cause(cluster, ends)


# Channels of one group


@pytest.mark.parametrize("listed", [False, True], ids=["", "listed elsewhere without a folder"])
def test_the_input_may_be_on_the_data_hosts_alone_and_validation_data_on_trainers(tmp_path: Path, listed: bool) -> None:
    channels = {"training": Channel(FILES, on="data"), "validation": Channel(FILES, on="trainer")}
    with grpc(tmp_path, channels, validation=True) as cluster:
        for name in channels if listed else ():
            list_everywhere(cluster, name, folder=False)
        assert codes(cluster, run(cluster)) == ([0, 0], 0), cluster.logs()
        assert cluster.rows(0) == ROWS
        assert cluster.summary()["results"] == {"validation": 240}


def test_under_tf_data_a_data_host_lists_what_trainers_do_not_have(tmp_path: Path) -> None:
    with tf_data(tmp_path, {"training": Channel(FILES, on="data", mode="FastFile")}, data=2, epochs=2) as cluster:
        list_everywhere(cluster, "training", folder=True)
        assert codes(cluster, run(cluster, 120)) == ([0, 0], 0), cluster.logs()
        assert [cluster.rows(epoch) for epoch in range(2)] == [ROWS, ROWS]
        assert f"data host {cluster.data_hosts[0]} lists the splits" in cluster.log(cluster.chief)


def test_what_fails_in_the_jobs_code_on_that_data_host_is_the_cause(tmp_path: Path) -> None:
    with tf_data(tmp_path, {"training": Channel(FILES, on="data")}, splits="raise") as cluster:
        ends = run(cluster, 90)
        assert codes(cluster, ends) == ([0], 1), cluster.logs()
        assert cause(cluster, ends).startswith("cannot make splits of 12 files")
        failure = cluster.failure(cluster.chief)
        assert (failure["exception"], failure["host"]) == ("ValueError", cluster.data_hosts[0])
        assert failure["process"] == "lister"
        assert "files.py" in failure["traceback"]


def test_under_grpc_input_that_only_trainers_have_is_named_with_host_and_group(tmp_path: Path) -> None:
    with grpc(tmp_path, {"training": Channel(FILES, on="trainer")}) as cluster:
        ends = run(cluster)
        assert codes(cluster, ends) == ([0, 0], 1), cluster.logs()
        text = cause(cluster, ends)
        host = cluster.failure(cluster.chief)["host"]
        assert host in cluster.data_hosts
        assert f"There is no channel 'training' on host {host} of group 'data_group' (channels: none)" in text
        assert GROUPS in text


def test_under_tf_data_files_that_only_trainers_have_are_explained(tmp_path: Path) -> None:
    with tf_data(tmp_path, {"training": Channel(FILES, on="trainer")}) as cluster:
        ends = run(cluster, 120)
        assert codes(cluster, ends) == ([0], 1), cluster.logs()
        text = cause(cluster, ends)
        assert "NotFoundError" in text
        assert "/opt/ml/input/data/training/part-" in text
        assert f"It was listed on host {cluster.chief} of group 'dnn_group', but the data hosts read it" in text


# What cannot be


def test_under_tf_data_files_that_each_host_has_its_own_of_are_refused(tmp_path: Path) -> None:
    with tf_data(tmp_path, {"training": SHARDED}) as cluster:
        ends = run(cluster, 90)
        assert codes(cluster, ends) == ([0], 2), cluster.logs()
        assert cause(cluster, ends).startswith("Channel 'training' is ShardedByS3Key: each data host has files that ")
        assert "Let it be FullyReplicated, or give --engine grpc." in cause(cluster, ends)


@pytest.mark.parametrize("distribution", ["FullyReplicated", "ShardedByS3Key"])
def test_an_empty_channel_is_named(tmp_path: Path, distribution: str) -> None:
    with grpc(tmp_path, {"training": Channel({}, distribution=distribution)}) as cluster:
        ends = run(cluster)
        assert codes(cluster, ends) == ([0, 0], 1), cluster.logs()
        text = cause(cluster, ends)
        if distribution == "FullyReplicated":
            assert "Channel 'training' (/opt/ml/input/data/training) has no files on host algo-" in text
            assert f"Is its S3 prefix empty, or does it not go to that group ({GROUPS})?" in text
        else:
            assert "channel 'training' (ShardedByS3Key) gave no splits on any of the hosts" in text


# A homogeneous job


def test_ranks_share_the_files_of_their_own_host(tmp_path: Path) -> None:
    settings = {"engine": "local", "lease-s": LEASE_S, "ranks-per-host": 2, "remainder": "pad"}
    files = dict(list(FILES.items())[:9])  # two hosts, two ranks each: 3, 2, 2 and 2 files
    channels = {"training": Channel(files, distribution="ShardedByS3Key")}
    with SageMakerCluster(tmp_path, 0, 2, "files.py", settings, channels=channels, tensorflow=False) as cluster:
        ends = run(cluster)
        assert {host: end.code for host, end in ends.items()} == dict.fromkeys(cluster.trainer_hosts, 0), cluster.logs()
        assert cluster.rows(0) == dict.fromkeys(range(180), 1)
