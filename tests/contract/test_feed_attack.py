"""Strangers and impostors at the ports of a feed and of the coordinator: a rank beside them must not notice."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from attackers import ATTACKERS, COORDINATOR, FEED, HOST, KINDS, LANE, LOOPBACK, RANKS, TOKEN, Attacker
from feed_cluster import FeedCluster, RankInput

from hetero._proto.splits_pb2 import RankStats
from hetero.control.split_follow import SplitFollower
from hetero.control.state import Phase
from hetero.data.epoch import InputStream
from hetero.host import feed_key

DEADLINE_S = 60.0
IDLE = 300  # connections to each port that say nothing
GROWTH = 1.10
STEP_S = 0.005  # what the rank does between two batches
ROWS, BATCH_SIZE = 1200, 16
JOB = f"""
import numpy as np
import hetero

job = hetero.Job("rows", engine="grpc")

@job.splits
def splits(_ctx):
    return [[first, first + 100] for first in range(0, {ROWS}, 100)]

@job.inputs
def inputs(ctx):
    for first, end in ctx.splits:
        for start in range(first, end, 30):
            row = np.arange(start, min(start + 30, end))
            yield {{"row": row, "x": np.tile(row[:, None].astype(np.float32), (1, 256))}}

@job.train
def train(_ctx):
    raise AssertionError("the test reads the stream itself")
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FeedCluster]:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    options = {"batch_size": BATCH_SIZE, "token": TOKEN}
    common = {"data_hosts": 1, "ranks": RANKS, "options": options}
    with FeedCluster(tmp_path, f"{job}:job", **common) as made:
        made.wait_for_workers()
        yield made


class Mute:
    """Another rank, which reads nothing: before all ranks have come the coordinator hands out no split."""

    def __init__(self, cluster: FeedCluster, rank: int) -> None:
        config = cluster.config
        self.close = SplitFollower(config.control_address, TOKEN, rank, RANKS, config.run_id, self).close

    def on_fence(self, _epoch, _attempt, _splits) -> dict[int, bytes]:
        return {}

    def on_epoch_end(self, _epoch) -> None:
        pass

    def highest_attempt(self) -> int:
        return 0

    def stats(self) -> RankStats:
        return RankStats()


class Honest:
    """Rank 0 of the job. It reads epoch after epoch, each to its end, and gets all rows: the others ask for none."""

    def __init__(self, cluster: FeedCluster) -> None:
        self.epochs = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._rank = RankInput(cluster.config, 0, RANKS)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        stream = InputStream(self._rank.opener, BATCH_SIZE, remainder="pad", ordered=False, check=self._rank.check)
        try:
            with contextlib.closing(stream):
                for epoch in itertools.count():
                    rows: Counter[int] = Counter()
                    for batch in stream.batches(epoch):
                        assert (batch.data["x"][batch.mask] == batch.data["row"][batch.mask, None]).all()
                        self._stop.wait(STEP_S)
                        rows.update(batch.data["row"][batch.mask].tolist())
                    assert rows == Counter(range(ROWS)), f"epoch {epoch}"
                    self.epochs = epoch + 1
                    if self._stop.is_set():
                        return
        except BaseException as error:
            self.error = error

    def wait_for_an_epoch(self) -> None:
        """Wait until an epoch has passed from its first row to its last."""
        sought = self.epochs + 2
        wait_for(lambda: self.epochs >= sought or self.error is not None)
        assert self.error is None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._rank.close()
        assert not self._thread.is_alive()


def connections(pid: int) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(pid).net_connections("tcp"))


