"""The splits that one data host's feed has at hand: which worker runs which, and what the coordinator hears of them."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hetero._proto import splits_pb2 as pb
from hetero.data.feed_splits import HeldSplit, ReadyBatch, Tally
from hetero.data.worker_link import WorkerBatch, WorkerPort
from hetero.process.failure import Failure

_log = logging.getLogger(__name__)

MAX_DEATHS = 6
"""A split is bad if so many workers died in it, one after the other, without getting a batch further, and less than
half as many in other splits meanwhile: then it is the split that kills them."""
MOST_DEATHS = 25
"""So many it may have at most, whatever happens to other splits."""
_STARVED = 6
"""A split that finds no free worker within so many times `no_worker_s` goes back, whoever else is busy here: they may
be waiting for it (a deterministic job reads split by split)."""


class Outlet(Protocol):
    """Where finished batches go: to the ranks' streams."""

    @property
    def ranks_to_tell(self) -> int:
        """How many ranks have to know that a split has ended: all in a deterministic job, none in others."""
        ...

    def put(self, batch: ReadyBatch) -> None:
        """A batch is ready."""
        ...

    def end(self, split: HeldSplit) -> None:
        """A split will have no more batches."""
        ...

    def forget(self, split: HeldSplit) -> None:
        """A split is given up: its batches are not to be sent any more."""
        ...

    def end_epoch(self, epoch: int) -> None:
        """Nothing more is wanted of an epoch."""
        ...


class _Worker:
    """A connected worker; idle if it neither works, lists splits nor drops a task."""

    def __init__(self, port: WorkerPort, tally: Tally) -> None:
        self.port, self.tally = port, tally
        self.split: HeldSplit | None = None
        self.is_listing = False


