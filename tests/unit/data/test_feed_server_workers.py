"""The feed with workers that are processes, and with ranks on the network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from feed_parts import assignment, split_id
from feed_serving import FeedThread, RankCall, hello, wait_until

from hetero.data.feed_server import FeedConfig

BATCHES, SPLITS = 12, 4
WORKER = f"""
import sys, time
import numpy as np
from hetero.data.feed_worker import serve

def make_inputs(split, epoch):
    for sequence in range({BATCHES}):
        if split == "bad" and sequence == 2:
            raise RuntimeError("no such image")
        time.sleep(0.002)
        yield {{"id": np.array([[int(split.removeprefix("file-")) if split != "bad" else -1, sequence]]),
               "image": np.full((1, 50_000), sequence, dtype=np.uint8)}}

serve(sys.argv[1], b"secret", sys.argv[2], 300_000, make_inputs, lambda: ["file-0", "file-1"], host="algo-1")
"""


class WorkerProcess:
    def __init__(self, socket_name: str, name: str) -> None:
        argv = [sys.executable, "-c", WORKER, socket_name, name]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def no_worker_s() -> float:
    return 60.0


@pytest.fixture
def feed(request: pytest.FixtureRequest, no_worker_s: float) -> Iterator[FeedThread]:
    name = f"hetero-test-{os.getpid()}-{request.function.__name__}"
    config = FeedConfig("algo-1", "run-1", name, b"secret", bind="127.0.0.1", no_worker_s=no_worker_s)
    feed = FeedThread(config)
    yield feed
    feed.stop()


@pytest.fixture
def workers(feed: FeedThread) -> Iterator[list[WorkerProcess]]:
    started: list[WorkerProcess] = []
    yield started
    for worker in started:
        worker.kill()


@pytest.fixture
def rank(feed: FeedThread) -> Iterator[RankCall]:
    call = RankCall(feed.address, hello=hello())
    yield call
    call.close()


def start(feed: FeedThread, workers: list[WorkerProcess], name: str = "worker-0") -> WorkerProcess:
    connected = len(feed.connected)
    workers.append(WorkerProcess(feed.feed.config.worker_socket, name))
    wait_until(lambda: len(feed.connected) > connected, "worker connected")
    return workers[-1]


def take(rank: RankCall, batches: int) -> None:
    """Take batches as they come until there are so many."""

    def taken() -> bool:
        here = rank.batches()
        rank.grant(batches=4, consumed=(sum(len(data) for _, data in here), len(here)), received=len(here))
        return len(here) >= batches

    wait_until(taken, f"{batches} batches")


def test_every_batch_arrives_once_although_workers_are_killed(feed, workers, rank):
    start(feed, workers, "worker-0")
    start(feed, workers, "worker-1")
    wait_until(lambda: feed.coordinator.wanted == 2, "two idle workers")
    feed.say(assignments=[assignment(split) for split in range(SPLITS)])
    take(rank, 5)
    workers[0].kill()
    os.kill(workers[1].pid, signal.SIGKILL)
    take(rank, 6)
    start(feed, workers, "worker-0")
    take(rank, BATCHES * SPLITS)
    rank.send(received=BATCHES * SPLITS)
    wait_until(lambda: len(feed.coordinator.done) == SPLITS, "all splits done")
    assert sorted(rank.ids()) == [(split, sequence) for split in range(SPLITS) for sequence in range(BATCHES)]
    for header, data in rank.batches():
        image = next(array for array in header.layout.arrays if "image" in array.path)
        assert data[image.offset : image.offset + image.bytes] == bytes([header.sequence]) * 50_000
    assert [done.batches for done in feed.coordinator.done] == [BATCHES] * SPLITS
    assert sum(done.replayed for done in feed.coordinator.done) > 0, "the killed ones had been in the middle of a split"


@pytest.mark.parametrize("no_worker_s", [0.5])
def test_splits_go_back_from_a_host_without_workers_and_come_again(feed, workers, rank):
    start(feed, workers).kill()
    feed.say(assignments=[assignment(0)])
    wait_until(lambda: feed.coordinator.returned, "the split goes back")
    start(feed, workers)
    feed.say(assignments=[assignment(0, attempt=2)])
    take(rank, BATCHES)
    assert {header.attempt for header, _ in rank.batches()} == {2}


def test_a_revoked_split_stops_and_its_worker_goes_on_with_another(feed, workers, rank):
    start(feed, workers)
    feed.say(assignments=[assignment(0)])
    wait_until(lambda: feed.call(feed.feed.stats).waiting_batches >= 4, "the worker is in the middle of it")
    feed.say(revoked=[split_id(0)], assignments=[assignment(1)])
    take(rank, BATCHES)
    rank.send(received=BATCHES)
    wait_until(lambda: feed.coordinator.done_keys() == [(0, 1, 1)], "the other one is done")
    assert {split for split, _ in rank.ids()} == {1}


def test_the_failure_of_a_split_and_the_list_of_splits_are_told(feed, workers, rank):
    start(feed, workers)
    bad = assignment(0)
    bad.value = '"bad"'
    feed.say(assignments=[bad], list_splits=True)
    take(rank, 2)
    rank.send(received=2)
    wait_until(lambda: feed.coordinator.bad, "failure told")
    assert "no such image" in feed.coordinator.bad[0].cause_json
    assert feed.coordinator.bad[0].batches == 2
    wait_until(lambda: feed.coordinator.lists, "list told")
    assert list(feed.coordinator.lists[0].values) == ['"file-0"', '"file-1"']
