"""The split book behind gRPC: `hetero.v1.Splits`, served by the coordinator beside `Control`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio

from hetero._proto import splits_pb2 as pb
from hetero.control import split_causes
from hetero.control.config import CoordinatorConfig
from hetero.control.ledger import Ledger, UnknownHost
from hetero.control.split_journal import SplitJournal
from hetero.control.split_lists import Loss
from hetero.control.split_streams import FeedStream, Figures, PeerStream, RankStream
from hetero.control.splits import Mismatch, SplitBook
from hetero.control.state import JobState, Outcome, Phase

SERVICE = "hetero.v1.Splits"
JOURNAL_NAME = "splits.json"
MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""The list of splits comes in one message: room for 100,000 paths."""

Door = Callable[[grpc.aio.ServicerContext], AbstractAsyncContextManager[None]]


class SplitService:
    """Serves the split book; belongs to the coordinator's event loop.

    Args:
        config: The job.
        ledger: Told when the job fails and how many batches were replayed; asked which hosts are gone.
        door: Lets callers in, and turns refusals into gRPC's status codes.
        publish: Called when the ledger may have changed.
    """

    def __init__(self, config: CoordinatorConfig, ledger: Ledger, door: Door, publish: Callable[[], None]) -> None:
        self._config, self._ledger, self._door, self._publish = config, ledger, door, publish
        self._journal = SplitJournal(config.journal.with_name(JOURNAL_NAME), config.run_id)
        self.book = SplitBook(
            (*config.data, *config.trainers),
            deterministic=config.deterministic,
            skip_bad=config.bad_split == "skip",
            sharded=config.sharded,
            listers=config.data,
            epochs=config.epochs,
            # Above every attempt of an earlier coordinator, whatever became of its journal: nobody hands out a million
            # splits a second.
            first_attempt=time.time_ns() // 1000,
            memory=self._journal.read(),
        )
        self._figures = Figures()
        self._streams: dict[str | int, PeerStream] = {}
        self._ended_ranks: list[int] = []
        self._failed = False
        self._unlisted_since_s: float | None = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers; requests are read only once the token was found right."""
        methods: dict[str, Any] = {
            "Serve": grpc.stream_stream_rpc_method_handler(self._serve),
            "Follow": grpc.stream_stream_rpc_method_handler(self._follow),
            "GetInput": grpc.unary_unary_rpc_method_handler(self._get_input),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def hosts_changed(self) -> None:
        """Look at the ledger: which hosts are there, which are gone, which ranks have ended."""
        state = self._ledger.state()
        local = [host for host in state.trainer_hosts if f"feed/{host.name}" in state.endpoints]  # hetero.host.feed_key
        hosts = (*state.data_hosts, *local)
        # If the job's code fails in it the job is over: all hosts that have to hear of that must be there.
        self.book.may_list = state.phase is not Phase.WAITING
        gone = {h.name for h in hosts if h.lost or h.left or h.workers_gone_for_good}
        self.book.set_hosts({h.name for h in hosts if h.registered}, gone)
        self._ended_ranks = _ended_ranks(state)
        self.book.ranks_ended(self._ended_ranks)
        self._deliver()

    def tick(self) -> None:
        """Let time pass; to be called about twice a second."""
        self.book.ranks_ended(self._ended_ranks)  # whose number may be known only now
        self.book.tick()
        self._judge_silence()
        self._deliver()

    def stop(self) -> None:
        """End all streams and write the journal."""
        for stream in self._streams.values():
            stream.over.set()
        self._journal.write(self.book.version, self.book.important_version, self.book.memory, now=True)

    def input_state(self) -> pb.InputState:
        """Return what is known of the input, for people."""
        book, now_s = self.book, time.monotonic()
        state = pb.InputState(splits=len(book.values or ()), replayed_batches=book.replayed)
        for past in book.past:
            state.epochs.add(epoch=past.epoch, done=past.done, batches=past.batches, ended=True)
        for number, epoch in sorted(book.epochs.items()):
            state.epochs.add(epoch=number, done=epoch.done_count, held=len(epoch.held), batches=epoch.batches)
        local = [host for host in self._config.trainers if host in self._figures.feeds or host in self._streams]
        for host in (*self._config.data, *local):
            heard_s, stats = self._figures.feeds.get(host, (now_s, pb.FeedStats()))
            state.hosts.add(host=host, connected=host in self._streams, stats=stats, stats_age_s=now_s - heard_s)
        state.ranks.extend(stats for _, stats in sorted(self._figures.ranks.items()))
        for skipped in book.skipped:
            state.skipped.add(**skipped._asdict())
        return state

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with self._door(context):
            first = pb.ServeRequest.FromString(await _first(requests))
            known = (*self._config.data, *self._config.trainers)  # the latter, of local workers
            if (host := first.hello.host) not in known:
                raise UnknownHost(f"{host[:80]!r} is no host of this job; it has {', '.join(known)}")
            await self._converse(FeedStream(self.book, self._figures, first, self._fail), requests, context)

    async def _follow(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with self._door(context):
            first = pb.FollowRequest.FromString(await _first(requests))
            if (run_id := first.hello.run_id) != self._config.run_id:
                raise Mismatch(f"a rank of run {run_id[:80]!r} came to run {self._config.run_id!r}")
            await self._converse(RankStream(self.book, self._figures, first), requests, context)

    async def _get_input(self, _: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async with self._door(context):
            return bytes(self.input_state().SerializeToString())

    # --- plumbing -----------------------------------------------------------------------------------------------------

    async def _converse(
        self, stream: PeerStream, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Run a stream until it ends, or until a newer one of the same peer takes its place."""
        # Beforehand: if the write that would send it is cancelled, grpc.aio sends it again with the status, and fails.
        await context.send_initial_metadata(())
        peer = stream.peer
        stream.hello()
        if peer in self._streams:
            self._streams[peer].over.set()
        self._streams[peer] = stream
        self._deliver()

        jobs: tuple[Coroutine[Any, Any, Any], ...] = (
            self._read(stream, requests),
            _write(stream, context),
            stream.over.wait(),
        )
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._streams.get(peer) is stream:
                del self._streams[peer]
                stream.gone()
                self._deliver()

    async def _read(self, stream: PeerStream, requests: AsyncIterator[bytes]) -> None:
        async for raw in requests:
            if self._streams.get(stream.peer) is not stream:
                return
            stream.take(raw)
            self._deliver()

    def _deliver(self) -> None:
        """Pass on what the book has to say."""
        for peer in tuple(self.book.pending):
            if peer in self._streams:
                self._streams[peer].mail.set()
            else:
                self.book.pending.discard(peer)  # it is told when it comes
        if self.book.failure is not None and not self._failed:
            self._fail(self.book.failure)
        elif self.book.loss is not None and not self._failed and not self._ledger.ended:
            self._lose(self.book.loss)
        self._ledger.note_input(self.book.replayed, len(self.book.skipped))
        self._journal.write(self.book.version, self.book.important_version, self.book.memory)

    def _lose(self, loss: Loss) -> None:
        """End the job for want of what a lost host alone could prepare."""
        host = next(host for host in self._ledger.state().data_hosts if host.name == loss.host)
        reported = self._ledger.reported_by([loss.host])
        self._fail(split_causes.of_loss(loss, host, self._config.lease_s, reported, time.time()), Outcome.DATA_LOST)

    def _judge_silence(self) -> None:
        """End the job if a host does not list its own splits."""
        unlisted = self.book.unlisted if self.book.may_list and not self._ledger.ended else ()
        if not unlisted:
            self._unlisted_since_s = None
            return
        now_s, limit_s = time.monotonic(), self._config.start_timeout_s
        self._unlisted_since_s = now_s if self._unlisted_since_s is None else self._unlisted_since_s
        if now_s - self._unlisted_since_s > limit_s:
            cause = split_causes.of_silence(unlisted, self._config.sharded, limit_s, time.time())
            self._fail(cause, Outcome.NEVER_STARTED)

    def _fail(self, cause: Mapping[str, object], outcome: Outcome = Outcome.FAILED) -> None:
        self._failed = True
        self._ledger.fail({"process": "worker", "time_s": time.time(), **cause}, outcome)
        self._publish()


def _ended_ranks(state: JobState) -> list[int]:
    """Return the ranks whose processes have ended well, as their launchers say."""
    ended, first = [], 0
    for host in state.trainer_hosts:  # ranks are counted in this order
        for process in host.processes:
            kind, _, index = process.name.rpartition("-")
            if kind == "rank" and index.isdecimal() and process.state == "succeeded":
                ended.append(first + int(index))
        first += host.ranks
    return ended


async def _write(stream: PeerStream, context: grpc.aio.ServicerContext) -> None:
    await context.write(stream.welcome)
    while True:
        await stream.mail.wait()
        stream.mail.clear()
        if reply := stream.reply():  # no bytes: a message that says nothing
            await context.write(reply)


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    async for raw in requests:
        return raw
    raise ValueError("the stream ended before its hello")
