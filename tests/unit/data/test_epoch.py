"""InputStreams of several ranks over a real exchange: equal steps, every row once, and no waiting for ever."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from epoch_ranks import DEADLINE_S, Ranks, check_epochs, opener, take_epochs, uneven
from hypothesis import given, settings

from hetero.data.epoch import InputStream
from hetero.data.local import local_opener
from hetero.errors import HeteroError


@settings(max_examples=25, deadline=None)
@given(uneven())
def test_every_row_comes_once_and_all_ranks_take_the_same_steps(case):
    cuts, batch_size, pad, prefetch = case
    ranks = Ranks(len(cuts))

    results = ranks.run(
        take_epochs(len(cuts[0])),
        lambda rank: opener(cuts[rank], rank),
        batch_size=batch_size,
        remainder="pad" if pad else "drop",
        prefetch_batches=prefetch,
        epochs=len(cuts[0]),
    )

    assert ranks.errors == [None] * len(cuts)
    check_epochs(results, cuts, batch_size, pad)


def test_a_rank_without_input_is_given_all_its_batches():
    cuts = [[[4] * 100], [[]], [[]]]
    ranks = Ranks(3)

    results = ranks.run(take_epochs(1), lambda rank: opener(cuts[rank], rank), batch_size=4, prefetch_batches=1)

    assert ranks.errors == [None] * 3
    check_epochs(results, cuts, 4, pad=False)
    assert [len(seen[0]) for seen, _ in results] == [33, 33, 33]


def test_one_rank_needs_no_exchange():
    stream = InputStream(opener([[3, 0, 9, 1], [5]]), 4, remainder="pad", epochs=2)

    first = [(batch.data["id"].tolist(), batch.mask.tolist(), batch.rows) for batch in stream.batches(0)]
    second = [(batch.data["id"].tolist(), batch.rows) for batch in stream.batches(1)]
    stream.close()

    assert [ids for ids, _, _ in first] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 12, 12, 12]]
    assert first[-1][1:] == ([True, False, False, False], 1)
    assert second == [([100_000, 100_001, 100_002, 100_003], 4), ([100_004] * 4, 1)]


def test_exact_batches_are_not_copied():
    arrays = [np.zeros((4, 3)) for _ in range(10)]
    stream = InputStream(local_opener(lambda _: arrays), 4)

    taken = list(stream.batches(0))
    stream.close()

    assert [batch.data is array for batch, array in zip(taken, arrays, strict=True)] == [True] * 10
    assert taken[0].mask is taken[1].mask


def test_read_ahead_is_bounded():
    given, asked = [], threading.Semaphore(0)

    def inputs(_):
        for i in range(50):
            given.append(i)
            asked.release()
            yield np.full(2, i)

    stream = InputStream(local_opener(inputs), 2, prefetch_batches=3)
    iterator = stream.batches(0)
    next(iterator)
    for _ in range(5):
        assert asked.acquire(timeout=DEADLINE_S)
    assert not asked.acquire(timeout=0.2)
    assert len(given) == 5  # one taken, three ahead, one in the reader's hand
    stream.close()


def test_what_is_given_away_is_bounded_while_nobody_consumes():
    given = []
    done = threading.Barrier(2)

    def source(rank):
        def inputs(_):
            for i in range(1000 if rank == 0 else 0):
                given.append(i)
                yield np.full(2, i)

        return local_opener(inputs)

    def work(rank, stream):
        iterator = stream.batches(0)
        next(iterator)
        done.wait(DEADLINE_S)
        before, quiet_s = -1, 0.3
        while before != len(given):
            before = len(given)
            assert not threading.Event().wait(quiet_s)
        done.wait(DEADLINE_S)
        return before

    ranks = Ranks(2)
    ranks.run(work, source, batch_size=2, prefetch_batches=3)

    assert ranks.errors == [None, None]
    # One step taken, at most prefetch steps (2 batches each) on their way, prefetch batches held, one in hand.
    assert len(given) <= 2 + 2 * 3 + 3 + 2


def test_the_next_epoch_is_opened_before_this_one_is_consumed():
    opened = threading.Event()

    def inputs(epoch):
        if epoch == 1:
            opened.set()
        return [np.zeros(2)] * 2

    stream = InputStream(local_opener(inputs), 2, epochs=2)
    iterator = stream.batches(0)
    next(iterator)

    assert opened.wait(DEADLINE_S)
    stream.close()


def test_stopping_early_on_all_ranks_is_allowed():
    cuts = [[[4] * 50, [4] * 5], [[4] * 3, [4] * 5]]

    def work(rank, stream):
        for step, _ in enumerate(stream.batches(0)):
            if step == 9:
                break
        return sum(1 for _ in stream.batches(1))

    ranks = Ranks(2)
    ranks.run(work, lambda rank: opener(cuts[rank], rank), batch_size=4, epochs=2)

    assert ranks.errors == [None, None]
    assert ranks.results == [5, 5]


def test_an_epoch_is_read_once_and_in_order():
    stream = InputStream(local_opener(lambda _: [np.zeros(2)]), 2)
    first = stream.batches(1)
    for epoch in (0, 1):
        with pytest.raises(HeteroError, match=f"Epoch {epoch} was begun before"):
            stream.batches(epoch)
    stream.close()
    with pytest.raises(HeteroError, match="closed"):
        next(first)
    with pytest.raises(HeteroError, match="closed"):
        stream.batches(2)


def test_close_ends_the_generator_and_leaves_no_thread():
    before = set(threading.enumerate())
    ended = threading.Event()

    def inputs(_):
        try:
            while True:
                yield np.zeros(2)
        finally:
            ended.set()

    stream = InputStream(local_opener(inputs), 2)
    next(stream.batches(0))
    stream.close()
    stream.close()

    assert ended.wait(DEADLINE_S)
    assert set(threading.enumerate()) == before


def test_a_source_that_blocks_does_not_keep_close():
    release = threading.Event()
    stream = InputStream(local_opener(lambda _: iter(lambda: release.wait(DEADLINE_S), True)), 2)
    iterator = stream.batches(0)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 2.0
    release.set()
    del iterator


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="need an exchange"):
        InputStream(local_opener(lambda _: []), 2, 0, 2)
    with pytest.raises(ValueError, match="remainder='keep'"):
        InputStream(local_opener(lambda _: []), 2, remainder="keep")


PROCESS = """
import json, sys
from hetero.data.epoch import InputStream
from hetero.data.exchange import Exchange, ExchangeServer
sys.path.insert(0, sys.argv[1])
from epoch_ranks import opener, take_epochs
rank, size = int(sys.argv[2]), int(sys.argv[3])
server = None
if rank == 0:
    server = ExchangeServer("t", "127.0.0.1")
    print(server.port, flush=True)
port = server.port if server else int(sys.argv[4])
cuts = json.loads(sys.stdin.read())
exchange = Exchange(f"127.0.0.1:{port}", rank, size, "t")
stream = InputStream(opener(cuts[rank], rank), 8, rank, size, exchange, remainder="pad", epochs=len(cuts[0]))
print(json.dumps(take_epochs(len(cuts[0]))(rank, stream)), flush=True)
stream.close()
exchange.close()
if server:
    server.stop()
"""


def test_three_processes():
    chosen = random.Random(5)
    cuts = [[[chosen.randint(0, 20) for _ in range(n)] for _ in range(2)] for n in (60, 3, 25)]

    def start(rank, *more):
        argv = [sys.executable, "-c", PROCESS, str(__file__).rpartition("/")[0], str(rank), "3", *more]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = start(0)
    children = [first]
    try:
        port = first.stdout.readline().strip()
        children += [start(rank, port) for rank in (1, 2)]
        for child in children:
            child.stdin.write(json.dumps(cuts))
            child.stdin.close()
        outputs = [child.stdout.read() for child in children]
        codes = [child.wait(DEADLINE_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()

    assert codes == [0, 0, 0]
    check_epochs([json.loads(text) for text in outputs], cuts, 8, pad=True)
