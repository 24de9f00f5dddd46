"""The split service with real gRPC between it and its clients."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from control_running import DEADLINE_S, free_port, wait_until
from split_peers import Peers

from hetero._proto import splits_pb2 as pb
from hetero._proto.splits_pb2_grpc import SplitsStub
from hetero.control.split_serve import MAX_LIST_BYTES
from hetero.control.state import HostReport, Outcome, ProcessReport


@pytest.fixture
def peers() -> Iterator[Peers]:
    started = Peers()
    yield started
    started.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "hetero-follow"]


@pytest.fixture
def call() -> Iterator[Callable[..., object]]:
    """Begin a call of the service by hand."""
    channels = []

    def begin(address: str, method: str, *requests: object, token: str | None = None, keep_open: bool = False):
        channels.append(grpc.insecure_channel(address))
        done = threading.Event()
        ends.append(done)

        def say() -> Iterator[bytes]:
            for request in requests:
                yield request if isinstance(request, bytes) else request.SerializeToString()
            if keep_open:
                done.wait(DEADLINE_S)

        metadata = () if token is None else (("x-hetero-token", token),)
        kind = {"Serve": pb.ServeReply, "Follow": pb.FollowReply}[method]
        return channels[-1].stream_stream(f"/hetero.v1.Splits/{method}", response_deserializer=kind.FromString)(
            say(), metadata=metadata, timeout=DEADLINE_S
        )

    ends: list[threading.Event] = []
    yield begin
    for end in ends:
        end.set()
    for channel in channels:
        channel.close()


def serve_hello(host: str = "d1") -> pb.ServeRequest:
    return pb.ServeRequest(hello=pb.ServeHello(host=host, feed_id="x"))


def follow_hello(rank: int = 0, size: int = 1, run_id: str = "run-1", **fields: object) -> pb.FollowRequest:
    return pb.FollowRequest(hello=pb.FollowHello(rank=rank, size=size, run_id=run_id), **fields)


def test_an_epoch_is_listed_handed_out_done_and_over(start_coordinator, peers, make_client):
    server = start_coordinator(splits=True)
    feed, rank = peers.feed(server.address), peers.rank(server.address)
    rank.follower.begin(0)
    rank.follower.begin(0)
    feed.finish(0, 0)
    feed.finish(0, 1)
    wait_until(lambda: rank.ended == [0] and feed.ended == [0], "the end of the epoch")
    assert [one.value for one in feed.taken] == ['"a"', '"b"']
    assert feed.listed == 1
    client = make_client(server.address)

    def input_state() -> pb.InputState:
        state = client.input_state()
        assert state is not None
        return state

    wait_until(lambda: input_state().hosts[0].stats.waiting_batches == 4 and input_state().ranks, "the figures")
    state = input_state()
    assert (state.splits, state.replayed_batches) == (2, 2)
    assert (state.epochs[0].done, state.epochs[0].batches, state.epochs[0].ended) == (2, 10, True)
    assert [(host.host, host.connected) for host in state.hosts] == [("d1", True), ("d2", False)]
    assert (state.ranks[0].rank, state.ranks[0].rows) == (0, 640)
    client.watch()
    wait_until(lambda: client.state is not None and client.state.replayed_batches == 2, "the total in the job's state")


def test_a_job_of_another_engine_has_no_splits(start_coordinator, make_client):
    assert make_client(start_coordinator().address).input_state() is None


@pytest.mark.parametrize("journal", ["kept", "lost", "garbage"])
def test_streams_resume_when_the_coordinator_was_killed_and_nothing_is_handed_out_twice(
    spawn_coordinator, peers, make_client, tmp_path, journal
):
    port = free_port()
    address = f"127.0.0.1:{port}"
    first = spawn_coordinator(port=port, splits=True, data=("d1",))
    first.wait_ready()
    feed, rank = peers.feed(address, workers=2, values=[f'"{i}"' for i in range(5)]), peers.rank(address)
    rank.follower.begin(0)
    feed.finish(0, 0)
    wait_until(lambda: len(feed.held) == 2, "two splits in hand")
    rank.highest = max(one.id.attempt for one in feed.taken)
    first.end(signal.SIGKILL)
    assert first.exit_code == -signal.SIGKILL
    feed.finish(0, 1)  # while nobody hears it
    feed.finish(0, 2)
    if journal == "lost":
        for path in tmp_path.glob("*.json"):
            path.unlink()
    elif journal == "garbage":
        (tmp_path / "splits.json").write_text('{"run_id": "run-1", "values": 7')
    rank.follower.begin(1)
    spawn_coordinator(port=port, splits=True, data=("d1",)).wait_ready()
    for split in (3, 4):
        feed.finish(0, split)
    wait_until(lambda: rank.ended == [0], "the end of the epoch")
    assert [one.id.split for one in feed.taken[:5]] == [0, 1, 2, 3, 4]
    assert feed.hellos > 1
    assert len({one.id.attempt for one in feed.taken}) == len(feed.taken)
    for split in range(5):
        feed.finish(1, split)
    wait_until(lambda: rank.ended == [0, 1], "the end of the next epoch")
    state = make_client(address).input_state()
    assert state is not None
    assert [epoch.done for epoch in state.epochs if not epoch.ended or epoch.epoch == 1] == [5]


def test_a_lost_hosts_split_goes_to_another_with_what_has_arrived(start_coordinator, peers, make_client):
    server = start_coordinator(splits=True)
    for name in ("d1", "d2"):
        make_client(server.address, name).register(HostReport(workers_alive=1), DEADLINE_S)
    lost = peers.feed(server.address, "d2", values=['"a"'])
    ranks = [peers.rank(server.address, number, 2) for number in range(2)]
    for rank in ranks:
        rank.follower.begin(0)
    wait_until(lambda: lost.held, "a split in hand")
    ranks[1].arrived[0, 0] = b"\x06"
    other = peers.feed(server.address, "d1")
    make_client(server.address, "d2").leave("its machine is needed elsewhere")
    wait_until(lambda: other.taken, "the split at the other host")
    assert other.taken[0].arrived == b"\x06"
    attempt = lost.taken[0].id.attempt
    assert all(any(floor >= attempt for _, floor, _ in rank.fences) for rank in ranks)
    assert other.taken[0].id.attempt > max(floor for rank in ranks for _, floor, _ in rank.fences)
    wait_until(lambda: [key.attempt for key in lost.revoked] == [attempt], "the word that it is lost")
    other.finish(0, 0)
    wait_until(lambda: all(rank.ended == [0] for rank in ranks), "the end of the epoch")


def test_a_rank_whose_process_has_ended_is_not_waited_for(start_coordinator, peers, make_client):
    server = start_coordinator(splits=True)
    feed, rank = peers.feed(server.address, values=['"a"']), peers.rank(server.address, 0, 2)
    rank.follower.begin(0)
    trainer = make_client(server.address, "t1")
    trainer.register(HostReport(ranks=2, processes=(ProcessReport("rank-1", 9, "running"),)), DEADLINE_S)
    wait_until(lambda: feed.hellos and make_client(server.address).input_state().epochs, "everybody")
    assert not feed.taken
    trainer.register(HostReport(ranks=2, processes=(ProcessReport("rank-1", 9, "succeeded"),)), DEADLINE_S)
    wait_until(lambda: feed.taken, "a split in hand")


def test_an_epoch_that_all_ranks_leave_is_taken_from_the_feeds(start_coordinator, peers):
    server = start_coordinator(splits=True)
    feed, rank = peers.feed(server.address), peers.rank(server.address)
    rank.follower.begin(0)
    wait_until(lambda: feed.held, "a split in hand")
    rank.follower.leave(0)
    wait_until(lambda: feed.revoked and feed.ended == [0] and rank.ended == [0], "the end of the epoch")


def test_a_bad_split_ends_the_job_with_its_cause(start_coordinator, peers, make_client):
    server = start_coordinator(splits=True)
    feed, rank = peers.feed(server.address), peers.rank(server.address)
    rank.follower.begin(0)
    wait_until(lambda: feed.taken, "a split in hand")
    cause = json.dumps({"process": "worker-0", "exception": "ValueError", "message": "odd"})
    feed.say(pb.ServeRequest(bad=[pb.SplitBad(id=feed.taken[0].id, batches=1, cause_json=cause)]))
    state = make_client(server.address).wait_for(lambda state: state.ended, DEADLINE_S, "the end")
    assert state.outcome is Outcome.FAILED
    assert state.failure is not None
    assert state.failure.describe() == "ValueError: odd (worker-0 on d1)"


def test_a_bad_split_that_is_skipped_is_counted_and_named(start_coordinator, peers, make_client):
    server = start_coordinator(splits=True, bad_split="skip")
    feed, rank = peers.feed(server.address, values=['"a"']), peers.rank(server.address)
    rank.follower.begin(0)
    wait_until(lambda: feed.taken, "a split in hand")
    cause = json.dumps({"host": "d1", "process": "worker-0", "time_s": 1.0, "message": "odd"})
    feed.say(pb.ServeRequest(bad=[pb.SplitBad(id=feed.taken[0].id, batches=1, cause_json=cause)]))
    wait_until(lambda: rank.ended == [0], "the end of the epoch")
    state = make_client(server.address).wait_for(lambda state: state.skipped_splits == 1, DEADLINE_S, "the total")
    assert not state.ended
    skipped = make_client(server.address).input_state().skipped[0]
    assert (skipped.value, skipped.cause) == ('"a"', "odd (worker-0 on d1)")


@pytest.mark.parametrize("how", ["the job's code", "size"])
def test_a_list_of_splits_that_cannot_be_had_ends_the_job(start_coordinator, peers, make_client, how):
    server = start_coordinator(splits=True)
    feed = peers.feed(server.address, workers=0)
    if how == "size":
        message, listed = "splits takes 16 MB", pb.SplitList(values=["x" * (MAX_LIST_BYTES // 2)] * 2 + ["x" * 300_000])
    else:
        message, listed = "no such bucket", pb.SplitList(cause_json=json.dumps({"message": "no such bucket"}))
    wait_until(lambda: feed.hellos, "the first hello")
    feed.say(pb.ServeRequest(list=listed))
    state = make_client(server.address).wait_for(lambda state: state.ended, DEADLINE_S, "the end")
    assert message in str(state.cause)
    assert state.cause["host"] == "d1"


def test_a_newer_stream_of_a_peer_takes_the_place_of_the_older(start_coordinator, call):
    server = start_coordinator(splits=True)
    for method, hello in (("Serve", serve_hello()), ("Follow", follow_hello())):
        older = call(server.address, method, hello, keep_open=True)
        assert next(older).welcome
        newer = call(server.address, method, hello, keep_open=True)
        assert next(newer).welcome
        assert list(older) == []
        assert newer.is_active()


REFUSED = [
    ("Serve", serve_hello("d9"), grpc.StatusCode.NOT_FOUND, "'d9' is no host of this job; it has d1, d2, t1"),
    ("Serve", b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "cannot be read"),
    ("Serve", None, grpc.StatusCode.INVALID_ARGUMENT, "before its hello"),
    ("Follow", b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "cannot be read"),
    ("Follow", follow_hello(begun=[-1]), grpc.StatusCode.INVALID_ARGUMENT, "no epoch -1"),
    ("Follow", follow_hello(rank=2, size=2), grpc.StatusCode.FAILED_PRECONDITION, "rank 2 of 2"),
    ("Follow", follow_hello(run_id="run-0"), grpc.StatusCode.FAILED_PRECONDITION, "'run-0' came to run 'run-1'"),
]


@pytest.mark.parametrize("refusal", REFUSED)
def test_whoever_makes_no_sense_is_told_why(start_coordinator, call, refusal):
    method, hello, code, text = refusal
    stream = call(start_coordinator(splits=True).address, method, *([] if hello is None else [hello]))
    with pytest.raises(grpc.RpcError) as refused:
        list(stream)
    assert refused.value.code() is code
    assert text in refused.value.details()


def test_a_later_request_that_makes_no_sense_ends_the_stream(start_coordinator, call):
    server = start_coordinator(splits=True)
    negative = pb.ServeRequest(done=[pb.SplitDone(id=pb.SplitId(epoch=0, split=-4))])
    with pytest.raises(grpc.RpcError, match="no split -4 of epoch 0"):
        list(call(server.address, "Serve", serve_hello(), negative))
    stream = call(server.address, "Follow", follow_hello(), keep_open=True)
    assert next(stream).welcome
    with pytest.raises(grpc.RpcError, match="rank 0 of 2 is not part of this job, which has 1 ranks"):
        list(call(server.address, "Follow", follow_hello(size=2)))


@pytest.mark.parametrize("token", [None, "wrong"])
def test_nothing_is_read_from_whoever_has_not_the_token(start_coordinator, call, token):
    server = start_coordinator(splits=True, token="secret")
    for method in ("Serve", "Follow"):
        with pytest.raises(grpc.RpcError) as refused:
            list(call(server.address, method, b"\xff\xff", token=token))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        SplitsStub(channel).GetInput(pb.GetInputRequest(), timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert next(call(server.address, "Serve", serve_hello(), token="secret")).welcome
