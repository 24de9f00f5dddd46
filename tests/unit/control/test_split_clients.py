"""What ranks and feeds do when their coordinator is away, and when something goes wrong on their own side."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import CertificateAuthority
from control_running import DEADLINE_S, free_port, wait_until
from split_peers import FakeFeed, FakeRank, Peers

from hetero._proto import splits_pb2 as pb
from hetero.control.split_follow import SplitFollower
from hetero.control.split_serve import ServeLink
from hetero.errors import SettingsError


@pytest.fixture
def peers() -> Iterator[Peers]:
    started = Peers()
    yield started
    started.close()


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hetero-follow"]


def test_what_is_said_before_the_coordinator_is_up_reaches_it(spawn_coordinator, peers):
    port = free_port()
    feed, rank = peers.feed(f"127.0.0.1:{port}", values=['"a"']), peers.rank(f"127.0.0.1:{port}")
    rank.follower.begin(0)
    wait_until(lambda: feed.hellos > 1, "a second try")
    spawn_coordinator(port=port, splits=True).wait_ready()
    feed.finish(0, 0)
    wait_until(lambda: rank.ended == [0], "the end of the epoch")


def test_a_rank_that_leaves_says_so_and_is_not_waited_for(start_coordinator, peers):
    server = start_coordinator(splits=True)
    feed, stays, goes = peers.feed(server.address), peers.rank(server.address, 0, 2), peers.rank(server.address, 1, 2)
    for rank in (stays, goes):
        rank.follower.begin(0)
    wait_until(lambda: feed.held, "a split in hand")
    goes.follower.close()
    goes.follower.close()
    wait_until(lambda: len(followers()) == 1, "the end of its thread")

    def only_the_other_is_asked() -> bool:
        taken = len(feed.taken)
        feed.say(pb.ServeRequest(returned=[feed.taken[-1].id], wanted=feed.asked + taken))
        wait_until(lambda: len(feed.taken) > taken, "the split once more")
        return stays.fences[-1][2] == (0,)

    wait_until(only_the_other_is_asked, "the coordinator to have heard that the rank has left")
    stays.follower.leave(0)
    wait_until(lambda: feed.ended == [0], "the end of the epoch")


def test_a_follower_ends_promptly_where_nobody_answers():
    rank = FakeRank(f"127.0.0.1:{free_port()}")
    started_s = time.monotonic()
    rank.follower.close()
    assert time.monotonic() - started_s < DEADLINE_S / 3
    assert not followers()


def test_a_fence_is_said_again_until_the_rank_has_obeyed_it(start_coordinator, peers, monkeypatch, caplog):
    server = start_coordinator(splits=True)
    feed, rank = peers.feed(server.address), peers.rank(server.address)
    rank.follower.begin(0)
    wait_until(lambda: feed.held, "a split in hand")
    tries = threading.Semaphore(0)

    def fail(*_: object) -> dict[int, bytes]:
        tries.release()
        raise RuntimeError("no memory")

    monkeypatch.setattr(rank, "on_fence", fail)
    feed.say(pb.ServeRequest(returned=[feed.taken[0].id]))
    assert tries.acquire(timeout=DEADLINE_S)
    assert tries.acquire(timeout=DEADLINE_S)
    monkeypatch.undo()
    wait_until(lambda: rank.fences, "the fence")
    assert "no memory" in caplog.text


def test_figures_that_cannot_be_had_do_not_stop_a_rank(start_coordinator, peers, monkeypatch):
    server = start_coordinator(splits=True)
    feed, rank = peers.feed(server.address, values=['"a"']), peers.rank(server.address)
    monkeypatch.delattr(FakeRank, "stats")
    rank.follower.begin(0)
    feed.finish(0, 0)
    wait_until(lambda: rank.ended == [0], "the end of the epoch")


@pytest.mark.parametrize("method", ["stats", "on_reply"])
def test_a_mistake_of_the_feeds_own_ends_its_link_with_that_mistake(start_coordinator, peers, monkeypatch, method):
    server = start_coordinator(splits=True)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(FakeFeed, method, fail)
    feed = peers.feed(server.address)
    assert str(feed.error) == "a bug"


def test_what_was_given_up_is_said_again_to_another_coordinator(spawn_coordinator, peers, tmp_path: Path):
    port = free_port()
    address = f"127.0.0.1:{port}"
    first = spawn_coordinator(port=port, splits=True, bad_split="skip", data=("d1",))
    first.wait_ready()
    feed, rank = peers.feed(address, workers=2), peers.rank(address)
    rank.follower.begin(0)
    wait_until(lambda: len(feed.held) == 2, "two splits in hand")
    rank.highest = feed.taken[-1].id.attempt
    first.end(signal.SIGKILL)
    bad, returned = (one.id for one in feed.taken)
    feed.call(feed.held.clear)
    feed.say(pb.ServeRequest(bad=[pb.SplitBad(id=bad, cause_json='{"message": "odd"}')], returned=[returned]))
    (tmp_path / "splits.json").unlink()
    feed.idle = 2
    spawn_coordinator(port=port, splits=True, bad_split="skip", data=("d1",)).wait_ready()
    feed.finish(0, 1)
    wait_until(lambda: rank.ended == [0], "the end of the epoch")
    assert [one.id.split for one in feed.taken] == [0, 1, 1]


def test_streams_can_be_encrypted_and_need_the_token_all_the_same(start_coordinator, peers, tmp_path: Path, caplog):
    tls = CertificateAuthority(tmp_path).host()
    server = start_coordinator(splits=True, tls=tls, token="secret")
    stranger = peers.feed(server.address, "d2", tls=tls, token="wrong")
    feed = peers.feed(server.address, values=['"a"'], tls=tls, token="secret")
    rank = peers.rank(server.address, tls=tls, token="secret")
    rank.follower.begin(0)
    feed.finish(0, 0)
    wait_until(lambda: rank.ended == [0], "the end of the epoch")
    wait_until(lambda: "the feed of d2 has lost the coordinator" in caplog.text, "the stranger's complaint")
    tries = stranger.hellos
    wait_until(lambda: stranger.hellos > tries + 1, "more tries of the stranger")
    assert not stranger.taken
    lost = [record for record in caplog.records if "the feed of d2 has lost the coordinator" in record.getMessage()]
    assert len(lost) == 1
    assert "wrong token" in lost[0].getMessage()


def test_a_token_that_cannot_be_sent_is_refused_at_once():
    with pytest.raises(SettingsError, match="--token"):
        SplitFollower("127.0.0.1:1", "two words", 0, 1, "run-1", None)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="--token"):
        ServeLink("127.0.0.1:1", "two words", "d1", "x", None)  # type: ignore[arg-type]
