"""The `grpc` engine on a data host: its feed's process and its workers', put together from control and data."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.control.split_serve import ServeLink
from hetero.data import feed_worker
from hetero.data.feed_server import FeedConfig, FeedServer
from hetero.data.local import checked_dataset
from hetero.errors import HeteroError, JobFileError
from hetero.host import HostConfig, feed_key, worker_key
from hetero.job import InputContext, Job
from hetero.job_file import load_job

_PULSE_S = 1.0
_PUBLISH_RETRY_S = 1.0


def serve_feed(config: HostConfig, process: str, port: int) -> None:
    """Run the feed of this host until SIGTERM or SIGINT.

    Args:
        config: The host.
        process: Name of this process.
        port: The port it prefers.

    Raises:
        PeerNeverCame: The coordinator does not answer.
        HeteroError: No port can be bound.
    """
    asyncio.run(_Feed(config, process, port).run())


class _Feed:
    """The feed server, its link to the coordinator, and what it announces there."""

    def __init__(self, config: HostConfig, process: str, port: int) -> None:
        self._config, self._port = config, port
        self._pulse = config.run().pulse(config.host, process)
        self._control = config.connect()
        self._unpublished: dict[str, str] = {}
        self._to_publish = asyncio.Event()
        self._ready_workers: set[str] = set()

    async def run(self) -> None:
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        config, settings = self._config, self._config.settings
        with self._control:
            state = await asyncio.to_thread(
                self._control.wait_for, lambda _: True, settings.start_timeout_s, "The coordinator"
            )
            link: ServeLink | None = None
            server = FeedServer(
                FeedConfig(
                    host=config.host,
                    run_id=state.run_id,
                    port=self._port,
                    token=settings.token,
                    tls=config.tls,
                    deterministic=settings.deterministic,
                    worker_socket=socket_name(config),
                    worker_secret=secret(config),
                ),
                lambda request: link.send(request) if link is not None else None,
                on_worker=self._on_worker,
            )
            link = ServeLink(
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
            tasks = [asyncio.create_task(job) for job in (link.run(), self._publish(), self._beat())]
            try:
                await asyncio.wait([asyncio.create_task(stop.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # raises what ended it
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.stop()

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
    job = _load(config)
    assert job.inputs_function is not None  # noqa: S101  load_job checked it
    make_inputs = job.inputs_function
    settings = config.settings

    def context(splits: tuple[Any, ...], epoch: int) -> InputContext:
        return InputContext(
            splits=splits,
            epoch=epoch,
            batch_size=settings.batch_size,
            params=settings.params,
            channels=settings.channels,
            run_seed=settings.seed,
        )

    feed_worker.serve(
        socket_name(config),
        secret(config),
        process,
        max(1, settings.buffer_bytes // workers),
        lambda value, epoch: checked_dataset(make_inputs(context((value,), epoch)), "grpc"),
        lambda: job.list_splits(context((), 0)),
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
            f"The job's file cannot be run on data host {config.host}: {type(error).__name__}: {error}. "
            "Under grpc its inputs run there: install what it imports on the data hosts too."
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
