"""Data hosts with files of their own, with real gRPC between them and the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from control_running import wait_until
from split_peers import FakeFeed, Peers

from hetero.control.client import ControlClient
from hetero.control.state import HostReport, JobState, Outcome, Phase

WORKING = HostReport(workers_alive=1)
START_S = 0.6


class Cluster:
    """A coordinator of a job whose channel `training` is spread over d1 and d2, and a rank that has begun to read."""

    def __init__(self, address: str, peers: Peers, make_client: Callable[..., ControlClient]) -> None:
        self.address, self._peers, self._make_client = address, peers, make_client
        self.clients = {name: make_client(address, name) for name in ("d1", "d2", "t1", "t2")}

    def register(self, *names: str) -> JobState:
        for name in names:
            state = self.clients[name].register(WORKING if name[0] == "d" else HostReport(ranks=1), 5.0)
        return state

    def feed(self, host: str, *files: str) -> FakeFeed:
        """Connect a feed whose host has these files of its own; with none it never lists."""
        return self._peers.feed(self.address, host, values=files or None, channel="training")

    def read(self, **options: object) -> None:
        for rank in range(2):
            self._peers.rank(self.address, rank, 2, **options).follower.begin(0)

    def end(self) -> JobState:
        for client in self.clients.values():
            client.watch()  # the coordinator lingers until all have heard
        return self.clients["t1"].wait_for(lambda state: state.ended, 10.0, "the end")


@pytest.fixture
def peers() -> Iterator[Peers]:
    started = Peers()
    yield started
    started.close()


@pytest.fixture
def cluster(start_coordinator, peers, make_client) -> Cluster:
    server = start_coordinator(
        splits=True, sharded=("training",), epochs=1, start_timeout_s=START_S, required_endpoints=(), lease_s=5.0
    )
    return Cluster(server.address, peers, make_client)


def test_training_starts_only_when_every_data_host_is_there(cluster: Cluster) -> None:
    assert cluster.register("t1", "t2", "d1").phase is Phase.WAITING
    assert cluster.register("d2").phase is Phase.TRAINING


def test_a_data_host_that_never_comes_is_named(cluster: Cluster) -> None:
    cluster.register("t1", "t2", "d1")
    state = cluster.end()
    assert state.outcome is Outcome.NEVER_STARTED
    assert str(state.failure.message).endswith("within 0.6 s: data host d2 did not come")


def test_splits_go_to_the_host_that_has_them(cluster: Cluster) -> None:
    cluster.register("t1", "t2", "d1", "d2")
    first, second = cluster.feed("d1", '"a"', '"b"'), cluster.feed("d2", '"x"')
    cluster.read()
    for number in (0, 2):
        first.finish(0, number)
    second.finish(0, 1)
    wait_until(lambda: first.ended == second.ended == [0], "the end of the epoch")
    assert [one.value for one in first.taken] == ['"a"', '"b"']
    assert [one.value for one in second.taken] == ['"x"']


def test_a_host_that_does_not_list_is_named(cluster: Cluster) -> None:
    cluster.register("t1", "t2", "d1", "d2")
    cluster.feed("d1", '"a"')
    silent, asked_s = cluster.feed("d2"), time.monotonic()
    state = cluster.end()
    assert silent.listed == 1
    assert time.monotonic() - asked_s > START_S / 2
    assert state.outcome is Outcome.NEVER_STARTED
    assert "data host d2 did not list the splits of channel 'training' (ShardedByS3Key) within 0.6 s" in str(
        state.cause
    )


@pytest.mark.parametrize("listed", [True, False], ids=["with splits of its own", "before it has listed"])
def test_the_loss_of_a_host_ends_the_job_with_the_reason(cluster: Cluster, listed: bool) -> None:
    cluster.register("t1", "t2", "d1", "d2")
    cluster.feed("d1", '"a"')
    if listed:
        feed = cluster.feed("d2", '"x"')
        cluster.read()
        wait_until(lambda: feed.held, "a split in hand")
    cluster.clients["d2"].leave("stopped by SIGTERM")
    state = cluster.end()
    assert (state.outcome, state.failure.suggested_exit_code, state.failure.host) == (Outcome.DATA_LOST, 4, "d2")
    text = str(state.failure.message)
    assert text.startswith("data host d2 left before the end (stopped by SIGTERM)")
    assert ("it alone has files of channel 'training' (ShardedByS3Key)" in text) == listed
    assert ("before it had listed its files of channel 'training'" in text) != listed
    assert "Let it be FullyReplicated if data hosts are to replace each other." in text


def test_why_its_workers_were_given_up_is_part_of_the_reason(cluster: Cluster) -> None:
    cluster.register("t1", "t2", "d1", "d2")
    cluster.feed("d1", '"a"')
    feed = cluster.feed("d2", '"x"')
    cluster.read()
    wait_until(lambda: feed.held, "a split in hand")
    cause = {"host": "d2", "process": "worker-0", "time_s": 1.0, "signal": "SIGKILL", "last_lines": ["no memory"]}
    cluster.clients["d2"].report_failure(cause, 0.0)
    cluster.clients["d2"].register(HostReport(workers_gone_for_good=True), 5.0)
    failure = cluster.end().failure
    assert "data host d2 has no worker left and cannot start another, and it alone has" in str(failure.message)
    assert "What happened there: worker-0 on d2 was killed by SIGKILL" in str(failure.message)
    assert failure.last_lines == ("no memory",)


def test_a_share_on_a_trainer_host_is_refused(cluster: Cluster) -> None:
    cluster.register("t1", "t2", "d1", "d2")
    cluster.feed("d1", '"a"')
    cluster.feed("d2", '"x"')
    cluster.read(stray_channels=["training"])
    state = cluster.end()
    assert (state.outcome, state.failure.suggested_exit_code) == (Outcome.FAILED, 2)
    assert "no data host would read" in str(state.failure.message)
