"""The ranks' streams of a feed: who gets which batch, what has arrived, and what of it must be sent again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from hetero._proto import feed_pb2 as pb
from hetero._proto import splits_pb2
from hetero.data.feed_queue import ReadyQueue
from hetero.data.feed_splits import HeldSplit, ReadyBatch
from hetero.data.feed_wire import reply
from hetero.data.feed_wires import Wire

ENDED_TOLD = 16
"""A rank that connects is told the end of so many epochs, the newest; of others when it asks for their batches."""


class Misfit(Exception):
    """A rank that is none of this job's."""


class _Window:
    """What a rank lets come, and what of it is under way; of one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.split = epoch, -1
        self.bytes = self.batches = 0  # the window itself
        self.consumed_bytes = self.consumed_batches = 0
        self.sent_bytes = self.sent_batches = 0
        self.received_bytes = self.received_batches = 0

    def update(self, grant: pb.Grant) -> None:
        """Take the newest grant. Raises ValueError if it cannot be."""
        numbers = (grant.consumed_bytes, grant.consumed_batches, grant.window_bytes, grant.window_batches)
        if min(numbers) < 0 or grant.consumed_batches > self.sent_batches or grant.consumed_bytes > self.sent_bytes:
            raise ValueError(
                f"a grant of {numbers} (consumed bytes and batches, window of bytes and batches) "
                f"where {self.sent_bytes} bytes in {self.sent_batches} batches of epoch {self.epoch} were sent"
            )
        self.consumed_bytes, self.consumed_batches, self.bytes, self.batches = numbers
        self.split = grant.split

    def admits(self, size: int) -> bool:
        """Whether a batch of `size` bytes may be sent; what is not acknowledged takes up room: it is kept."""
        batches = self.sent_batches - min(self.consumed_batches, self.received_batches)
        outstanding = self.sent_bytes - min(self.consumed_bytes, self.received_bytes)
        if batches == 0:
            return self.batches > 0
        return batches < self.batches and outstanding + size <= self.bytes


class RankStream:
    """One open `Read` call. Not made by its users.

    Attributes:
        rank: whose it is.
        name: what its `welcome` says; another one for each stream, so that `received` cannot be taken for another's.
        replaced: done once a newer stream of the rank has taken its place.
    """

    def __init__(self, rank: int, name: str, lane: pb.Lane | None = None) -> None:
        self.rank, self.name = rank, name
        self.replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.window = _Window(-1)
        self.unreceived: deque[ReadyBatch | HeldSplit] = deque()  # as sent; a split stands for the word of its end
        self.handed = self.received = 0  # of these, in total: handed to gRPC whole; arrived
        self.notices = deque([reply(welcome=pb.Welcome(feed_id=name, lane=lane))])
        self.ends: deque[HeldSplit] = deque()
        self.batch: ReadyBatch | None = None  # next to be sent
        self.is_writing = False
        self.told_ended: set[int] = set()
        self.wake = asyncio.Event()

    def may_take(self, epoch: int) -> bool:
        """Whether it could send a batch of this epoch now, if that is small enough."""
        return self.window.epoch == epoch and self.batch is None and not self.is_writing and self.window.admits(0)

    @property
    def is_short(self) -> bool:
        """Whether it would send a batch, and its rank has less than half of what it lets come."""
        window = self.window
        ahead = window.sent_batches - window.consumed_batches
        return window.epoch >= 0 and self.may_take(window.epoch) and 2 * ahead <= window.batches

    def tell_ended(self, epoch: int) -> None:
        """Say, once, that an epoch has ended."""
        if epoch not in self.told_ended:
            self.told_ended.add(epoch)
            self.notices.append(reply(epoch_end=pb.EpochEnd(epoch=epoch)))
            self.wake.set()


class Streams:
    """Deals ready batches to the ranks' streams. Implements `Outlet`; belongs to one event loop.

    A batch goes to the rank that has had fewest of its epoch, among those whose stream is idle and has room for it: a
    rank that takes nothing holds up nobody. What a stream that breaks has sent is kept until its rank is back and says
    how much of it has arrived.

    Args:
        run_id: of the job.
        feed_id: another one after each start of the feed.
        deterministic: whether batches have fixed ranks and splits' ends are told.
    """

    def __init__(self, run_id: str, feed_id: str, *, deterministic: bool) -> None:
        self._run_id, self._feed_id, self._deterministic = run_id, feed_id, deterministic
        self._queue = ReadyQueue(deterministic=deterministic)
        self._streams: dict[int, RankStream] = {}
        self._parted: dict[int, RankStream] = {}  # broken ones whose ranks have not come back yet
        self._opened = 0
        self._ended_splits: dict[int, dict[int, HeldSplit]] = {}  # in deterministic jobs; by epoch and split
        self._ended_epochs: dict[int, None] = {}  # a set in order
        self._totals: dict[int, tuple[int, int]] = {}  # rows and batches that arrived, by rank

    # --- what a call does ---------------------------------------------------------------------------------------------

    def open(self, hello: pb.ReadHello, lane: pb.Lane | None = None) -> RankStream:
        """Take in a rank, in place of its older stream if there is one.

        Args:
            hello: what it says.
            lane: that it is offered, if any.

        Raises:
            Misfit: it belongs to another run, or its rank does not fit.
            ValueError: what it claims to have received was never sent.
        """
        self._check(hello)
        previous = self._streams.get(hello.rank) or self._parted.get(hello.rank)
        arrived = 0
        if previous is not None and hello.feed_id == previous.name:
            arrived = self._newly_arrived(previous, hello.received)
        if self._queue.size == 0:
            self._queue.set_size(hello.size)
        self._opened += 1
        stream = RankStream(hello.rank, f"{self._feed_id}/{self._opened}", lane)
        if previous is not None:
            self.close(previous)
            self._parted.pop(hello.rank, None)
            self._receive(previous, arrived)
            lost = [item for item in previous.unreceived if isinstance(item, ReadyBatch) and not item.dropped]
            self._queue.put_back(lost, hello.rank)
            if not previous.replaced.done():
                previous.replaced.set_result(None)
        self._streams[hello.rank] = stream
        for epoch in list(self._ended_epochs)[-ENDED_TOLD:]:
            stream.tell_ended(epoch)
        self._deal()
        return stream

    def take(self, stream: RankStream, request: pb.ReadRequest) -> None:
        """Do what a rank says.

        Raises:
            ValueError: it cannot be: the rank has lost count.
        """
        if request.HasField("hello"):
            raise ValueError("a second hello on one stream")
        if request.received:
            self._receive(stream, self._newly_arrived(stream, request.received))
        if request.HasField("grant"):
            self._grant(stream, request.grant)
        self._deal()

    def close(self, stream: RankStream) -> None:
        """Send nothing more on a stream. What it has sent is kept for the rank's next hello. May be repeated."""
        if self._streams.get(stream.rank) is not stream:
            return
        del self._streams[stream.rank]
        self._parted[stream.rank] = stream
        self._take_back(stream)
        self._deal()

    async def write(self, stream: RankStream, wire: Wire) -> None:
        """Send what is there for a stream, until cancelled.

        Args:
            stream: which.
            wire: sends it; what that raises is raised.
        """
        while True:
            if stream.notices:
                await wire.reply(stream.notices.popleft())
            elif stream.ends:
                end = stream.ends.popleft()
                stream.unreceived.append(end)
                stream.handed += 1
                said = pb.SplitEnd(epoch=end.epoch, split=end.split, attempt=end.attempt, batches=end.total)
                await wire.reply(reply(split_end=said))
            elif stream.batch is not None:
                await self._write_batch(stream, stream.batch, wire)
                self._deal()
            else:
                stream.wake.clear()
                await stream.wake.wait()

    # --- what splits do -----------------------------------------------------------------------------------------------

    @property
    def ranks_to_tell(self) -> int:
        """How many ranks have to know that a split has ended; one more than is known of as long as none has come."""
        return max(1, self._queue.size) if self._deterministic else 0

    def put(self, batch: ReadyBatch) -> None:
        """A batch is ready."""
        self._queue.put(batch)
        self._deal()

    def end(self, split: HeldSplit) -> None:
        """A split will have no more batches."""
        if not self._deterministic:
            return
        self._ended_splits.setdefault(split.epoch, {})[split.split] = split
        for stream in self._streams.values():
            if stream.window.epoch == split.epoch:
                stream.ends.append(split)
                stream.wake.set()

    def forget(self, split: HeldSplit) -> None:
        """A split is given up; the word of its end that is under way is harmless."""
        self._queue.forget(split)
        self._ended_splits.get(split.epoch, {}).pop(split.split, None)
        for stream in self._streams.values():
            with contextlib.suppress(ValueError):
                stream.ends.remove(split)

    def end_epoch(self, epoch: int) -> None:
        """Nothing more is wanted of an epoch."""
        self._queue.end_epoch(epoch)
        self._ended_splits.pop(epoch, None)
        self._ended_epochs[epoch] = None
        for stream in self._streams.values():
            stream.tell_ended(epoch)

    @property
    def is_short(self) -> bool:
        """Whether a rank would take a batch and none is finished."""
        return not self._queue.epochs() and any(stream.is_short for stream in self._streams.values())

    def arrived(self) -> tuple[int, int]:
        """Return the rows and batches that have arrived at ranks."""
        totals = self._totals.values()
        return sum(rows for rows, _ in totals), sum(batches for _, batches in totals)

    def stats(self) -> list[splits_pb2.RankStats]:
        """Return what has arrived at each rank, and what it has not taken yet."""
        ranks = []
        for rank, (rows, batches) in sorted(self._totals.items()):
            stats = splits_pb2.RankStats(rank=rank, rows=rows, batches=batches, epoch=-1)
            if rank in self._streams:
                window = self._streams[rank].window
                stats.epoch = window.epoch
                stats.waiting_batches = window.sent_batches - window.consumed_batches
                stats.waiting_bytes = window.sent_bytes - window.consumed_bytes
            ranks.append(stats)
        return ranks

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, hello: pb.ReadHello) -> None:
        if hello.run_id != self._run_id:
            raise Misfit(f"run {hello.run_id!r} is not served here; this is the feed of run {self._run_id!r}")
        size = self._queue.size or hello.size
        if hello.size != size or not 0 <= hello.rank < size:
            raise Misfit(f"rank {hello.rank} of {hello.size} does not fit a job of {size} ranks")

    @staticmethod
    def _newly_arrived(stream: RankStream, received: int) -> int:
        if not stream.received <= received <= stream.handed:
            raise ValueError(
                f"rank {stream.rank} says that {received} replies have arrived, "
                f"where {stream.handed} were sent and {stream.received} had arrived before"
            )
        return received - stream.received

    def _receive(self, stream: RankStream, count: int) -> None:
        stream.received += count
        rows, batches = self._totals.get(stream.rank, (0, 0))
        for _ in range(count):
            item = stream.unreceived.popleft()
            if isinstance(item, HeldSplit):
                item.end_received(stream.rank)
                continue
            if item.split.epoch == stream.window.epoch:
                stream.window.received_batches += 1
                stream.window.received_bytes += item.size
            rows, batches = rows + item.rows, batches + 1
            item.received()
        self._totals[stream.rank] = rows, batches

    def _grant(self, stream: RankStream, grant: pb.Grant) -> None:
        if grant.epoch < max(0, stream.window.epoch):
            raise ValueError(f"a grant of epoch {grant.epoch} after one of epoch {stream.window.epoch}")
        is_new = grant.epoch != stream.window.epoch
        window = _Window(grant.epoch) if is_new else stream.window
        window.update(grant)
        if not is_new:
            return
        stream.window = window
        self._take_back(stream)  # whatever else it was to get is of an epoch that it has left
        ended = self._ended_splits.get(grant.epoch, {}).values()
        stream.ends = deque(split for split in ended if stream.rank not in split.told)
        stream.wake.set()
        if grant.epoch in self._ended_epochs:
            stream.tell_ended(grant.epoch)

    def _take_back(self, stream: RankStream) -> None:
        batch, stream.batch = stream.batch, None
        if batch is not None and not batch.dropped:
            self._queue.put_back([batch], stream.rank)

    def _deal(self) -> None:
        """Give each idle stream its next batch, lowest epoch first."""
        for epoch in self._queue.epochs():
            idle = [stream for stream in self._streams.values() if stream.may_take(epoch)]
            idle.sort(key=lambda stream: (self._queue.given(stream.window.epoch, stream.rank), stream.rank))
            for stream in idle:
                batch = self._queue.head(epoch, stream.rank, stream.window.split)
                if batch is not None and stream.window.admits(batch.size):
                    self._queue.take(batch, stream.rank)
                    stream.batch = batch
                    stream.wake.set()

    @staticmethod
    async def _write_batch(stream: RankStream, batch: ReadyBatch, wire: Wire) -> None:
        stream.batch = None
        if batch.dropped:
            return
        stream.window.sent_batches += 1
        stream.window.sent_bytes += batch.size
        stream.unreceived.append(batch)
        stream.is_writing = True
        payload = batch.hold()

        def on_last() -> None:
            stream.handed += 1

        try:
            await wire.batch(batch, payload, on_last)
        finally:
            stream.is_writing = False
            batch.release()
