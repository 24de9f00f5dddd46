"""The feed on the network: what ranks get, what is refused, and that nobody can disturb the others."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from certificates import CertificateAuthority
from feed_parts import assignment, split_id
from feed_serving import FeedThread, RankCall, hello, wait_until

from hetero._proto import feed_pb2 as pb
from hetero.data import feed_server
from hetero.data.feed_server import FeedConfig
from hetero.errors import PortInUse
from hetero.tls import PLAIN, channel

MakeFeed = Callable[..., FeedThread]
MakeRank = Callable[..., RankCall]


@pytest.fixture
def make_feed(request: pytest.FixtureRequest) -> Iterator[MakeFeed]:
    running: list[FeedThread] = []

    def make(**values) -> FeedThread:
        name = f"hetero-test-{os.getpid()}-{request.node.name}-{len(running)}"
        config = {"host": "algo-1", "run_id": "run-1", "bind": "127.0.0.1", "worker_secret": b"secret"}
        running.append(FeedThread(FeedConfig(**{**config, "worker_socket": name, **values})))
        return running[-1]

    yield make
    for feed in running:
        feed.stop()


@pytest.fixture
def feed(make_feed: MakeFeed) -> FeedThread:
    return make_feed()


@pytest.fixture
def connect() -> Iterator[MakeRank]:
    calls: list[RankCall] = []

    def make(feed: FeedThread, rank: int = 0, size: int = 1, **values) -> RankCall:
        said = values.pop("says", {})
        calls.append(RankCall(feed.address, **{"hello": hello(rank, size, **said), **values}))
        return calls[-1]

    yield make
    for call in calls:
        call.close()


def test_a_client_made_from_the_proto_reads_what_workers_finish(feed, connect):
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(3, attempt=9)])
    content = {"image": np.arange(6, dtype=np.float32).reshape(2, 3), "label": np.array([4, 5], dtype=np.int16)}
    feed.call(worker.batch, 0, content)
    assert rank.feed_id.startswith(feed.feed.feed_id)
    rank.grant()
    rank.wait_batches(1)
    ((header, data),) = rank.batches()
    assert (header.epoch, header.split, header.sequence, header.attempt, header.rows) == (0, 3, 0, 9, 2)
    image, label = header.layout.arrays
    assert (image.path, image.dtype, list(image.shape)) == ("batch['image']", "<f4", [2, 3])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4", 6, image.offset).reshape(2, 3), content["image"])
    np.testing.assert_array_equal(np.frombuffer(data, "<i2", 2, label.offset), content["label"])
    feed.call(worker.end, 1)
    assert not worker.freed
    rank.send(received=1)
    wait_until(lambda: worker.freed, "memory given back")
    wait_until(lambda: feed.coordinator.done_keys() == [(0, 3, 9)], "split done")
    assert feed.call(feed.feed.stats).ranks[0].rows == 2


def test_a_large_batch_comes_in_pieces(feed, connect):
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    content = np.random.default_rng(0).integers(0, 255, (5, 1_000_001), dtype=np.uint8)
    feed.call(worker.batch, 0, content)
    rank.grant(size=1)  # smaller than the batch: with nothing under way it comes all the same
    rank.wait_batches(1)
    assert rank.batches()[0][1] == content.tobytes()
    assert max(len(reply.data) for reply in rank.replies) <= 2 << 20


def test_credit_is_kept_to(feed, connect):
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    size = sum(feed.call(worker.batch, sequence).size for sequence in range(10)) // 10
    rank.grant(batches=3)
    rank.wait_batches(3)
    rank.grant(batches=3, consumed=(2 * size, 2))
    window = feed.feed._streams._streams[0].window
    wait_until(lambda: window.consumed_batches == 2, "grant taken")
    assert window.sent_batches == 3, "what is not acknowledged the feed has to keep: there is no room"
    rank.grant(batches=3, consumed=(2 * size, 2), received=3)
    rank.wait_batches(5)
    rank.grant(batches=9, size=4 * size, consumed=(2 * size, 2), received=5)
    rank.wait_batches(6)
    rank.grant(batches=0, consumed=(6 * size, 6), received=6)
    rank.grant(batches=0, size=0, consumed=(6 * size, 6), received=6)
    other = connect(feed, rank=0)  # comes later than anything that the grants brought about
    other.grant()
    other.wait_batches(4)
    assert rank.ids() == [(0, sequence) for sequence in range(6)]
    assert other.ids() == [(0, sequence) for sequence in range(6, 10)]


def test_a_broken_stream_is_taken_up_where_it_ended(feed, connect):
    worker = feed.worker()
    first, other = connect(feed, rank=0, size=2), connect(feed, rank=1, size=2)
    feed.say(assignments=[assignment(0)])
    for sequence in range(6):
        feed.call(worker.batch, sequence)
    first.grant(batches=4)
    first.wait_batches(4)
    first.send(received=1)
    wait_until(lambda: len(worker.freed) == 1, "one batch acknowledged")
    first.close()
    other.grant()
    other.wait_batches(2)
    assert other.ids() == [(0, 4), (0, 5)], "what may have arrived at a rank is given to nobody else"
    again = connect(feed, rank=0, size=2, says={"feed_id": first.feed_id, "received": 3})
    other.wait_batches(3)
    assert other.ids()[2:] == [(0, 3)]
    wait_until(lambda: len(worker.freed) == 3, "three have arrived")
    again.grant()
    other.send(received=3)
    feed.call(worker.end, 6)
    wait_until(lambda: feed.coordinator.done, "split done")
    assert again.ids() == []


def test_a_newer_stream_of_a_rank_takes_the_place_of_the_older_one(feed, connect):
    worker, old = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    feed.call(worker.batch, 0)
    old.grant()
    old.wait_batches(1)
    new = connect(feed, says={"feed_id": old.feed_id, "received": 0})
    assert "newer stream" in old.wait_refused(grpc.StatusCode.ABORTED)
    new.grant()
    new.wait_batches(1)


def test_a_feed_that_a_rank_does_not_know_starts_from_nothing(feed, connect):
    worker = feed.worker()
    rank = connect(feed, says={"feed_id": "of-its-predecessor", "received": 12})
    feed.say(assignments=[assignment(0)])
    feed.call(worker.batch, 0)
    rank.grant()
    rank.wait_batches(1)


def test_the_end_of_an_epoch_reaches_every_rank_later_ones_too(feed, connect):
    rank = connect(feed, size=2)
    assert rank.feed_id
    feed.say(epochs_ended=[0])
    feed.say(epochs_ended=[1, 0])
    late = connect(feed, rank=1, size=2)
    wait_until(lambda: rank.epoch_ends() == [0, 1], "told")
    wait_until(lambda: late.epoch_ends() == [0, 1], "told when it connects")
    feed.say(epochs_ended=range(2, 40))
    third = connect(feed, rank=1, size=2)
    third.grant(epoch=3)
    wait_until(lambda: 3 in third.epoch_ends(), "told when it asks")


def test_a_revoked_split_is_not_sent_and_its_memory_is_free(feed, connect):
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    feed.call(worker.batch, 0)
    feed.call(worker.batch, 1)
    rank.grant(batches=1)
    rank.wait_batches(1)
    feed.say(revoked=[split_id(0)], assignments=[assignment(0, attempt=2, arrived=b"\x01")])
    wait_until(lambda: not worker.memory, "memory given back")
    feed.call(worker.tasks.on_abandoned, worker)
    feed.call(worker.batch, 1)
    rank.grant(consumed=(0, 1), received=1)
    rank.wait_batches(2)
    assert [header.attempt for header, _ in rank.batches()] == [1, 2]


def test_a_deterministic_job_reads_split_by_split(make_feed, connect):
    feed = make_feed(deterministic=True)
    first, second = feed.worker("worker-0"), feed.worker("worker-1")
    feed.say(assignments=[assignment(0), assignment(1)])
    ranks = [connect(feed, rank, 2) for rank in range(2)]
    for sequence in (0, 1, 2):
        feed.call(second.batch, sequence)
    feed.call(second.end, 3)
    feed.call(first.batch, 0)
    for rank in ranks:
        rank.grant(split=0)
    ranks[0].wait_batches(1)
    feed.call(first.batch, 1)
    feed.call(first.end, 2)
    ranks[1].wait_batches(1)
    assert [rank.ids() for rank in ranks] == [[(0, 0)], [(0, 1)]]
    for rank in ranks:
        wait_until(lambda rank=rank: sorted(rank.split_ends()) == [(0, 2), (1, 3)], "ends told")
        rank.grant(split=1, received=3)
    wait_until(lambda: feed.coordinator.done_keys() == [(0, 0, 1)], "first split done")
    ranks[0].wait_batches(2)
    ranks[1].wait_batches(3)
    assert [rank.ids()[1:] for rank in ranks] == [[(1, 1)], [(1, 0), (1, 2)]]
    ranks[0].send(received=4)
    again = connect(feed, 1, 2, says={"feed_id": ranks[1].feed_id, "received": 5})
    wait_until(lambda: len(feed.coordinator.done) == 2, "second split done")
    assert again.split_ends() == []


# --- who is refused, and what harm the rest can do --------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_who_does_not_know_the_token_is_refused_before_anything_is_read(make_feed, connect, token):
    feed = make_feed(token="secret")
    said = connect(feed, token=token).wait_refused(grpc.StatusCode.UNAUTHENTICATED)
    assert "--token" in said
    assert "secret" not in said
    good = connect(feed, token="secret")
    assert good.feed_id


@pytest.mark.parametrize(
    "values",
    [{"run_id": "run-2"}, {"rank": 2}, {"rank": -1}, {"size": 3}, {"size": 0}],
    ids=["run", "rank", "negative", "size", "none"],
)
def test_a_rank_of_another_job_is_refused(feed, connect, values):
    assert connect(feed, rank=1, size=2).feed_id
    wrong = connect(feed, hello=pb.ReadHello(**{"rank": 0, "size": 2, "run_id": "run-1", **values}))
    wrong.wait_refused(grpc.StatusCode.FAILED_PRECONDITION)


def test_requests_that_make_no_sense_end_their_own_call_only(feed, connect):
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    feed.call(worker.batch, 0)
    rank.grant()
    rank.wait_batches(1)

    def refused(*requests: bytes) -> tuple[grpc.StatusCode, str]:
        with grpc.insecure_channel(feed.address) as channel:
            call = channel.stream_stream("/hetero.v1.Feed/Read", None, None)(iter(requests))
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
        return caught.value.code(), caught.value.details()

    wrong = pb.ReadRequest(hello=hello(0, 1, feed_id=rank.feed_id, received=2)).SerializeToString()
    greeting = pb.ReadRequest(hello=hello(0, 1, feed_id=rank.feed_id, received=1)).SerializeToString()
    assert refused(b"\xff\xff\xff")[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in refused(pb.ReadRequest(received=1).SerializeToString())[1]
    code, text = refused(wrong)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "2 replies have arrived, where 1 were sent" in text
    assert refused(b"\x0a" + b"\x00" * (2 << 20))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    feed.call(worker.batch, 1)
    rank.wait_batches(2)
    assert not rank.ended, "none of these were a rank's newer stream"
    assert refused(greeting, greeting)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (pb.ReadRequest(received=2), "2 replies have arrived, where 1 were sent"),
        (pb.ReadRequest(received=-1), "-1 replies"),
        (pb.ReadRequest(grant=pb.Grant(consumed_batches=2, window_batches=9)), "in 1 batches of epoch 0"),
        (pb.ReadRequest(grant=pb.Grant(consumed_bytes=1 << 40, window_batches=9)), "1099511627776"),
        (pb.ReadRequest(grant=pb.Grant(window_batches=-1)), "-1"),
        (pb.ReadRequest(grant=pb.Grant(epoch=-1)), "epoch -1"),
    ],
)
def test_a_rank_that_has_lost_count_is_told_so_and_can_come_again(feed, connect, request_, said):
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    feed.call(worker.batch, 0)
    rank.grant()
    rank.wait_batches(1)
    rank._requests.put(request_)
    assert said in rank.wait_refused(grpc.StatusCode.INVALID_ARGUMENT)
    again = connect(feed, says={"feed_id": rank.feed_id, "received": 0})
    again.grant()
    again.wait_batches(1)
    feed.call(worker.end, 1)
    again.send(received=1)
    wait_until(lambda: feed.coordinator.done, "split done")


def test_an_older_epoch_is_not_granted_after_a_newer_one(feed, connect):
    rank = connect(feed)
    rank.grant(epoch=2)
    rank.grant(epoch=1)
    assert "epoch 1 after one of epoch 2" in rank.wait_refused(grpc.StatusCode.INVALID_ARGUMENT)


def test_a_rank_that_moves_on_leaves_the_rest_of_an_epoch_to_others(feed, connect):
    worker = feed.worker()
    first, second = connect(feed, 0, 2), connect(feed, 1, 2)
    feed.say(assignments=[assignment(0)])
    first.grant()
    feed.call(worker.batch, 0)
    first.wait_batches(1)
    first.grant(epoch=1, received=1)
    wait_until(lambda: worker.freed, "heard")
    feed.call(worker.batch, 1)
    second.grant()
    second.wait_batches(1)
    assert first.ids() == [(0, 0)]


def test_ranks_that_read_nothing_or_break_off_hold_up_nobody(feed, connect):
    worker, size = feed.worker(), 4
    good = connect(feed, 0, size)
    stuck, silent = connect(feed, 1, size, reads=False), connect(feed, 2, size)
    gone = connect(feed, 3, size, reads=False)
    assert silent.feed_id
    feed.say(assignments=[assignment(0)])
    for rank in (stuck, gone):
        rank.grant(size=1 << 40)
    large = np.zeros((1, 8 << 20), dtype=np.uint8)
    streams = feed.feed._streams._streams
    for sequence in (0, 1):
        feed.call(worker.batch, sequence, large)
    wait_until(lambda: sum(stream.is_writing for stream in streams.values()) == 2, "two ranks in mid-batch")
    gone.close()
    wait_until(lambda: sorted(streams) == [0, 1, 2], "one has broken off")
    good.grant()
    for sequence in range(2, 50):
        feed.call(worker.batch, sequence)
    good.wait_batches(48)
    assert streams[1].is_writing, "the stuck one is still in the middle of its batch"
    again = connect(feed, 3, size, says={"feed_id": "", "received": 0})
    assert again.feed_id
    good.wait_batches(49)  # what `gone` had not received, whole


def test_a_hundred_idle_connections_hold_up_nobody(feed, connect, monkeypatch):
    monkeypatch.setattr(feed_server, "_HELLO_S", 0.5)
    idle = [connect(feed, hello=None) for _ in range(100)]
    worker, rank = feed.worker(), connect(feed)
    feed.say(assignments=[assignment(0)])
    rank.grant()
    for sequence in range(20):
        feed.call(worker.batch, sequence)
    rank.wait_batches(20)
    assert "no hello" in idle[0].wait_refused(grpc.StatusCode.DEADLINE_EXCEEDED)
    for call in idle[1:]:
        call.wait_refused(grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_port_that_is_taken_is_replaced_by_a_free_one(make_feed, connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        feed = make_feed(port=port)
        assert feed.port not in {0, port}
        assert connect(feed).feed_id


def test_an_address_that_cannot_be_bound_is_named(make_feed):
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1"):
        make_feed(bind="192.0.2.1")


def test_streams_are_encrypted_where_certificates_are_given(make_feed, connect, tmp_path):
    host = CertificateAuthority(tmp_path).host()
    feed = make_feed(tls=host)
    worker = feed.worker()
    feed.say(assignments=[assignment(0)])
    feed.call(worker.batch, 0)
    rank = connect(feed, channel=channel(feed.address, (), host))
    rank.grant()
    rank.wait_batches(1)
    connect(feed, channel=channel(feed.address, (), PLAIN)).wait_refused(grpc.StatusCode.UNAVAILABLE)


def test_stopping_ends_the_calls_and_may_be_repeated(feed, connect):
    rank = connect(feed)
    assert rank.feed_id
    for _ in range(2):
        asyncio.run_coroutine_threadsafe(feed.feed.stop(), feed.loop).result(10)
    rank.wait_refused(grpc.StatusCode.UNAVAILABLE)
