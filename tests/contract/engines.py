"""The engines as test_engines.py sees them: each opens the epochs of one job for a number of ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feed_cluster import FeedCluster, RankInput
from test_tf_service import Cluster as TfCluster

from hetero.control.state import JobState, Phase
from hetero.data.engine import Batch, Opener
from hetero.data.epoch import InputStream
from hetero.data.exchange import Exchange, ExchangeServer
from hetero.data.local import local_opener
from hetero.engines import DataService, TfDataOpener
from hetero.job import InputContext
from hetero.job_file import load_job

BATCH_SIZE = 8
DEADLINE_S = 40.0
SIZES = (1, 2)


_load = functools.cache(load_job)  # its classes are those of the batches, so they must be the same for all engines


@dataclass
class Seen:
    """What a rank was given.

    Attributes:
        epochs: Its batches, epoch by epoch.
        dropped_rows: What its stream says.
        error: What ended it before the end.
    """

    epochs: list[list[Batch]] = field(default_factory=list)
    dropped_rows: int = 0
    error: BaseException | None = None


class Engine:
    """Runs epochs of a job. A context manager: `ready` starts what it needs, and whatever is in `stack` is ended.

    Args:
        folder: Scratch folder.
        job: Reference to the job.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.reference = folder, job
        self.job = _load(job)
        self.stack = contextlib.ExitStack()
        self._next_epoch = 0

    def __enter__(self) -> Engine:  # noqa: PYI034 - Self needs Python 3.11
        try:
            self.ready()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def ready(self) -> None:
        """Start what is shared by all runs."""

    @contextlib.contextmanager
    def opener(self, rank: int, size: int, exchange: Exchange | None) -> Iterator[tuple[Opener, Callable[[], None]]]:
        """Give the engine's opener for a rank, and the check that its stream calls."""
        raise NotImplementedError

    def context(self, splits: tuple[Any, ...], epoch: int) -> InputContext:
        return InputContext(splits=splits, epoch=epoch, batch_size=BATCH_SIZE)

    def splits(self) -> tuple[Any, ...]:
        return tuple(self.job.list_splits(self.context((), 0)))

    def run(self, case: int, cases: int, size: int = 1, *, epochs: int = 1, **options: Any) -> list[Seen]:
        """Read epochs on all ranks.

        Args:
            case: The first epoch's number modulo `cases`; epochs grow from run to run, as those of a job do.
            cases: See there.
            size: Number of ranks.
            epochs: How many epochs.
            options: Arguments of InputStream.
        """
        first = self._next_epoch + (case - self._next_epoch) % cases
        self._next_epoch = first + epochs
        server = ExchangeServer("t", "127.0.0.1") if size > 1 else None
        found = [Seen() for _ in range(size)]
        arguments = (range(first, first + epochs), server, options)
        threads = [
            threading.Thread(target=self._rank, args=(rank, found, *arguments), daemon=True) for rank in range(size)
        ]
        deadline = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if server is not None:
            server.stop(grace_s=1.0)
        assert not hanging, f"ranks {hanging} hang\n{self.outputs()}"
        return found

    def _rank(
        self, rank: int, found: list[Seen], epochs: range, server: ExchangeServer | None, options: dict[str, Any]
    ) -> None:
        seen, size = found[rank], len(found)
        try:
            with contextlib.ExitStack() as stack:
                exchange = None
                if server is not None:
                    exchange = Exchange(f"127.0.0.1:{server.port}", rank, size, "t")
                    stack.callback(exchange.close)
                opener, check = stack.enter_context(self.opener(rank, size, exchange))
                common = {"rank": rank, "size": size, "exchange": exchange, "check": check, "epochs": epochs.stop}
                stream = InputStream(opener, BATCH_SIZE, **{**common, **options})
                stack.callback(stream.close)
                for epoch in epochs:
                    seen.epochs.append([])
                    for batch in stream.batches(epoch):
                        seen.epochs[-1].append(batch)
                seen.dropped_rows = stream.dropped_rows
        except BaseException as error:
            seen.error = error

    def outputs(self) -> str:
        """Return what its processes printed, for a failed assertion."""
        return ""


class Local(Engine):
    """Each rank runs `inputs` on its share of the splits."""

    @contextlib.contextmanager
    def opener(self, rank: int, size: int, exchange: Exchange | None) -> Iterator[tuple[Opener, Callable[[], None]]]:
        share = self.splits()[rank::size]
        yield local_opener(lambda epoch: self.job.inputs_function(self.context(share, epoch))), lambda: None


class TfData(Engine):
    """A dispatcher and a worker as real processes."""

    def ready(self) -> None:
        self.cluster = TfCluster(self.folder, workers=1)
        self.stack.callback(self.cluster.stop)
        endpoints = {"dispatcher": self.cluster.dispatcher.address}
        state = JobState(1, 0, "contract", 0.0, Phase.TRAINING, endpoints=endpoints)
        self._service = DataService(lambda: state)

    @contextlib.contextmanager
    def opener(self, rank: int, size: int, exchange: Exchange | None) -> Iterator[tuple[Opener, Callable[[], None]]]:
        splits = self.splits()

        def make(epoch: int) -> Any:
            return self.job.inputs_function(self.context(splits, epoch))

        yield TfDataOpener(make, self._service, f"contract-{size}", rank, exchange), self._service.check


class Grpc(Engine):
    """Coordinator, feeds and workers as real processes: a cluster for each number of ranks."""

    sizes = SIZES

    def ready(self) -> None:
        self.clusters: dict[int, FeedCluster] = {}
        for size in self.sizes:
            cluster = FeedCluster(
                self.folder / str(size),
                self.reference,
                data_hosts=size,
                ranks=size,
                options={"batch_size": BATCH_SIZE, "token": "t"},
            )
            self.clusters[size] = self.stack.enter_context(cluster)
        self._ranks: dict[tuple[int, int], RankInput] = {}
        for size, cluster in self.clusters.items():
            for rank in range(size):
                self._ranks[size, rank] = RankInput(cluster.config, rank, size)
                self.stack.callback(self._ranks[size, rank].close)

    @contextlib.contextmanager
    def opener(self, rank: int, size: int, exchange: Exchange | None) -> Iterator[tuple[Opener, Callable[[], None]]]:
        connected = self._ranks[size, rank]
        yield connected.opener, connected.check

    def outputs(self) -> str:
        return "\n".join(cluster.outputs() for cluster in self.clusters.values())


class GrpcAlone(Grpc):
    """One rank's cluster, for a case that ends the job."""

    sizes = (1,)


ENGINES: dict[str, type[Engine]] = {"local": Local, "tf_data": TfData, "grpc": Grpc}
DOOMED: dict[str, type[Engine]] = {**ENGINES, "grpc": GrpcAlone}
