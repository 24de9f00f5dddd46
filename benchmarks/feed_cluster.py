"""The `grpc` engine with real processes and without launchers: coordinator, feeds and workers of virtual data hosts.

FeedCluster starts `python -m hetero.children coordinator|feed|feed-worker` as a launcher would, keeps them alive as one
would, and does to them what may befall them: SIGKILL of one process or of a whole host. The hosts' leases are kept in
this process. RankInput is what a rank has of the engine: in threads here (`FeedCluster.run`), or in its own process.

Used by the benchmarks and by tests/contract.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from feed_hosts import START_S, DataHost, Kept
from virtual_hosts import BenchmarkFailed, clean_environment

from hetero.clusters.local import LOOPBACK, free_port
from hetero.control.client import ControlClient
from hetero.control.state import HostReport, Phase
from hetero.data.epoch import InputStream
from hetero.data.exchange import Exchange, ExchangeServer
from hetero.engines import DataService, FeedOpener
from hetero.errors import PeerNeverCame
from hetero.host import HostConfig, feed_key, worker_key
from hetero.settings import Settings
from hetero.topology import Host, Role, Topology

LEASE_S = 5.0
HOPELESS_DEATHS = 3
TRAINER = "trainer-1"
_Result = TypeVar("_Result")


class RankInput:
    """What a rank has of the engine. `close` ends it.

    Args:
        config: The trainer host's configuration.
        rank, size: This rank and how many there are.
        exchange: "host:port" of the ranks' exchange, None if there is one rank.

    Attributes:
        opener: The engine as an InputStream wants it.
        check: Raises what ended the job.
        control: A client of the coordinator.
    """

    def __init__(self, config: HostConfig, rank: int, size: int, exchange: str | None = None) -> None:
        self._settings, self.rank, self.size = config.settings, rank, size
        self.control = config.connect()
        service = DataService(lambda: self.control.state)
        self.check = service.check
        self._exchange: Exchange | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.control.close)
            state = self.control.wait_for(lambda state: state.phase is Phase.TRAINING, START_S, "a data host")
            self.check()
            self.opener = FeedOpener(
                config, service, state.run_id, rank, size, coordinator=lambda: self.control.address
            )
            undo.callback(self.opener.close)
            if exchange is not None:
                self._exchange = Exchange(exchange, rank, size, config.settings.token)
                undo.callback(self._exchange.close)
            self._undo = undo.pop_all()

    @contextlib.contextmanager
    def stream(self, **options: Any) -> Iterator[InputStream]:
        """Give an InputStream as hetero.rank makes it, closed behind the block.

        Args:
            options: Arguments of InputStream that differ from a rank's.
        """
        settings = self._settings
        usual: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "remainder": settings.remainder,
            "prefetch_bytes": settings.prefetch_bytes // 2,  # the other half is what the feeds may send ahead
            "ordered": settings.deterministic,
            "check": self.check,
        }
        common: dict[str, Any] = {"rank": self.rank, "size": self.size, "exchange": self._exchange}
        stream = InputStream(self.opener, **common, **{**usual, **options})
        try:
            yield stream
        finally:
            stream.close()

    def close(self) -> None:
        """End connections and threads; may be repeated."""
        self._undo.close()


class FeedCluster:
    """A running `grpc` engine. A context manager: leaving it kills every process that it has started.

    Args:
        folder: Scratch folder: the run's, and logs/<host>/<process>.log.
        job: `path/to/job.py:name`.
        data_hosts: Number of data hosts: data-1 (with the coordinator), data-2 and so on.
        workers: Number of workers on each of them, or one number a host.
        ranks: Number of ranks.
        options: Fields of Settings.
        environment: Variables for all processes.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        *,
        data_hosts: int = 2,
        workers: int | Sequence[int] = 1,
        ranks: int = 1,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self._workers = [workers] * data_hosts if isinstance(workers, int) else list(workers)
        self._environment = {**clean_environment(), **(environment or {})}
        port = free_port()
        data = tuple(Host(f"data-{n}", Role.DATA, "data_group", LOOPBACK) for n in range(1, data_hosts + 1))
        trainer = Host(TRAINER, Role.TRAINER, "dnn_group", LOOPBACK)
        settings = {"lease_s": LEASE_S, "start_timeout_s": START_S, **(options or {})}
        self.config = HostConfig(
            settings=Settings(job=job, engine="grpc", control_port=port, **settings),
            topology=Topology(trainer, data, (trainer,), "lo", "feed_cluster"),
            engine="grpc",
            job_name=job.rpartition(":")[2],
            run_dir=str(folder / "run"),
            run_id=uuid.uuid4().hex,
            control_address=f"{LOOPBACK}:{port}",
            started_s=time.time(),
        )
        self.hosts: dict[str, DataHost] = {}
        self._trainer: ControlClient | None = None
        self._exchange: ExchangeServer | None = None

    def __enter__(self) -> FeedCluster:  # noqa: PYI034 - Self needs Python 3.11
        try:
            for host in self.config.topology.data:
                self.config.run().work(host.name).mkdir(parents=True, exist_ok=True)
                self._start(host.name)
            for data_host in self.hosts.values():
                data_host.join_job()
            trainer = self._trainer = self.config.connect()
            report = HostReport(ranks=self.ranks)
            trainer.register(report, START_S)
            trainer.start_lease(lambda: report, lambda _silent_s: None)
            if self.ranks > 1:
                self._exchange = ExchangeServer(self.config.settings.token, LOOPBACK)
            self._wait_for({feed_key(name) for name in self.hosts}, "Every feed")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, name: str) -> None:
        index = [host.name for host in self.config.topology.data].index(name)
        config = replace(self.config, topology=self.config.topology.seen_from(name))
        port = self.config.settings.control_port if index == 0 else None
        self.hosts[name] = DataHost(config, self._workers[index], self.folder / "logs", self._environment, port)

    def _wait_for(self, endpoints: set[str], what: str) -> None:
        """Wait until all of these were published and training may begin; look out for processes that cannot run."""

        def fail_if_hopeless() -> None:
            for name, host in self.hosts.items():
                for kept in host.processes.values():
                    if len(kept.deaths) >= HOPELESS_DEATHS:
                        raise BenchmarkFailed(f"{kept.name} of {name} dies again and again\n{self.outputs()}")

        try:
            state = self.control.wait_for(
                lambda state: endpoints <= set(state.endpoints) and state.phase is Phase.TRAINING,
                START_S,
                what,
                check=fail_if_hopeless,
            )
        except PeerNeverCame as error:
            raise BenchmarkFailed(f"{error}\n{self.outputs()}") from error
        if state.ended:
            raise BenchmarkFailed(f"the job ended before it began: {state.cause}\n{self.outputs()}")

    def wait_for_workers(self) -> None:
        """Wait until every worker has connected to its feed.

        Raises:
            BenchmarkFailed: One has not in time.
        """
        many = zip(self.hosts, self._workers, strict=True)
        self._wait_for({worker_key(host, f"worker-{n}") for host, count in many for n in range(count)}, "Every worker")

    def input_state(self) -> Any:
        """Return what the coordinator knows of the input, as splits.proto has it."""
        return self.control.input_state()

    @property
    def control(self) -> ControlClient:
        """The trainer host's client."""
        assert self._trainer is not None
        return self._trainer

    @property
    def exchange_address(self) -> str | None:
        """Where the ranks' exchange listens; None if there is one rank."""
        return f"{LOOPBACK}:{self._exchange.port}" if self._exchange else None

    @property
    def pids(self) -> list[int]:
        """Pids of all processes that run."""
        return [kept.pid for host in self.hosts.values() for kept in host.processes.values() if kept.pid is not None]

    def process(self, host: str, name: str) -> Kept:
        """Return a process of a host, for its pid or its end."""
        return self.hosts[host].processes[name]

    def kill_host(self, name: str) -> None:
        """SIGKILL all processes of a host and let its lease lapse."""
        self.hosts[name].kill()

    def start_host(self, name: str) -> None:
        """Have a host back that was killed."""
        self._start(name)
        self.hosts[name].join_job()

    def connect(self, rank: int) -> RankInput:
        """Return what a rank has; its caller closes it."""
        return RankInput(self.config, rank, self.ranks, self.exchange_address)

    def run(self, work: Callable[[RankInput], _Result], timeout_s: float = 60.0) -> list[_Result | BaseException]:
        """Call `work` in a thread for each rank; return what each call returned or raised.

        Raises:
            BenchmarkFailed: A rank was not ready in time.
        """
        results: dict[int, _Result | BaseException] = {}

        def main(rank: int) -> None:
            try:
                with contextlib.closing(self.connect(rank)) as connected:
                    results[rank] = work(connected)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            raise BenchmarkFailed(f"ranks {late} are not ready after {timeout_s:g} s\n{self.outputs()}")
        return [results[rank] for rank in range(self.ranks)]

    def outputs(self) -> str:
        """Return the end of what every process printed."""
        logs = sorted((self.folder / "logs").rglob("*.log"))
        return "\n".join(f"--- {log.parent.name} {log.stem}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def stop(self) -> None:
        """End everything; may be repeated."""
        if self._trainer is not None:
            self._trainer.close()
        if self._exchange is not None:
            self._exchange.stop(grace_s=0.0)
            self._exchange = None
        for host in self.hosts.values():
            for (
                kept
            ) in host.processes.values():  # all hosts first: what is left for a moment would complain of the rest
                kept.condemn()
        for host in self.hosts.values():
            host.kill()


@contextlib.contextmanager
def temporary_cluster(job: str, **options: Any) -> Iterator[FeedCluster]:
    """Give a FeedCluster in a scratch folder that is deleted behind it."""
    with (
        tempfile.TemporaryDirectory(prefix="hetero-feed-") as folder,
        FeedCluster(Path(folder), job, **options) as made,
    ):
        yield made
