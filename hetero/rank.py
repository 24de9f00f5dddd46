"""One training process: the job's file, Horovod, the input stream and the meter put together.

Everything slow happens at once: the rank imports TensorFlow and the job while the other hosts come up, and only then
asks the coordinator where they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.channels import Channels
from hetero.control.state import JobState, Outcome, Phase
from hetero.data.epoch import InputStream
from hetero.data.exchange import Exchange, ExchangeServer
from hetero.data.local import local_opener
from hetero.engines import DataService, FeedOpener, TfDataOpener
from hetero.errors import HeteroError
from hetero.host import HostConfig
from hetero.inputs import s3
from hetero.job import Job, TrainContext
from hetero.job_file import load_job
from hetero.listing import explained, input_context, list_for_tf_data, share_out
from hetero.local_workers import AUTO
from hetero.rundir import RunDir, read_json, write_json_atomic
from hetero.stopping import Stopping
from hetero.training.device import SimulatedDevice
from hetero.training.meter import StepMeter
from hetero.training.peers import follows_from_a_peer
from hetero.training.torch_peers import free_port

if TYPE_CHECKING:
    from hetero.data.engine import Batch, Opener


@contextlib.contextmanager
def _exit_0_is_return() -> Iterator[None]:
    """Take `sys.exit(0)` in a train function for a return: peers still wait for this rank's result."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class RankFeed:
    """What a TrainContext draws from: the input stream seen through the meter, as long as nobody stops the rank.

    Args:
        device: The simulated accelerator that runs a step on each batch; None where there is none.
    """

    def __init__(
        self,
        stream: InputStream,
        meter: StepMeter,
        stopping: Stopping,
        channels: Channels,
        device: SimulatedDevice | None = None,
    ) -> None:
        self._stream, self._meter, self._stopping, self._channels = stream, meter, stopping, channels
        self._device = device
        self.logged: dict[str, Any] = {}
        self.error: HeteroError | None = None

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield this rank's batches of an epoch, measured."""
        self.finish_step()
        batches = self._meter.batches(epoch, self._at_boundaries(epoch))
        try:
            yield from batches if self._device is None else self._device.drive(batches, self._meter.log)
        except HeteroError as error:
            self.error = explained(error, self._channels)
            if self.error is error:
                raise
            raise self.error from error

    def finish_step(self) -> None:
        """Wait for the device, where the loop has left an epoch early."""
        if self._device is not None:
            self._meter.lengthen(self._device.finish())

    def _at_boundaries(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch; before each is asked for, the step before it is over."""
        batches = self._stream.batches(epoch)
        for step in itertools.count():
            self._stopping.boundary(epoch, step)
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch  # or it would outlive its step

    @contextlib.contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raise what ended the stream, where a library (tf.data, under `ctx.dataset`) hid it in an error of its own."""
        try:
            yield
        except Exception as error:
            if self.error is None or error is self.error or not type(error).__module__.startswith("tensorflow"):
                raise
            raise self.error from error

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep what the job measured for metrics.jsonl and for the summary."""
        self._meter.log(**values)
        self.logged.update(values)


class Rank:
    """One rank's life, from import to result.

    Args:
        config: The host's configuration.
        local_rank: Number of this rank within its host, from 0.
    """

    def __init__(self, config: HostConfig, local_rank: int) -> None:
        self._config, self._local_rank = config, local_rank
        self._control = config.connect()
        self._service = DataService(lambda: self._control.state)

    def run(self) -> None:
        """Train and, on rank 0, leave every rank's result for the launcher."""
        config, settings = self._config, self._config.settings
        self._control.watch()
        job = load_job(settings.job)
        from hetero.training import horovod

        uses_horovod = job.framework == "tensorflow"
        if uses_horovod:
            horovod.pin_accelerator(self._local_rank)
        ready = self._wait_for("rendezvous", lambda state: "rendezvous" in state.endpoints)
        slots = [(name, int(count)) for name, count in json.loads(ready.endpoints["slots"])]
        rendezvous = ready.endpoints["rendezvous"]
        environment = horovod.slot_env(
            slots,
            config.host,
            self._local_rank,
            rendezvous,
            interface=config.topology.interface,
            timeout_s=settings.start_timeout_s,
        )
        if uses_horovod:
            rank, size, local_rank = horovod.init_rank(environment, under_mpirun=config.mpi is not None)
        else:
            rank, size, local_rank = (int(environment[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK"))
        self._wait_for("a data host with a worker", lambda state: state.phase is Phase.TRAINING)
        server, exchange = self._open_exchange(rank, size)
        if not uses_horovod:
            interface = environment.get("HOROVOD_GLOO_IFACE") or horovod.interface_to(*_host_and_port(rendezvous))
            self._announce_peers(exchange, rank, size, dict(slots)[config.host], master=rendezvous, interface=interface)
        run = config.run()
        stopping = self._make_stopping(rank)
        device = self._make_device(stopping)
        meter = StepMeter(
            metrics=run.metrics if rank == 0 else None,
            epochs=settings.epochs,
            size=size,
            progress=os.environ.get("HETERO_PROGRESS", "plain") if rank == 0 else "off",
            started_at=config.started_s,
            sums=run.meter(config.host, f"rank-{self._local_rank}") if settings.local_workers == AUTO else None,
            device=device.describe if device is not None else None,
        )
        over_feed = config.engine == "grpc"
        opener = self._opener(job, rank, size, exchange, ready.run_id, dict(slots))
        stream = InputStream(
            opener,
            batch_size=settings.batch_size,
            rank=rank,
            size=size,
            exchange=exchange,
            remainder=settings.remainder,
            check=self._service.check,
            epochs=settings.epochs,
            prefetch_bytes=settings.prefetch_bytes // 2 if over_feed else None,
            ordered=settings.deterministic or not over_feed,
            digest=settings.deterministic,
        )
        feed = RankFeed(stream, meter, stopping, config.channels(), device)
        context = TrainContext(
            feed=feed,
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=dict(slots)[config.host],
            batch_size=settings.batch_size,
            number_of_epochs=settings.epochs,
            params=settings.params,
            channels=config.channels(),
            seed=settings.seed,
            model_dir=self._make_model_dir(),
            run_dir=run.path,
            host=config.host,
            checkpoint_folder=Path(settings.checkpoint_dir) if settings.checkpoint_dir else run.path / "checkpoints",
            register_save=stopping.on_stop,
        )
        with contextlib.ExitStack() as at_last:
            if isinstance(opener, FeedOpener):
                at_last.callback(opener.close)  # others may still train, and need its word on what has arrived here
            try:
                self._train(job, context, feed, stopping)
            finally:
                meter.close()
                stream.close()
            result = {
                "rank": rank,
                "host": config.host,
                **meter.result().to_dict(),
                "dropped_rows": stream.dropped_rows,
                "digest": stream.digest,
                "device": {"busy_s": device.busy_s, "idle_s": device.idle_s} if device is not None else None,
                "results": feed.logged,
            }
            self._collect(result, rank, size, exchange, run)
        run.finished(config.host, f"rank-{self._local_rank}").touch()
        if uses_horovod:
            horovod.shutdown()
        if exchange is not None:
            exchange.close()
        if server is not None:
            server.stop()

    @staticmethod
    def _train(job: Job, context: TrainContext, feed: RankFeed, stopping: Stopping) -> None:
        assert job.train_function is not None  # noqa: S101  load_job checked it
        with stopping.training(), feed.own_errors():
            with _exit_0_is_return():
                job.train_function(context)
            feed.finish_step()

    def _make_device(self, stopping: Stopping) -> SimulatedDevice | None:
        step_s = self._config.settings.device_step_ms / 1000
        return SimulatedDevice(step_s, sleep=stopping.pause) if step_s > 0 else None

    def _make_stopping(self, rank: int) -> Stopping:
        run, host = self._config.run(), self._config.host

        def lost() -> bool | None:
            state = self._control.state
            if state is None or not state.ended:
                return None
            return state.outcome in (Outcome.STOPPED, Outcome.DATA_LOST, Outcome.TRAINER_LOST)

        def report(values: Mapping[str, Any]) -> None:
            with contextlib.suppress(OSError):  # a full disk: the launcher says that it has not heard
                write_json_atomic(run.checkpoint(host), values)

        return Stopping(
            rank,
            self._config.settings.grace_s,
            order=lambda: read_json(run.order(host, f"rank-{self._local_rank}")),
            lost=lost,
            follows_from_a_peer=follows_from_a_peer,
            report=report,
        )

    def _make_model_dir(self) -> Path:
        given = self._config.settings.model_dir
        folder = Path(given) if given else self._config.run().path / "model"
        with contextlib.suppress(OSError):  # it is the job that needs it, or not
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _wait_for(self, what: str, ready: Callable[[JobState], bool]) -> JobState:
        """Wait for a peer; raise what ended the job if it ends first."""
        state = self._control.wait_for(ready, self._config.settings.start_timeout_s, what)
        self._service.check()
        return state

    def _open_exchange(self, rank: int, size: int) -> tuple[ExchangeServer | None, Exchange | None]:
        if size == 1:
            return None, None
        token, server = self._config.settings.token, None
        if rank == 0:
            server = ExchangeServer(token=token, tls=self._config.tls)
            self._control.publish("exchange", f"{self._config.topology.current.address}:{server.port}")
        address = self._wait_for("rank 0", lambda state: "exchange" in state.endpoints).endpoints["exchange"]
        return server, Exchange(address, rank=rank, size=size, token=token, tls=self._config.tls)

    def _announce_peers(
        self, exchange: Exchange | None, rank: int, size: int, local_size: int, *, master: str, interface: str
    ) -> None:
        """Set the variables by which `torch.distributed` finds the other ranks, as torchrun does."""
        address, _ = _host_and_port(master)  # the chief's, where rank 0 is
        port = str(free_port(address)) if rank == 0 else ""
        if exchange is not None and rank == 0:
            exchange.publish("master_port", port.encode())
        elif exchange is not None:
            port = exchange.wait("master_port", check=self._service.check).decode()
        os.environ.update(
            MASTER_ADDR=address,
            MASTER_PORT=port,
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(self._local_rank),
            LOCAL_WORLD_SIZE=str(local_size),
            GLOO_SOCKET_IFNAME=interface,
            NCCL_SOCKET_IFNAME=interface,
        )

    def _splits(self, job: Job, rank: int, exchange: Exchange | None) -> tuple[Any, ...]:
        """List the splits once, in rank 0 or for it, so that all ranks mean the same pieces."""
        if rank == 0:
            if self._config.engine == "tf_data":
                splits = list_for_tf_data(job, self._config, self._control, self._service.check)
            else:
                splits = job.list_splits(input_context(self._config))
            if exchange is not None:
                exchange.publish("splits", json.dumps(splits).encode())
            return tuple(splits)
        assert exchange is not None  # noqa: S101  there is one as soon as there are two ranks
        return tuple(json.loads(exchange.wait("splits", check=self._service.check)))

    def _share(
        self, job: Job, rank: int, size: int, exchange: Exchange | None, local_sizes: Mapping[str, int]
    ) -> Sequence[Any]:
        """Return the splits that this rank prepares itself."""
        config = self._config
        if not config.sharded_channels or exchange is None:
            return self._splits(job, rank, exchange)[rank::size]
        ranks, local_ranks = (rank, size), (self._local_rank, local_sizes[config.host])
        return share_out(job, config, exchange, list(local_sizes), ranks, local_ranks, self._service.check)

    def _opener(  # noqa: PLR0917 - what a rank is
        self,
        job: Job,
        rank: int,
        size: int,
        exchange: Exchange | None,
        run_id: str,
        local_sizes: Mapping[str, int],
    ) -> Opener:
        if self._config.engine == "grpc":
            return FeedOpener(
                self._config, self._service, run_id, rank, size, coordinator=lambda: self._control.address
            )
        s3.prepare(self._config.settings.channels)
        assert job.inputs_function is not None  # noqa: S101  load_job checked it
        make_inputs, config = job.inputs_function, self._config
        if config.engine == "local":
            share = self._share(job, rank, size, exchange, local_sizes)
            return local_opener(lambda epoch: make_inputs(input_context(config, share, epoch)) if share else ())
        splits = self._splits(job, rank, exchange)
        return TfDataOpener(
            lambda epoch: make_inputs(input_context(config, splits, epoch)), self._service, run_id, rank, exchange
        )

    def _collect(self, result: Mapping[str, Any], rank: int, size: int, exchange: Exchange | None, run: RunDir) -> None:
        """Bring all results to rank 0, which leaves them where the chief's launcher reads them."""
        results = [dict(result)]
        if exchange is not None:
            if rank > 0:
                exchange.publish(f"result-{rank}", json.dumps(result, default=str).encode())
                return
            results += [
                json.loads(exchange.wait(f"result-{other}", check=self._service.check)) for other in range(1, size)
            ]
        write_json_atomic(run.result(self._config.host, "ranks"), results)
