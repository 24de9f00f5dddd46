"""The grpc engine as a rank sees it: batches from the feeds of all data hosts, epoch by epoch, each batch once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hetero._proto import splits_pb2 as pb
from hetero.data.arrivals import Arrivals
from hetero.data.feed_link import FeedLink, NotNow, Previous, Reader, Stream, Wanted
from hetero.data.feed_source import ANY_SPLIT, AnyOrder, FeedSource, Queued, SplitOrder
from hetero.data.feed_wire import Arrived
from hetero.errors import HeteroError
from hetero.process.heap import keep_freed_memory
from hetero.tls import PLAIN, Tls

_POLL_S = 0.25
_CLOSE_S = 5.0
_BATCHES = 32  # in the windows of all feeds together


class Follower(Protocol):
    """Tells the coordinator which epochs this rank reads; returns at once."""

    def begin(self, epoch: int) -> None:
        """This rank is about to read an epoch."""
        ...

    def leave(self, epoch: int) -> None:
        """It takes nothing more of an epoch."""
        ...


class FeedClient:
    """Reads from every feed that there is. One for a rank and a whole run; it starts threads and `close` ends them.

    Memory: batches that have arrived and are not handed out take at most half of `prefetch_bytes`, or one batch a feed
    if that is more, and are at most 32, or two a feed. A batch that has arrived is acknowledged at once, however long
    it waits: it is this rank's from then on.

    What hears from the coordinator calls `on_fence`, `on_epoch_end`, `highest_attempt` and `stats`, from any thread.

    Args:
        rank: this rank.
        size: number of ranks.
        run_id: as all hosts of the run know it.
        token: the job's secret, if it has one.
        feeds: gives the feeds' addresses, "host:port" by data host, as they are now; asked every 0.25 s.
        prefetch_bytes: what the rank may read ahead; the other half is for full batches (`InputStream`).
        deterministic: hand batches out in an order that is the same in every run.
        tls: whether and with what connections are encrypted.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        run_id: str,
        token: str | None,
        *,
        feeds: Callable[[], Mapping[str, str]],
        prefetch_bytes: int,
        deterministic: bool,
        tls: Tls = PLAIN,
    ) -> None:
        keep_freed_memory()
        self.lock = threading.Lock()  # guards everything below, the links' streams and the sources' batches
        self._rank, self._size, self._deterministic = rank, size, deterministic
        self._reader = Reader(rank, size, run_id, token, tls)
        self._feeds, self._window_bytes = feeds, prefetch_bytes // 2
        self._arrived = threading.Condition(self.lock)
        self._arrivals = Arrivals()
        self._follower: Follower | None = None
        self._source: FeedSource | None = None  # the one that is being read
        self._begun = -1  # the newest epoch that was
        self._asked = ANY_SPLIT
        self._ended: set[int] = set()
        self._links: dict[str, FeedLink] = {}
        self._past: list[FeedLink] = []  # links whose threads are about to end
        self._previous: dict[str, Previous] = {}  # of hosts that have no link just now
        self._queued_bytes = 0
        self._rows = self._batches = 0
        self._error: HeteroError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"hetero-feeds-{rank}", daemon=True)
        self._thread.start()

    def attach(self, follower: Follower) -> None:
        """Say to whom epochs are begun and left. Before the first `open`."""
        self._follower = follower

    def open(self, epoch: int) -> FeedSource:
        """Announce an epoch, so that data hosts may prepare it. Its batches come once the source is iterated.

        Raises:
            HeteroError: nobody is attached who could tell the coordinator.
        """
        if self._follower is None:
            raise HeteroError(f"Epoch {epoch} cannot be opened before a follower is attached to the feed client.")
        self._follower.begin(epoch)
        order = SplitOrder(epoch, self._rank, self._size, self._arrivals) if self._deterministic else AnyOrder()
        return FeedSource(epoch, order, self)

    def close(self) -> None:
        """End all streams and threads; whoever waits for a batch gets an error. May be repeated, from any thread."""
        self._closed.set()
        with self.lock:
            links = [*self._links.values(), *self._past]
            self._arrived.notify_all()
        for link in links:
            link.stop()
        deadline = time.monotonic() + _CLOSE_S
        self._thread.join(_CLOSE_S)
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))

    def on_fence(self, epoch: int, attempt: int, splits: Sequence[int]) -> Mapping[int, bytes]:
        """Take no batch of these splits any more whose attempt is not above `attempt`.

        Returns:
            By split, the bitmap of the batches that have arrived; splits without any are left out.
        """
        with self.lock:
            return self._arrivals.fence(epoch, attempt, splits)

    def on_epoch_end(self, epoch: int) -> None:
        """Hear that every batch of an epoch has arrived at some rank: what is here is the rest."""
        with self.lock:
            self._ended.add(epoch)
            self._arrived.notify_all()

    def highest_attempt(self) -> int:
        """Return the greatest number of an attempt heard of."""
        with self.lock:
            return self._arrivals.highest_attempt

    def stats(self) -> pb.RankStats:
        """Return what has arrived so far, and what of it is not handed out."""
        with self.lock:
            source = self._source
            return pb.RankStats(
                rank=self._rank,
                rows=self._rows,
                batches=self._batches,
                waiting_batches=0 if source is None else source.order.batches,
                waiting_bytes=0 if source is None else source.order.bytes,
                epoch=-1 if source is None else source.epoch,
            )

    # What sources call.

    def begin(self, source: FeedSource) -> None:
        """Let the batches of a source's epoch come. One epoch is read at a time: an earlier one is left."""
        with self.lock:
            if source.closed or source is self._source:
                return
            if source.epoch <= self._begun:
                raise HeteroError(f"Epoch {source.epoch} was read before (newest: {self._begun}).")
            earlier, self._source, self._begun = self._source, source, source.epoch
            self._asked = source.order.asked()
            self._say()
        if earlier is not None:
            self.leave(earlier)

    def take(self, source: FeedSource) -> Any:
        """Wait for a source's next batch; StopIteration after the last."""
        with self.lock:
            while True:
                if source.closed:
                    raise StopIteration
                if self._error is not None:
                    raise self._error
                if self._closed.is_set():
                    raise HeteroError(f"Epoch {source.epoch} ended early: the feed client was closed.")
                ended = source.epoch in self._ended
                queued = source.order.pop(ended=ended)
                if queued is not None:
                    self._give_back(queued)
                    return queued.data
                if ended:
                    raise StopIteration
                # Those that are here wait for one that is not: their room must not be what it waits for.
                for other in source.order.held():
                    self._give_back(other)
                self._arrived.wait()

    def leave(self, source: FeedSource) -> None:
        """Take no more of a source's epoch."""
        with self.lock:
            if source.closed:
                return
            source.closed = True
            self._drop(source)
            self._arrived.notify_all()
        if self._follower is not None:
            self._follower.leave(source.epoch)

    # What links call, with the lock.

    def wanted(self, link: FeedLink) -> Wanted | None:
        """Return what a feed may send now.

        An equal share of the window; what is queued of streams that broke takes up room of it, too.
        """
        source = self._source
        if source is None or self._links.get(link.host) is not link:
            return None
        stream, feeds = link.stream, len(self._links)
        batches = max(2, _BATCHES // feeds)
        orphans = self._queued_bytes - sum(other.queued_bytes for other in self._links.values())
        room_bytes = (self._window_bytes - orphans) // feeds - (link.queued_bytes - stream.queued_bytes)
        room_batches = batches - (link.queued_batches - stream.queued_batches)
        if link.queued_batches > stream.queued_batches and min(room_bytes, room_batches) <= 0:
            return None  # or each stream that breaks would leave another batch
        return Wanted(source.epoch, max(room_bytes, 1), max(room_batches, 1), source.order.asked())

    def on_batch(self, stream: Stream, arrived: Arrived) -> None:
        """Take a batch if it is new and none that is refused."""
        epoch, split, sequence, attempt = arrived.batch
        if epoch > self._begun:
            raise NotNow(f"a batch of epoch {epoch}, and this rank has begun epoch {self._begun}")
        source = self._source
        if new := self._arrivals.accept(epoch, split, sequence, attempt):
            self._batches += 1
            self._rows += arrived.rows
        if not new or source is None or source.epoch != epoch:  # the last: of an epoch that was left
            stream.consume(epoch, arrived.size)
            return
        queued = Queued(arrived.batch, arrived.size, arrived.data, stream)
        source.order.put(queued)
        self._queued_bytes += queued.size
        stream.charge(queued)
        self._arrived.notify_all()
        self._see_asked(source)

    def on_split_end(self, end: Any) -> None:
        """Take the number of a split's batches."""
        if self._arrivals.accept_end(end.epoch, end.split, end.attempt, end.batches) and self._source is not None:
            self._arrived.notify_all()
            self._see_asked(self._source)

    def on_broken(self, error: HeteroError) -> None:
        """Have the consumer hear of it."""
        self._error = self._error or error
        self._arrived.notify_all()

    def _give_back(self, queued: Queued) -> None:
        """Let a batch's room be used again."""
        stream, queued.stream = queued.stream, None
        if stream is None:
            return
        self._queued_bytes -= queued.size
        stream.give_back(queued)
        if stream.over:
            self._say()  # what it left took up room of others

    def _drop(self, source: FeedSource) -> None:
        for queued in source.order.held():
            self._give_back(queued)
        source.order.clear()
        if self._source is source:
            self._source = None

    def _see_asked(self, source: FeedSource) -> None:
        asked = source.order.asked()
        if asked != self._asked:
            self._asked = asked
            self._say()

    def _say(self) -> None:
        for link in self._links.values():
            link.stream.say(urgent=True)

    def _watch(self) -> None:
        """Keep a link for every feed that there is; the body of a thread."""
        while not self._closed.is_set():
            try:
                feeds = dict(self._feeds())
            except Exception as error:  # whoever tells the addresses may be connecting again
                print(f"warning: rank {self._rank} cannot learn the feeds' addresses just now: {error!r}", flush=True)
            else:
                self._follow(feeds)
            self._closed.wait(_POLL_S)

    def _follow(self, feeds: Mapping[str, str]) -> None:
        gone = [link for host, link in self._links.items() if host not in feeds]  # only this thread changes them
        for link in gone:
            link.stop()
        for host, link in self._links.items():
            if host in feeds:
                link.move(feeds[host])
        with self.lock:
            for link in gone:
                self._past.append(self._links.pop(link.host))
            for link in [link for link in self._past if link.ended]:
                self._past.remove(link)
                self._previous[link.host] = link.previous
            leaving = {link.host for link in self._past}  # they may still receive
            new = set() if self._closed.is_set() else feeds.keys() - self._links.keys() - leaving
            for host in sorted(new):
                previous = self._previous.pop(host, Previous())
                self._links[host] = FeedLink(host, feeds[host], self._reader, self, previous)
            if gone or new:
                self._say()
