"""The exchange over real gRPC on loopback."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hetero.data import wire
from hetero.data.exchange import Exchange, ExchangeLost, ExchangeServer, PeerInputFailed
from hetero.errors import PeerNeverCame, PortInUse, Unauthorised

DEADLINE_S = 15.0


class Recorder:
    """Keeps what an exchange tells."""

    def __init__(self):
        self.changed = threading.Condition()
        self.frontiers, self.parcels, self.failures = [], [], []

    def on_frontier(self, frontier):
        self._add(self.frontiers, frontier)

    def on_parcel(self, epoch, step, part, data):
        self._add(self.parcels, (epoch, step, part, data))

    def on_failure(self, epoch, error):
        self._add(self.failures, (epoch, error))

    def _add(self, kept, item):
        with self.changed:
            kept.append(item)
            self.changed.notify_all()

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), (self.frontiers, self.failures)


@pytest.fixture
def server():
    server = ExchangeServer("secret", "127.0.0.1")
    yield server
    server.stop(grace_s=0.5)


@pytest.fixture
def join(server):
    opened = []

    def open_exchange(rank, size=2, token="secret", **options):
        exchange = Exchange(f"127.0.0.1:{server.port}", rank, size, token, **options)
        opened.append(exchange)
        return exchange

    yield open_exchange
    for exchange in opened:
        exchange.close()


def joined(join, size=2):
    pairs = []
    for rank in range(size):
        exchange, recorder = join(rank, size), Recorder()
        exchange.attach(recorder)
        pairs.append((exchange, recorder))
    return pairs


def test_reports_of_all_ranks_reach_all(join):
    (first, heard_0), (second, heard_1) = joined(join)

    first.report(0, 3, -1)
    second.report(0, 2, 1)

    for heard in (heard_0, heard_1):
        heard.until(lambda: heard.frontiers and heard.frontiers[-1].batches == (3, 2))  # noqa: B023
        assert heard.frontiers[-1].leftovers == (-1, 1)
        assert heard.frontiers[-1].left_after == (-1, -1)


def test_a_rank_that_comes_late_hears_what_was_said(join):
    first = join(0)
    first.publish("dataset", b"17")
    first.report(4, 0, 5)
    assert first.wait("dataset", timeout_s=DEADLINE_S) == b"17"

    second, heard = join(1), Recorder()
    second.attach(heard)

    assert second.wait("dataset", timeout_s=DEADLINE_S) == b"17"
    heard.until(lambda: heard.frontiers and heard.frontiers[-1].leftovers[0] == 5)


def test_waiting_for_a_value_has_a_deadline_and_a_check(join):
    exchange = join(0)

    with pytest.raises(PeerNeverCame, match=r"No rank announced 'x' within 0\.3 s"):
        exchange.wait("x", timeout_s=0.3)

    def check():
        raise KeyError("lease")

    with pytest.raises(KeyError, match="lease"):
        exchange.wait("x", check=check)


def test_batches_larger_and_smaller_than_a_chunk_arrive_whole(join):
    (first, _), (second, heard) = joined(join)
    sent = threading.Semaphore(0)
    large = np.arange(3 * wire.CHUNK_BYTES // 8 + 5)
    batches = [
        {"x": large, "s": np.array([b"a", "b"], dtype=object)},
        {"x": np.zeros((0, 3))},
        [np.ones(3, np.float32)],
    ]

    for part, data in enumerate(batches):
        first.send(2, 7, to=1, part=part, data=data, done=sent.release)
    second.expect_parcels()

    heard.until(lambda: len(heard.parcels) == 3)
    for _ in batches:
        assert sent.acquire(timeout=DEADLINE_S)
    assert [parcel[:3] for parcel in heard.parcels] == [(2, 7, 0), (2, 7, 1), (2, 7, 2)]
    assert (heard.parcels[0][3]["x"] == large).all()
    assert heard.parcels[0][3]["s"].tolist() == [b"a", "b"]
    assert heard.parcels[1][3]["x"].shape == (0, 3)
    assert heard.parcels[2][3][0].tolist() == [1, 1, 1]


def test_what_was_sent_arrives_though_the_sender_closes(join):
    (first, _), (second, heard) = joined(join)
    for part in range(20):
        first.send(0, 0, to=1, part=part, data=np.full(wire.CHUNK_BYTES // 8, part), done=lambda: None)
    first.close()
    second.expect_parcels()

    heard.until(lambda: len(heard.parcels) == 20)


def test_a_failure_reaches_the_others_with_its_exit_code(join):
    (_, heard_0), (second, heard_1) = joined(join)

    second.fail(3, "ValueError: bad record", exit_code=4)

    heard_0.until(lambda: heard_0.failures)
    epoch, error = heard_0.failures[0]
    assert epoch == 3
    assert isinstance(error, PeerInputFailed)
    assert error.exit_code == 4
    assert "Rank 1 cannot go on: ValueError: bad record" in str(error)
    assert not heard_1.failures


def test_leaving_is_told_and_goodbye_is_no_failure(join):
    (first, heard), (second, _) = joined(join)
    first.report(0, 1, -1)
    second.leave(0, 6)

    heard.until(lambda: heard.frontiers and heard.frontiers[-1].left_after == (-1, 6))
    second.close()
    first.report(1, 1, -1)
    heard.until(lambda: heard.frontiers[-1].epoch == 1 and heard.frontiers[-1].left_after == (-1, 0))
    assert not heard.failures


def test_a_rank_that_dies_is_told(join, server):
    first, heard = join(0), Recorder()
    first.attach(heard)
    code = (
        "import os, sys; from hetero.data.exchange import Exchange\n"
        "Exchange(sys.argv[1], 1, 2, 'secret'); print('here', flush=True); sys.stdin.read(1); os._exit(9)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, f"127.0.0.1:{server.port}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout.readline() == b"here\n"
        child.kill()
    heard.until(lambda: heard.failures)

    epoch, error = heard.failures[0]
    assert epoch == -1
    assert "Rank 1 cannot go on: rank 1 left without a word" in str(error)


def test_the_end_of_the_server_is_told_and_nothing_hangs(join, server):
    _, (second, heard_1) = joined(join)

    server.stop(grace_s=0.0)

    heard_1.until(lambda: heard_1.failures)
    assert isinstance(heard_1.failures[0][1], ExchangeLost)
    with pytest.raises(ExchangeLost, match=r"Rank 1 lost the ranks' exchange in rank 0's process at 127"):
        second.wait("anything")
    second.send(0, 0, to=0, part=0, data=np.zeros(3), done=lambda: None)
    second.report(0, 1, -1)
    start = time.monotonic()
    second.close()
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("token", ["wrong", "", None])
def test_a_wrong_token_is_refused_and_logged_with_the_peer(join, token, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(Unauthorised, match="--token"):
        join(1, token=token)

    assert "refused ipv4:127.0.0.1:" in caplog.text
    assert join(1).wait  # the place is still free


def test_two_of_the_same_rank_and_other_sizes_are_refused(join):
    join(0)

    with pytest.raises(ExchangeLost, match="rank 0 is here already"):
        join(0)
    with pytest.raises(ExchangeLost, match="does not fit a job of 2 ranks"):
        join(1, size=3)


def test_no_server_is_a_clear_error_in_time():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(PeerNeverCame, match=r"No answer from the ranks' exchange .* within 0\.4 s"):
            Exchange(f"127.0.0.1:{free.getsockname()[1]}", 0, 2, connect_timeout_s=0.4)


def test_a_taken_port_is_named(server):
    with pytest.raises(PortInUse, match=str(server.port)):
        ExchangeServer(None, "127.0.0.1", server.port)


def test_idle_and_random_connections_disturb_nothing(join, server):
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    for connection in sockets[::2]:
        connection.sendall(bytes(range(256)))

    (first, heard), (second, _) = joined(join)
    first.report(0, 1, 0)
    second.report(0, 1, 0)
    heard.until(lambda: heard.frontiers and heard.frontiers[-1].batches == (1, 1))

    for connection in sockets:
        connection.close()


def test_closing_leaves_no_thread(server):
    before = set(threading.enumerate())
    exchanges = [Exchange(f"127.0.0.1:{server.port}", rank, 2, "secret") for rank in range(2)]
    for exchange in exchanges:
        exchange.expect_parcels()
        exchange.send(0, 0, to=1 - exchange.rank, part=0, data=np.zeros(3), done=lambda: None)
    for exchange in exchanges:
        exchange.close()
    server.stop()
    deadline = time.monotonic() + DEADLINE_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        threading.Event().wait(0.01)

    assert not set(threading.enumerate()) - before