def listening(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def resident_bytes(pids: dict[str, int]) -> dict[str, int]:
    return {where: psutil.Process(pid).memory_info().rss for where, pid in pids.items()}


def schedule(count: int) -> list[tuple[str, str]]:
    """Return (kind, where) of each request.

    First every kind at every port by all attackers at once: no later moment needs more memory. Then all kinds by their
    weights, in random order.
    """
    places = [(name, where) for name, kind in KINDS.items() for where in kind[1]]
    first = [place for place in places for _ in range(ATTACKERS)]
    weighted = [(name, where) for name, where in places for _ in range(KINDS[name][3])]
    rest = list(itertools.islice(itertools.cycle(weighted), count - len(first)))
    random.Random(count).shuffle(rest)
    return first + rest


def attack(attackers: Sequence[Attacker], kinds: Sequence[tuple[str, str]]) -> None:
    """Have all attackers at work at the same time, each on its share."""
    threads = [
        threading.Thread(target=attacker.attack, args=(kinds[index :: len(attackers)],), daemon=True)
        for index, attacker in enumerate(attackers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert [attacker.error for attacker in attackers] == [None] * len(attackers)


class Idle:
    """Connections to some ports that say nothing. gRPC closes one after a minute; then another takes its place."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._sockets: dict[int, list[socket.socket]] = {port: [] for port in ports}

    def hold(self) -> None:
        """Have `IDLE` of them at each port."""
        for port, there in self._sockets.items():
            for closed in [one for one in there if is_closed(one)]:
                closed.close()
                there.remove(closed)
            while len(there) < IDLE:
                there.append(socket.create_connection((LOOPBACK, port), timeout=DEADLINE_S))
                there[-1].setblocking(False)

    def close(self) -> None:
        for one in itertools.chain(*self._sockets.values()):
            one.close()


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection, reading what it had to say before."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_requests_of_strangers_and_impostors_disturb_nobody(cluster, count):
    processes = {FEED: cluster.process(HOST, "feed"), COORDINATOR: cluster.process(HOST, "coordinator")}
    pids, everybody = {where: kept.pid for where, kept in processes.items()}, cluster.pids
    ports = {
        FEED: int(cluster.control.state.endpoints[feed_key(HOST)].rpartition(":")[2]),
        COORDINATOR: cluster.config.settings.control_port,
    }
    ports[LANE] = next(port for port in listening(pids[FEED]) if port != ports[FEED])
    plan, warm_up = schedule(count), max(300, count // 10)
    with contextlib.ExitStack() as stack:
        attackers = [Attacker(number, cluster.config.run_id, ports) for number in range(ATTACKERS)]
        for attacker in attackers:
            stack.callback(attacker.close)
            stack.callback(Mute(cluster, attacker.rank).close)
        honest = Honest(cluster)
        stack.callback(honest.close)
        before = {pid: connections(pid) for pid in pids.values()}
        idle = Idle([ports[FEED], ports[COORDINATOR]])
        stack.callback(idle.close)
        idle.hold()
        wait_for(lambda: all(connections(pid) >= before[pid] + IDLE for pid in pids.values()))
        honest.wait_for_an_epoch()

        attack(attackers, plan[:warm_up])
        idle.hold()
        honest.wait_for_an_epoch()
        resident, epochs = resident_bytes(pids), honest.epochs
        attack(attackers, plan[warm_up:])
        during = honest.epochs - epochs
        honest.wait_for_an_epoch()
        idle.hold()
        wait_for(lambda: all(connections(pid) >= IDLE for pid in pids.values()))

        seen = sum((attacker.seen for attacker in attackers), Counter())
        assert seen.total() == count
        for (kind, where), sent in Counter(plan).items():
            came = {answer: n for (*what, answer), n in seen.items() if what == [kind, where]}
            assert sum(came.values()) == sent, (kind, where)
            assert came.keys() <= KINDS[kind][2], (kind, where, came)
        assert during > 0
        assert cluster.pids == everybody
        assert not any(kept.deaths for host in cluster.hosts.values() for kept in host.processes.values())
        state = cluster.control.status()
        assert (state.phase, state.restarts, state.replayed_batches) == (Phase.TRAINING, 0, 0)
        assert not any(host.lost or host.left for host in state.hosts)
        wait_for(lambda: all(now <= GROWTH * resident[where] for where, now in resident_bytes(pids).items()))
