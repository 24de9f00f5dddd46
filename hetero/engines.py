"""The engines as a rank uses them: how an epoch's source is opened, and what is asked of the hosts that fill it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hetero.control.split_follow import SplitFollower
from hetero.control.state import JobState
from hetero.data.engine import Source
from hetero.data.exchange import Exchange
from hetero.data.feed_client import FeedClient
from hetero.errors import DataServiceLost, HeteroError, PeerFailed, PeerNeverCame, TrainerLost
from hetero.host import HostConfig, feed_key, open_tasks

FEED_PREFIX = feed_key("")
OUTSTANDING_REQUESTS = 8
"""Batches that a rank holds or has asked for; with more workers than that, one of each so that none idles."""


class DataService:
    """What a rank asks of the hosts that prepare its input.

    Args:
        state: Returns the newest state of the job.
    """

    def __init__(self, state: Callable[[], JobState | None]) -> None:
        self._state = state

    def check(self) -> None:
        """Raise what ended the job, if something did."""
        state = self._state()
        if state is None or not state.ended:
            return
        cause = state.failure.describe() if state.failure else state.outcome.value
        kinds: dict[str, type[HeteroError]] = {
            "DATA_LOST": DataServiceLost,
            "NEVER_STARTED": PeerNeverCame,
            "TRAINER_LOST": TrainerLost,
        }
        raise kinds.get(state.outcome.name, PeerFailed)(str(cause))

    def dispatcher(self) -> str:
        """Return host:port of the dispatcher."""
        state = self._state()
        if state is None or "dispatcher" not in state.endpoints:
            raise DataServiceLost("The coordinator knows no dispatcher. See the data hosts' logs.")
        return state.endpoints["dispatcher"]

    def feeds(self) -> dict[str, str]:
        """Return host:port of each feed, local workers' included, by host, but for hosts that are gone."""
        state, gone = self._state(), self._gone()
        known = state.endpoints.items() if state else ()
        return {
            host: address
            for key, address in known
            if key.startswith(FEED_PREFIX) and (host := key.removeprefix(FEED_PREFIX)) not in gone
        }

    def workers(self) -> int:
        """Return the number of data workers that serve."""
        state = self._state()
        return state.workers_alive if state else 0

    def lost(self) -> bool:
        """Return True if a data host, or the local workers of a trainer host, are gone for good."""
        return bool(self._gone())

    def idle(self, open_epochs: int, *, though_none_is_lost: bool = False) -> bool:
        """Return True if a data host is gone for good and the workers of all others have nothing to do.

        Args:
            open_epochs: How many later epochs are open: a worker has one task for each.
            though_none_is_lost: Return True also if no data host is gone.
        """
        state, gone = self._state(), self._gone()
        if state is None or not (gone or though_none_is_lost):
            return False
        living = {name: value for name, value in state.endpoints.items() if name.startswith("worker/")}
        return all(
            (open_tasks(value) or 0) <= open_epochs for name, value in living.items() if name.split("/")[1] not in gone
        )

    def _gone(self) -> set[str]:
        state = self._state()
        if state is None:
            return set()
        # Of trainer hosts only those count that had workers of their own.
        prepared = {name.split("/")[1] for name in state.endpoints if name.startswith("worker/")}
        hosts = (*state.data_hosts, *(host for host in state.trainer_hosts if host.name in prepared))
        return {host.name for host in hosts if host.lost or host.left or host.workers_gone_for_good}


class FeedOpener:
    """Opens an epoch of the `grpc` engine: the coordinator hands its splits to the data hosts' feeds.

    Args:
        config: The host.
        service: What is known of the data hosts.
        run_id: The run, as the coordinator calls it.
        rank: This rank.
        size: Number of ranks.
        coordinator: Tells where the coordinator is now, host:port.
    """

    def __init__(
        self,
        config: HostConfig,
        service: DataService,
        run_id: str,
        rank: int,
        size: int,
        *,
        coordinator: Callable[[], str],
    ) -> None:
        settings = config.settings
        self._client = FeedClient(
            rank,
            size,
            run_id,
            settings.token,
            feeds=service.feeds,
            prefetch_bytes=settings.prefetch_bytes,
            deterministic=settings.deterministic,
            tls=config.tls,
        )
        self._follower = SplitFollower(
            coordinator,
            settings.token,
            rank,
            size,
            run_id,
            self._client,
            stray_channels=[name for name in config.sharded_channels if config.channels().has_files(name)],
            cluster=config.topology.cluster_id,
            tls=config.tls,
        )
        self._client.attach(self._follower)

    def __call__(self, epoch: int) -> Source:
        """Return the epoch's source; from now on the workers prepare it."""
        return self._client.open(epoch)

    def close(self) -> None:
        """End all connections and threads. May be repeated."""
        self._client.close()
        self._follower.close()


class WallClock:
    """Notices that the wall clock was set back, by which TensorFlow's client counts the time between two questions.

    Set back by an hour it asks only after that hour whether the epoch has ended.
    """

    def __init__(self) -> None:
        self._most_ahead_s = time.time() - time.monotonic()

    def was_set_back(self) -> bool:
        """Return whether it stands at least a second behind where it once stood."""
        ahead_s = time.time() - time.monotonic()
        self._most_ahead_s = max(self._most_ahead_s, ahead_s)
        return self._most_ahead_s - ahead_s >= 1.0


class TfDataOpener:
    """Opens an epoch of the `tf_data` engine: rank 0 ships the dataset to the dispatcher, all ranks join.

    Args:
        make_inputs: Calls the job's `inputs` for an epoch, with all splits.
        service: What is known of the data hosts.
        run_id: Makes the names of this run's epochs differ from any other's.
        rank: This rank.
        exchange: Tells the other ranks that rank 0 has registered an epoch; None if there are none.
    """

    def __init__(
        self, make_inputs: Callable[[int], Any], service: DataService, run_id: str, rank: int, exchange: Exchange | None
    ) -> None:
        self._make_inputs, self._service = make_inputs, service
        self._run_id, self._rank, self._exchange = run_id, rank, exchange
        self._newest = -1
        self._clock = WallClock()

    def __call__(self, epoch: int) -> Source:
        """Return the epoch's source; by then the workers prepare its first batches."""
        from hetero.data import tf_service

        name = f"{self._run_id}-{epoch}"
        dispatcher = self._service.dispatcher()
        if self._rank == 0:
            dataset = self._make_inputs(epoch)
            tf_service.check_dataset(dataset, "tf_data")
            tf_service.register_epoch(dataset, dispatcher, dataset_id=name)
            if self._exchange is not None:
                self._exchange.publish(name, b"registered")
        elif self._exchange is not None:
            self._exchange.wait(name, check=self._service.check)
        source = tf_service.open_epoch(
            dispatcher,
            name,
            job_name=name,
            max_outstanding_requests=max(OUTSTANDING_REQUESTS, self._service.workers()),
            service_idle=lambda: self._service.idle(
                open_epochs=self._newest - epoch, though_none_is_lost=self._clock.was_set_back()
            ),
            service_lost=lambda: self._service.lost() or self._clock.was_set_back(),
        )
        source.join()
        self._newest = max(self._newest, epoch)
        return source
