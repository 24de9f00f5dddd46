"""The `grpc` engine on a data host: its feed's process and its workers', put together from control and data.

A trainer host with local workers has the same. What fails there may well succeed on a data host, which lacks nothing:
so the first split in which the job's code fails ends that feed, and with it the host's local workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hetero._proto import splits_pb2 as pb
from hetero.control.split_serve import ServeLink
from hetero.control.state import cause_from_json, failure_of
from hetero.data import feed_worker
from hetero.data.feed_server import FeedConfig, FeedServer
from hetero.data.local import checked_dataset
from hetero.errors import EngineError, HeteroError, JobFileError
from hetero.host import CHANNELS_KEY, HostConfig, feed_key, refuse_without_channels, told_channels, worker_key
from hetero.inputs import s3
from hetero.job import Job
from hetero.job_file import load_job
from hetero.listing import input_context, list_own, mark_local
from hetero.rundir import write_json_atomic
from hetero.topology import Role
from hetero.worker_count import Figures

_PULSE_S = 1.0
_LOOK_S = 0.05
_MEASURE_S = 0.5
_PUBLISH_RETRY_S = 1.0


def serve_feed(config: HostConfig, process: str, port: int, workers: int = 0) -> None:
    """Run the feed of this host until SIGTERM or SIGINT.

    Args:
        config: The host.
        process: Name of this process.
        port: The port it prefers.
        workers: How many the host begins with where more may come, for which it says how it goes; 0: it keeps those.

    Raises:
        PeerNeverCame: The coordinator does not answer.
        HeteroError: No port can be bound.
    """
    asyncio.run(_Feed(config, process, port, workers).run())


class _Feed:
    """The feed server, its link to the coordinator, and what it announces there."""

    def __init__(self, config: HostConfig, process: str, port: int, workers: int) -> None:
        self._config, self._port, self._first_workers = config, port, workers
        self._meter = config.run().meter(config.host, process)
        self._pulse = config.run().pulse(config.host, process)
        self._control = config.connect()
        self._unpublished: dict[str, str] = {}
        self._to_publish = asyncio.Event()
        self._ready_workers: set[str] = set()
        self._is_local = config.topology.current.role is Role.TRAINER
        self._link: ServeLink | None = None
        self._unfit: EngineError | None = None
        self._is_unfit = asyncio.Event()

    async def run(self) -> None:
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        config, settings = self._config, self._config.settings
        with self._control:
            state = await asyncio.to_thread(
                self._control.wait_for,
                lambda state: not self._is_local or CHANNELS_KEY in state.endpoints,
                settings.start_timeout_s,
                "The first data host's feed" if self._is_local else "The coordinator",
            )
            if config.topology.current == config.topology.coordinator_host:
                self._announce(CHANNELS_KEY, told_channels(config))
            elif self._is_local and not state.ended:
                refuse_without_channels(config, state.endpoints)
            server = FeedServer(
                FeedConfig(
                    host=config.host,
                    run_id=state.run_id,
                    port=self._port,
                    token=settings.token,
                    tls=config.tls,
                    deterministic=settings.deterministic,
                    buffer_bytes=settings.buffer_bytes if self._first_workers else None,
                    workers=max(1, self._first_workers),
                    worker_socket=socket_name(config),
                    worker_secret=secret(config),
                ),
                self._send,
                on_worker=self._on_worker,
            )
            self._link = ServeLink(
                lambda: self._control.address,
                settings.token,
                config.host,
                server.feed_id,
                server,
                cluster=config.topology.cluster_id,
                tls=config.tls,
            )
            self._port = await server.start()
            self._announce(feed_key(config.host), self._address)
            jobs = [self._link.run(), self._publish(), self._beat()]
            jobs += [self._measure(server)] if self._first_workers else []
            tasks = [asyncio.create_task(job) for job in jobs]
            try:
                ends = [asyncio.create_task(event.wait()) for event in (stop, self._is_unfit)]
                await asyncio.wait([*ends, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # raises what ended it
                if self._unfit is not None:
                    raise self._unfit
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.stop()

    def _send(self, request: pb.ServeRequest) -> None:
        """Say something to the coordinator, but for a failure that need not be the job's."""
        if request.bad and self._is_local and self._others_serve():
            why = failure_of(cause_from_json(request.bad[0].cause_json) or {}).describe()
            text = f"The job's inputs failed on trainer host {self._config.host}, a data host takes the split: {why}"
            self._unfit = self._unfit or EngineError(text)
            self._is_unfit.set()
            return
        if request.HasField("list"):
            mark_local(request.list, self._config.channels())
        if self._link is not None:
            self._link.send(request)

    def _others_serve(self) -> bool:
        """Return whether a data host can still prepare input."""
        state = self._control.state
        return state is not None and any(h.registered and not h.lost and not h.left for h in state.data_hosts)

    @property
    def _address(self) -> str:
        return f"{self._config.topology.current.address}:{self._port}"

    def _on_worker(self, name: str) -> None:
        """Announce a worker that has come up: training starts with the first."""
        if name not in self._ready_workers:
            self._ready_workers.add(name)
            self._announce(worker_key(self._config.host, name), f"{self._address} 0")

    def _announce(self, name: str, value: str) -> None:
        self._unpublished[name] = value
        self._to_publish.set()

    async def _publish(self) -> None:
        while True:
            await self._to_publish.wait()
            self._to_publish.clear()
            for name, value in tuple(self._unpublished.items()):
                try:
                    await asyncio.to_thread(self._control.publish, name, value, _PUBLISH_RETRY_S)
                    del self._unpublished[name]
                except HeteroError:  # the coordinator is being replaced: the feed serves on meanwhile
                    await asyncio.sleep(_PUBLISH_RETRY_S)
                    self._to_publish.set()

    async def _measure(self, server: FeedServer) -> None:
        """Leave word for the launcher, which may start more workers, how batches are taken."""
        clock, short_s = asyncio.get_running_loop().time, 0.0
        seen_s = told_s = clock()
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = clock()
            # A look that comes late says nothing of the time before it, in which this process was busy.
            short_s += min(now_s - seen_s, 2 * _LOOK_S) if server.is_short else 0.0
            seen_s = now_s
            if now_s - told_s >= _MEASURE_S:
                told_s = now_s
                rows, batches = server.arrived()
                with contextlib.suppress(OSError):  # a full disk: the launcher then changes nothing
                    write_json_atomic(self._meter, asdict(Figures(server.feed_id, now_s, rows, batches, short_s)))

    async def _beat(self) -> None:
        while True:
            _touch(self._pulse)
            await asyncio.sleep(_PULSE_S)


