"""What ends an epoch early, on which rank it is told, and with which words."""

from __future__ import annotations

import threading
import time
import traceback

import numpy as np
import pytest
from epoch_ranks import DEADLINE_S, Ranks, opener, rows, take_epochs

from hetero.data import epoch as epoch_module
from hetero.data.epoch import InputStream
from hetero.data.exchange import ExchangeLost, PeerInputFailed, PeerLeft
from hetero.data.local import LocalSource, local_opener
from hetero.errors import DataServiceLost, InputError


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
