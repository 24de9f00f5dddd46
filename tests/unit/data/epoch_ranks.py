"""Ranks in threads over a real exchange, each with its InputStream, and what every epoch must be."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
from hypothesis import strategies as st

from hetero.data.epoch import InputStream
from hetero.data.exchange import Exchange, ExchangeServer
from hetero.data.local import local_opener

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
