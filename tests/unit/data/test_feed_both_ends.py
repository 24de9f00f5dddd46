"""The rank's client against the data host's server: each batch at one rank, through streams that break."""

from __future__ import annotations

import os

import pytest
from certificates import CertificateAuthority
from fake_feed import Rank, threads_of_feeds, until
from feed_parts import assignment
from feed_serving import FeedThread
from test_feed_client import in_thread, read

from hetero.data.feed_server import FeedConfig

SPLITS, BATCHES = 6, 25


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    until(lambda: not threads_of_feeds(), "for the client's threads to end")


@pytest.fixture
def make_feed(request):
    running = []

    def make(**values):
        name = f"hetero-test-{os.getpid()}-{request.node.name}-{len(running)}"
        config = FeedConfig("data-1", "run-1", name, b"secret", "127.0.0.1", **values)
        running.append(FeedThread(config))
        return running[-1]

    yield make
    for feed in running:
        feed.stop()


def finish(feed, splits):
    """Have a worker prepare these splits of epoch 0."""
    worker = feed.worker()
    for split in splits:
        feed.say(assignments=[assignment(split)])
        for sequence in range(BATCHES):
            feed.call(worker.batch, sequence)
        feed.call(worker.end, BATCHES)
    return worker


def all_done(feeds):
    return lambda: sum(len(feed.coordinator.done_keys()) for feed in feeds) == SPLITS


@pytest.mark.parametrize("prefetch_bytes", [500, 1 << 20])
def test_two_ranks_share_what_two_feeds_have_and_streams_that_break_lose_nothing(make_feed, prefetch_bytes):
    feeds = [make_feed(), make_feed()]
    workers = [finish(feed, range(number, SPLITS, 2)) for number, feed in enumerate(feeds)]
    addresses = {f"data-{number}": feed.address for number, feed in enumerate(feeds)}
    with (
        Rank(addresses, 0, 2, prefetch_bytes=prefetch_bytes) as zero,
        Rank(addresses, 1, 2, prefetch_bytes=prefetch_bytes) as one,
    ):
        clients = zero, one
        broken = []
        results = []
        for client in clients:
            until(lambda client=client: len(client._links) == 2 and all(link._call for link in client._links.values()))
            results.append(in_thread(lambda client=client: read(client.open(0))))
        while not all_done(feeds)():
            before = sum(client.stats().batches for client in clients)
            until(lambda before=before: all_done(feeds)() or sum(c.stats().batches for c in clients) >= before + 12)
            for client in clients:
                link = client._links[f"data-{len(broken) % 2}"]
                if len(broken) < 12 and link._call is not None:
                    link._call.cancel()
                    broken.append(link)
        assert broken
        until(lambda: sum(len(worker.freed) for worker in workers) == SPLITS * BATCHES)
        for feed in feeds:
            feed.say(epochs_ended=[0])
        zero.on_epoch_end(0)  # the other hears of it from the feeds

        taken = [result() for result in results]
    assert sorted([*taken[0], *taken[1]]) == [(0, split, q) for split in range(SPLITS) for q in range(BATCHES)]
    assert all(taken)


def test_deterministic_ranks_read_their_own_in_order(make_feed):
    feeds = [make_feed(deterministic=True), make_feed(deterministic=True)]
    for number, feed in enumerate(feeds):
        finish(feed, range(number, SPLITS, 2))
    addresses = {f"data-{number}": feed.address for number, feed in enumerate(feeds)}
    with (
        Rank(addresses, 0, 2, deterministic=True, prefetch_bytes=500) as zero,
        Rank(addresses, 1, 2, deterministic=True, prefetch_bytes=500) as one,
    ):
        results = [in_thread(lambda client=client: read(client.open(0))) for client in (zero, one)]
        until(lambda: zero.stats().batches > 20)
        zero._links["data-0"]._call.cancel()
        until(all_done(feeds))
        for feed in feeds:
            feed.say(epochs_ended=[0])

        for rank, result in enumerate(results):
            own = [(0, s, q) for s in range(SPLITS) for q in range(BATCHES) if (s + q) % 2 == rank]
            assert result() == own


def test_over_tls_and_a_certificate_of_another_authority_is_named_at_once(make_feed, tmp_path, capsys):
    host = CertificateAuthority(tmp_path).host()
    feed = make_feed(tls=host)
    finish(feed, [0])
    stranger = CertificateAuthority(tmp_path, "other").host()
    with (
        Rank({"data-1": feed.address}, tls=stranger),
        Rank({"data-1": feed.address}, tls=host) as client,
    ):
        source = iter(client.open(0))
        assert next(source)["id"][0].tolist() == [0, 0, 0]
        said = []
        until(lambda: said.append(capsys.readouterr().out) or any("not signed by --tls-ca" in text for text in said))
