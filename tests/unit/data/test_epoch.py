"""InputStreams of several ranks over a real exchange: equal steps, every row once, and no waiting for ever."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.data import epoch as epoch_module
from hetero.data.epoch import InputStream
from hetero.data.exchange import Exchange, ExchangeLost, ExchangeServer, PeerInputFailed, PeerLeft
from hetero.data.local import LocalSource, local_opener
from hetero.errors import DataServiceLost, HeteroError, InputError

DEADLINE_S = 20.0


def rows(start, count):
    ids = np.arange(start, start + count)
    return {
        "id": ids,
        "text": np.array([str(i).encode() for i in ids], dtype=object),
        "x": (ids[:, None].astype(np.float32),),
    }


def opener(cuts, rank=0):
    """A source that gives raw batches of the sizes cuts[epoch]; ids are unique over ranks and epochs."""

    def inputs(epoch):
        start = (rank * 10 + epoch) * 100_000
        for count in cuts[epoch]:
            yield rows(start, count)
            start += count

    return local_opener(inputs)


class Ranks:
    """Runs a function in a thread for each rank, with its stream, and keeps results and errors."""

    def __init__(self, size):
        self.server = ExchangeServer("t", "127.0.0.1")
        self.size = size
        self.results, self.errors = [None] * size, [None] * size

    def run(self, work, open_source, **options):
        def main(rank):
            exchange = Exchange(f"127.0.0.1:{self.server.port}", rank, self.size, "t")
            stream = InputStream(open_source(rank), rank=rank, size=self.size, exchange=exchange, **options)
            try:
                self.results[rank] = work(rank, stream)
            except BaseException as error:
                self.errors[rank] = error
            finally:
                stream.close()
                exchange.close()

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        deadline = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        self.server.stop(grace_s=1.0)
        assert not hanging, f"ranks {hanging} hang"
        return self.results


def take_epochs(epochs):
    def work(rank, stream):
        seen = []
        for epoch in range(epochs):
            steps = []
            for batch in stream.batches(epoch):
                assert batch.data["id"].shape == batch.mask.shape
                assert [int(text) for text in batch.data["text"]] == batch.data["id"].tolist()
                assert batch.data["x"][0].dtype == np.float32
                assert batch.rows == batch.mask.sum()
                steps.append(batch.data["id"][batch.mask].tolist())
            seen.append(steps)
        return seen, stream.dropped_rows

    return work


def check_epochs(results, cuts, batch_size, pad):
    """cuts[rank][epoch] -> raw batch sizes."""
    size, dropped = len(cuts), 0
    for epoch in range(len(cuts[0])):
        expected = {(r * 10 + epoch) * 100_000 + i for r in range(size) for i in range(sum(cuts[r][epoch]))}
        per_rank = [seen[epoch] for seen, _ in results]
        assert len({len(steps) for steps in per_rank}) == 1
        ids = [i for steps in per_rank for batch in steps for i in batch]
        assert len(ids) == len(set(ids))
        assert set(ids) <= expected
        dropped += len(expected) - len(ids)
        assert len(expected) - len(ids) == (0 if pad else len(expected) % (size * batch_size))
        assert all(len(batch) == batch_size for steps in per_rank for batch in (steps[:-1] if pad else steps))
    assert {told for _, told in results} == {dropped}


@st.composite
def uneven(draw):
    size, epochs, batch_size = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    chosen = random.Random(seed)

    def raw_sizes():
        return [chosen.randint(0, 2 * batch_size + 1) for _ in range(chosen.choice([0, 1, 3, 10, 30]))]

    cuts = [[raw_sizes() for _ in range(epochs)] for _ in range(size)]
    for epoch in range(epochs):
        cuts[chosen.randrange(size)][epoch].append(size * batch_size)  # at least one step
    return cuts, batch_size, draw(st.booleans()), draw(st.integers(1, 5))


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


@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_without_rows_says_so(size):
    ranks = Ranks(size)
    ranks.run(take_epochs(1), lambda rank: opener([[0, 0]], rank), batch_size=4)

    assert all(isinstance(error, InputError) and "Epoch 0 has no rows" in str(error) for error in ranks.errors)


def test_too_few_rows_for_a_step_name_the_options():
    ranks = Ranks(2)
    ranks.run(take_epochs(1), lambda rank: opener([[3]], rank), batch_size=4)

    for error in ranks.errors:
        assert isinstance(error, InputError)
        assert "has 6 rows over all 2 ranks" in str(error)
        assert "--batch-size" in str(error)
        assert "--remainder pad" in str(error)


def test_a_source_that_raises_reaches_its_rank_with_traceback_and_the_others_in_words():
    def failing(rank):
        def inputs(_):
            yield rows(0, 8)
            if rank == 1:
                raise OSError("disk is gone")
            for i in range(10_000):
                yield rows(i, 8)

        return local_opener(inputs)

    ranks = Ranks(3)
    ranks.run(take_epochs(1), failing, batch_size=4)

    assert isinstance(ranks.errors[1], OSError)
    assert 'raise OSError("disk is gone")' in "".join(traceback.format_exception(ranks.errors[1]))
    for rank in (0, 2):
        assert isinstance(ranks.errors[rank], PeerInputFailed)
        assert "Rank 1 cannot go on: OSError: disk is gone" in str(ranks.errors[rank])


def test_a_change_of_structure_names_the_path():
    stream = InputStream(local_opener(lambda _: [{"x": np.zeros(2)}, {"x": np.zeros(2), "y": np.zeros(2)}]), 2)

    with pytest.raises(InputError, match=r"batch\['y'\]"):
        list(stream.batches(0))
    stream.close()


def test_components_that_disagree_name_the_path():
    stream = InputStream(local_opener(lambda _: [{"x": np.zeros(2), "y": np.zeros(3)}]), 2)

    with pytest.raises(InputError, match=r"batch\['y'\] has 3 rows"):
        list(stream.batches(0))
    stream.close()


def test_an_object_that_cannot_be_given_away_fails_on_both_ranks():
    def source(rank):
        return local_opener(lambda _: [{"x": np.array([{1}, {2}], dtype=object)}] * (4 if rank == 0 else 0))

    ranks = Ranks(2)
    ranks.run(lambda _, stream: list(stream.batches(0)), source, batch_size=2)

    assert isinstance(ranks.errors[0], InputError)
    assert r"batch['x']" in str(ranks.errors[0])
    assert isinstance(ranks.errors[1], PeerInputFailed)


def test_check_is_called_while_waiting_and_may_raise():
    release = threading.Event()

    def inputs(_):
        release.wait(DEADLINE_S)
        yield np.zeros(2)

    def check():
        raise KeyError("lease")

    stream = InputStream(local_opener(inputs), 2, check=check)
    start = time.monotonic()
    with pytest.raises(KeyError, match="lease"):
        next(stream.batches(0))
    assert time.monotonic() - start < 1.0
    release.set()
    stream.close()


class StuckSource(LocalSource):
    """Gives one batch, then nothing more although it has not ended."""

    def __init__(self):
        super().__init__([np.zeros(2)])
        self.closed = threading.Event()

    def __iter__(self):
        yield np.zeros(2)
        self.closed.wait(DEADLINE_S)

    def is_stuck(self, *, ended_elsewhere):
        return True

    def close(self):
        self.closed.set()


def test_a_stuck_source_ends_the_epoch_with_what_came(capsys):
    def source(rank):
        return (lambda _: StuckSource()) if rank == 1 else local_opener(lambda _: [np.zeros(2)] * 101)

    ranks = Ranks(2)
    ranks.run(lambda _, stream: len(list(stream.batches(0))), source, batch_size=2)

    assert ranks.errors == [None, None]
    assert ranks.results == [51, 51]
    assert "without an end" in capsys.readouterr().out


class DeafSource(StuckSource):
    """Does not wake when it is closed."""

    def close(self):
        pass


def test_a_stuck_source_that_cannot_be_woken_is_data_service_lost_here_and_has_its_exit_code_elsewhere(monkeypatch):
    monkeypatch.setattr(epoch_module, "_CUT_S", 0.2)
    deaf = DeafSource()

    def source(rank):
        return (lambda _: deaf) if rank == 1 else local_opener(lambda _: [np.zeros(2)] * 100)

    ranks = Ranks(2)
    try:
        ranks.run(lambda _, stream: list(stream.batches(0)), source, batch_size=2)
    finally:
        deaf.closed.set()

    assert isinstance(ranks.errors[1], DataServiceLost)
    assert ranks.errors[0].exit_code == DataServiceLost.exit_code


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


def test_a_rank_that_stops_alone_is_named_to_those_who_wait():
    def work(rank, stream):
        for step, _ in enumerate(stream.batches(0)):
            if rank == 1 and step == 2:
                return

    ranks = Ranks(2)
    ranks.run(work, lambda rank: opener([[4] * 100], rank), batch_size=4)

    assert "Rank 1 left epoch 0 after 3 steps" in str(ranks.errors[0])
    assert isinstance(ranks.errors[0], PeerLeft)


def test_the_end_of_the_exchange_is_an_error_not_a_hang():
    ranks = Ranks(2)
    stopped = threading.Event()

    def source(rank):
        def inputs(_):
            yield rows(0, 4)
            if rank == 0:
                stopped.wait(DEADLINE_S)
            yield rows(4, 4)

        return local_opener(inputs)

    def work(rank, stream):
        for _ in stream.batches(0):
            if rank == 0:
                ranks.server.stop(grace_s=0.0)
                stopped.set()

    ranks.run(work, source, batch_size=4)

    assert isinstance(ranks.errors[1], ExchangeLost)


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
from test_epoch import opener, take_epochs
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