class Tasks:
    """Hands the coordinator's splits to idle workers and reports them. Implements `WorkerListener`.

    Args:
        host: name of this host.
        send: takes what the coordinator is to hear.
        outlet: takes finished batches.
        no_worker_s: how long a split waits for a first worker to connect before it goes back to the coordinator.
        on_worker: called with the name of each worker that connects.
        share_bytes: returns how many bytes of batches each of so many workers may keep; None: it never changes.
        clock: seconds that only ascend.
    """

    def __init__(
        self,
        host: str,
        send: Callable[[pb.ServeRequest], None],
        outlet: Outlet,
        *,
        no_worker_s: float,
        on_worker: Callable[[str], None],
        share_bytes: Callable[[int], int | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._send, self._outlet = host, send, outlet
        self._no_worker_s, self._on_worker, self._clock = no_worker_s, on_worker, clock
        self._share_bytes = share_bytes
        self._shared: int | None = None  # what they were told last
        self._held: dict[tuple[int, int], HeldSplit] = {}
        self._pending: dict[tuple[int, int], HeldSplit] = {}
        self._done: dict[int, dict[int, tuple[int, int, int]]] = {}  # epoch, split: attempt, batches, replayed
        self._workers: dict[WorkerPort, _Worker] = {}
        self._idle: deque[_Worker] = deque()
        self._tallies: dict[str, Tally] = {}
        self._no_worker_since_s = self._clock()
        self._deaths = 0  # of workers, whatever they did
        self._order = 0
        self._wanted = self._credit = 0  # asked for on this stream, and not yet given
        self._has_to_list, self._list_deaths = False, 0
        self._list: pb.SplitList | None = None

    # --- coordinator --------------------------------------------------------------------------------------------------

    def hello(self) -> tuple[list[pb.SplitId], list[pb.SplitDone]]:
        """Return what is held, and what is done of epochs that have not ended."""
        done = [
            _split_done(pb.SplitId(epoch=epoch, split=split, attempt=attempt), batches, replayed)
            for epoch, splits in self._done.items()
            for split, (attempt, batches, replayed) in splits.items()
        ]
        return [split.id for split in self._held.values()], done

    def wanted(self) -> int:
        """Return the number of idle workers: what a new stream to the coordinator begins with asking for."""
        self._wanted = self._credit = len(self._idle)
        return self._wanted

    def on_reply(self, reply: pb.ServeReply) -> None:
        """Do what the coordinator says."""
        for epoch in reply.epochs_ended:
            for split in [split for split in self._held.values() if split.epoch == epoch]:
                self._drop(split)
            self._done.pop(epoch, None)
            self._outlet.end_epoch(epoch)
        for gone in reply.revoked:
            held = self._held.get((gone.epoch, gone.split))
            if held is not None and held.attempt <= gone.attempt:
                self._drop(held)
            self._forget_done(gone)
        for assignment in reply.assignments:
            self._credit = max(0, self._credit - 1)
            self._assign(assignment)
        if reply.list_splits:
            self._has_to_list = self._list is None and not any(worker.is_listing for worker in self._workers.values())
            if self._list is not None:
                self._send(pb.ServeRequest(list=self._list))
        self._match()

    def tick(self) -> None:
        """Give back what no worker comes for; to be called now and then."""
        now_s = self._clock()
        nobody = not self._workers and now_s - self._no_worker_since_s >= self._no_worker_s
        for split in list(self._pending.values()):
            if nobody or now_s - split.waits_since_s >= self._no_worker_s * _STARVED:
                _log.warning("no worker for split %d of epoch %d; it goes back", split.split, split.epoch)
                self._drop(split)
                self._send(pb.ServeRequest(returned=[split.id]))

    def stats(self) -> tuple[list[pb.WorkerStats], int, int]:
        """Return what each worker has done, and the number and bytes of batches that are not yet at a rank."""
        at_hand = {worker.port.name: worker.split for worker in self._workers.values() if worker.split is not None}
        workers = []
        for name, tally in sorted(self._tallies.items()):
            split = at_hand.get(name)
            epoch, number = (-1, -1) if split is None else split.key
            counts = {"rows": tally.rows, "batches": tally.batches, "splits": tally.splits}
            workers.append(
                pb.WorkerStats(name=name, epoch=epoch, split=number, waiting_batches=tally.waiting, **counts)
            )
        waiting = [batch.size for split in self._held.values() for batch in split.unreceived.values()]
        return workers, len(waiting), sum(waiting)

    # --- workers ------------------------------------------------------------------------------------------------------

    def on_worker(self, port: WorkerPort) -> None:
        """Take in a worker that has connected."""
        worker = _Worker(port, self._tallies.setdefault(port.name, Tally()))
        self._workers[port] = worker
        self._share_out(port)
        self._on_worker(port.name)
        self._rest(worker)

    def on_batch(self, port: WorkerPort, batch: WorkerBatch) -> None:
        """Pass a finished batch on; one of a task that was given up is freed."""
        worker = self._workers[port]
        split = worker.split
        if split is None or batch.sequence < split.produced:
            port.free(batch.slot)
            return
        ready = ReadyBatch(split, batch, port, worker.tally, self._order)
        self._order += 1
        split.produced, split.deaths = batch.sequence + 1, 0
        split.unreceived[batch.sequence] = ready
        worker.tally.rows += batch.rows
        worker.tally.batches += 1
        worker.tally.waiting += 1
        self._outlet.put(ready)

    def on_end(self, port: WorkerPort, batches: int, replayed: int) -> None:
        """A worker has come to the end of its split."""
        worker = self._workers[port]
        if worker.split is not None:
            worker.tally.splits += 1
            worker.split.replayed += replayed
            self._end(worker.split, batches, None)
        self._rest(worker)

    def on_failed(self, port: WorkerPort, cause: dict[str, Any], batches: int, replayed: int) -> None:
        """The job's code failed in a split."""
        worker = self._workers[port]
        if worker.split is not None:
            worker.split.replayed += replayed
            self._end(worker.split, batches, cause)
        self._rest(worker)

    def on_abandoned(self, port: WorkerPort) -> None:
        """A worker has dropped a task that was revoked."""
        self._rest(self._workers[port])

    def on_splits(self, port: WorkerPort, values: list[str]) -> None:
        """The job's list of splits. It is kept: another coordinator has to get the same one."""
        self._list = pb.SplitList(values=values)
        self._listed(port, self._list)

    def on_list_failed(self, port: WorkerPort, cause: dict[str, Any]) -> None:
        """The job's code failed in listing its splits."""
        self._listed(port, pb.SplitList(cause_json=json.dumps(cause)))

    def on_gone(self, port: WorkerPort) -> None:
        """A worker has died or was replaced; its finished batches stay."""
        worker = self._workers.pop(port, None)
        if worker is None:
            return
        self._deaths += 1
        self._share_out()
        if worker in self._idle:
            self._idle.remove(worker)
        if not self._workers:
            self._no_worker_since_s = self._clock()
        if worker.is_listing:
            self._list_deaths += 1
            self._has_to_list = self._list_deaths < MAX_DEATHS
            if not self._has_to_list:
                self._list_deaths = 0
                cause = self._killed("listing the job's splits", MAX_DEATHS)
                self._send(pb.ServeRequest(list=pb.SplitList(cause_json=json.dumps(cause))))
        split = worker.split
        if split is not None:
            split.worker_died(self._deaths)
            _log.warning(
                "%s is gone in the middle of split %d of epoch %d; it goes on from batch %d",
                *(port.name, split.split, split.epoch, split.produced),
            )
            if self._may_go_on(split):
                self._await_worker(split)
            else:
                where = f"split {split.split} of epoch {split.epoch} ({split.value:.200}), batch {split.produced}"
                self._end(split, split.produced, self._killed(where, split.deaths))
        self._match()

    @property
    def all_busy(self) -> bool:
        """Whether there are workers, and none of them waits for a split."""
        return bool(self._workers) and not self._idle

    def _share_out(self, new: WorkerPort | None = None) -> None:
        """Tell workers of their share of the host's memory for batches where it has changed, a new one in any case."""
        share, before = self._share_bytes(len(self._workers)), self._shared
        self._shared = share
        if share is not None:
            for port in self._workers:
                if port is new or share != before:
                    port.share(share)

    # --- splits -------------------------------------------------------------------------------------------------------

    def _assign(self, assignment: pb.Assignment) -> None:
        split = HeldSplit(assignment, self._settle)
        held = self._held.get(split.key)
        if held is not None:
            if held.attempt >= split.attempt:
                return
            self._drop(held)
        self._forget_done(split.id)
        self._held[split.key] = split
        self._await_worker(split)

    def _await_worker(self, split: HeldSplit) -> None:
        split.waits_since_s = self._clock()
        self._pending[split.key] = split

    def _match(self) -> None:
        """Give idle workers something to do, and ask for more if that is not enough."""
        while self._idle and (self._has_to_list or self._pending):
            worker = self._idle.popleft()
            if self._has_to_list:
                self._has_to_list, worker.is_listing = False, True
                worker.port.list_splits()
            else:
                worker.split = self._pending.pop(min(self._pending))
                worker.port.run(worker.split.task())
        missing = len(self._idle) - self._credit
        if missing > 0:
            self._credit += missing
            self._wanted += missing
            self._send(pb.ServeRequest(wanted=self._wanted))

    def _rest(self, worker: _Worker) -> None:
        worker.split, worker.is_listing = None, False
        if worker not in self._idle:
            self._idle.append(worker)
        self._match()

    def _listed(self, port: WorkerPort, answer: pb.SplitList) -> None:
        self._list_deaths = 0
        self._send(pb.ServeRequest(list=answer))
        self._rest(self._workers[port])

    def _end(self, split: HeldSplit, batches: int, cause: dict[str, Any] | None) -> None:
        split.end(batches, cause)
        self._outlet.end(split)
        self._settle(split)

    def _settle(self, split: HeldSplit) -> None:
        """Report a split that is over: no more batches, and ranks know all there is to know of it."""
        if self._held.get(split.key) is not split or split.total is None or split.unreceived:
            return
        if len(split.told) < self._outlet.ranks_to_tell:
            return
        self._outlet.forget(split)
        if split.cause is not None:
            # It stays held until the coordinator revokes it or ends its epoch: the word of it must not get lost.
            bad = pb.SplitBad(id=split.id, batches=split.batches, replayed=split.replayed)
            bad.cause_json = json.dumps(split.cause)
            self._send(pb.ServeRequest(bad=[bad]))
            return
        del self._held[split.key]
        self._done.setdefault(split.epoch, {})[split.split] = split.attempt, split.batches, split.replayed
        self._send(pb.ServeRequest(done=[_split_done(split.id, split.batches, split.replayed)]))

    def _drop(self, split: HeldSplit) -> None:
        """Give a split up, finished batches included."""
        del self._held[split.key]
        self._pending.pop(split.key, None)
        self._outlet.forget(split)
        for worker in self._workers.values():
            if worker.split is split:
                worker.split = None  # what it says until it has heard is nobody's
                worker.port.abandon()
        for batch in split.unreceived.values():
            batch.dropped = True
            batch.tally.waiting -= 1
            batch.release()
        split.unreceived.clear()

    def _forget_done(self, gone: pb.SplitId) -> None:
        done = self._done.get(gone.epoch, {})
        if gone.split in done and done[gone.split][0] <= gone.attempt:
            del done[gone.split]

    def _may_go_on(self, split: HeldSplit) -> bool:
        elsewhere = self._deaths - split.deaths_before - split.deaths
        return split.deaths < (MAX_DEATHS if 2 * elsewhere < split.deaths else MOST_DEATHS)

    def _killed(self, where: str, deaths: int) -> dict[str, Any]:
        message = (
            f"{where}: killed {deaths} workers one after the other. "
            "Look for memory that runs out or native code that crashes; logs are those of the host's workers."
        )
        return Failure(self._host, "feed", time.time(), exception="ChildFailed", message=message).to_dict()


def _split_done(split: pb.SplitId, batches: int, replayed: int) -> pb.SplitDone:
    return pb.SplitDone(id=split, batches=batches, replayed=replayed)