def serve_worker(config: HostConfig, process: str, workers: int) -> None:
    """Run one worker of this host until it is terminated.

    Args:
        config: The host.
        process: Name of this process.
        workers: Workers of the host, who share `--buffer-bytes`.

    Raises:
        JobFileError: The job cannot be loaded on this host.
    """
    pulse = config.run().pulse(config.host, process)
    threading.Thread(target=_beat_for_ever, args=(pulse,), name="hetero-pulse", daemon=True).start()
    s3.prepare(config.settings.channels)
    job = _load(config)
    assert job.inputs_function is not None  # noqa: S101  load_job checked it
    make_inputs = job.inputs_function
    settings = config.settings

    feed_worker.serve(
        socket_name(config),
        secret(config),
        process,
        max(1, settings.buffer_bytes // workers),
        lambda value, epoch: checked_dataset(make_inputs(input_context(config, (value,), epoch)), "grpc"),
        lambda: list_own(job, config),
        host=config.host,
    )


def socket_name(config: HostConfig) -> str:
    """Return the name under which a host's workers find its feed, in the abstract namespace: no file is left behind."""
    return f"\0hetero-{config.run_id}-{hashlib.sha256(config.host.encode()).hexdigest()[:12]}"


def secret(config: HostConfig) -> bytes:
    """Return what a worker shows to its feed; both are started by one launcher."""
    return hashlib.sha256(f"{config.run_id}/{config.settings.token or ''}".encode()).digest()


def _load(config: HostConfig) -> Job:
    try:
        return load_job(config.settings.job)
    except HeteroError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise JobFileError(
            f"The job's file cannot be run on {config.topology.current.role.value} host {config.host}: "
            f"{type(error).__name__}: {error}. Under grpc its inputs run there: install what it imports there too."
        ) from error


def _beat_for_ever(pulse: Path) -> None:
    """Show that this process is not stopped; user code may take as long as it likes for a batch."""
    waiting: Callable[[float], bool] = threading.Event().wait
    while True:
        _touch(pulse)
        waiting(_PULSE_S)


def _touch(pulse: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to stop serving
        pulse.touch()
