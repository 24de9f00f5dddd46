"""One feed as a rank sees it: the thread that reads from it, and what the feed is told of receipt and room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc

from hetero._proto import feed_pb2 as pb
from hetero.data.feed_lane import LaneReader
from hetero.data.feed_source import Queued
from hetero.data.feed_wire import SERVICE, Arrived, ReplyReader
from hetero.door import TOKEN_KEY
from hetero.errors import HeteroError
from hetero.tls import PLAIN, Tls, channel, explain, is_handshake

_PAUSE_FIRST_S, _PAUSE_FACTOR, _PAUSE_MOST_S = 0.05, 1.6, 1.0
_PATIENCE_S = 10.0  # after which it is said that nobody answers
_SAY_AFTER_S = 0.01  # what is not urgent is told this late, together with what has come up by then
_URGENT_PART = 4  # a part of the window that was received and not yet told: the feed keeps it until then
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the container's environment says
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 3000),  # how long an attempt to connect may take
    ("grpc.keepalive_time_ms", 20_000),  # a host that vanished without closing its connections is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class NotNow(Exception):
    """A feed sent what this rank has not asked for; it keeps what is not acknowledged and can send it again."""


class Wanted(NamedTuple):
    """What one feed may send now."""

    epoch: int
    window_bytes: int
    window_batches: int
    split: int


@dataclass(frozen=True)
class Reader:
    """Who reads: what a rank tells every feed about itself."""

    rank: int
    size: int
    run_id: str
    token: str | None = None
    tls: Tls = PLAIN


class Previous(NamedTuple):
    """What had arrived on the last stream from a feed: it must not give that to anybody else."""

    feed_id: str = ""
    received: int = 0


class Sink(Protocol):
    """Where what arrives goes; the client. All but the lock itself and `on_end` are called with the lock."""

    lock: threading.Lock

    def wanted(self, link: FeedLink) -> Wanted | None:
        """Return what a feed may send now; None: nothing yet."""
        ...

    def on_batch(self, stream: Stream, arrived: Arrived) -> None:
        """Take a batch. Raises NotNow if it cannot be taken."""
        ...

    def on_split_end(self, end: Any) -> None:
        """Take a SplitEnd."""
        ...

    def on_epoch_end(self, epoch: int) -> None:
        """Hear that all of an epoch has arrived (without the lock)."""
        ...

    def on_broken(self, error: HeteroError) -> None:
        """Hear that what a feed sent can never be used."""
        ...


class Stream:
    """One `Read` call: what has arrived on it, and what its feed was told. The client's lock guards it.

    Attributes:
        link: whose it is.
        over: nothing more comes on it, and nothing more can be said.
        received: batches and split ends that have arrived on it.
        feed_id: who answered; empty until then.
        queued_bytes: bytes of its batches that are not handed out.
        queued_batches: how many these are.
    """

    def __init__(self, link: FeedLink, lock: threading.Lock) -> None:
        self.link, self.over, self.received, self.feed_id = link, False, 0, ""
        self.queued_bytes = self.queued_batches = 0
        self._spoken = threading.Condition(lock)
        self._due_s: float | None = None
        self._epoch = -1
        self._consumed_bytes = self._consumed_batches = 0  # of that epoch
        self._unsaid_items = self._unsaid_received_bytes = 0
        self._unsaid_bytes = self._unsaid_batches = 0  # consumed
        self._window_bytes = self._window_batches = 0  # as the feed knows it

    def count(self, size: int = 0) -> None:
        """Note a batch or split end that has arrived, whatever becomes of it."""
        self.received += 1
        self._unsaid_items += 1
        self._unsaid_received_bytes += size
        self.say(
            urgent=_URGENT_PART * self._unsaid_items >= self._window_batches
            or _URGENT_PART * self._unsaid_received_bytes >= self._window_bytes
        )

    def charge(self, queued: Queued) -> None:
        """Note that a batch takes up room."""
        for holder in (self, self.link):
            holder.queued_bytes += queued.size
            holder.queued_batches += 1

    def give_back(self, queued: Queued) -> None:
        """Note that a batch takes up no room any more."""
        for holder in (self, self.link):
            holder.queued_bytes -= queued.size
            holder.queued_batches -= 1
        self.consume(queued.batch.epoch, queued.size)

    def consume(self, epoch: int, size: int) -> None:
        """Note that a batch, which may never have been queued, is not under way any more."""
        if epoch != self._epoch:
            return
        self._consumed_bytes += size
        self._consumed_batches += 1
        self._unsaid_bytes += size
        self._unsaid_batches += 1
        self.say(
            urgent=2 * self._unsaid_batches >= self._window_batches or 2 * self._unsaid_bytes >= self._window_bytes
        )

    def say(self, *, urgent: bool) -> None:
        """Have the newest state told, at once or soon."""
        if not self.feed_id:
            return  # the answer to `hello` comes first, and brings this about
        due_s = 0.0 if urgent else time.monotonic() + _SAY_AFTER_S
        if self._due_s is None or due_s < self._due_s:
            self._due_s = due_s
            self._spoken.notify()

    def end(self) -> None:
        """Nothing more is to be said."""
        self.over = True
        self._spoken.notify()

    def next_request(self, sink: Sink) -> bytes | None:
        """Wait until there is something to say; None after the end. Takes the lock."""
        with sink.lock:
            while not self.over:
                left_s = None if self._due_s is None else self._due_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return bytes(self._request(sink.wanted(self.link)).SerializeToString())
                self._spoken.wait(left_s)
        return None

    def _request(self, wanted: Wanted | None) -> pb.ReadRequest:
        self._due_s = None
        self._unsaid_items = self._unsaid_received_bytes = 0
        request = pb.ReadRequest(received=self.received)
        if wanted is None:
            return request
        if wanted.epoch != self._epoch:
            self._epoch = wanted.epoch
            self._consumed_bytes = self._consumed_batches = 0
        self._unsaid_bytes = self._unsaid_batches = 0
        self._window_bytes, self._window_batches = wanted.window_bytes, wanted.window_batches
        request.grant.epoch, request.grant.split = wanted.epoch, wanted.split
        request.grant.consumed_bytes, request.grant.consumed_batches = self._consumed_bytes, self._consumed_batches
        request.grant.window_bytes, request.grant.window_batches = wanted.window_bytes, wanted.window_batches
        return request


class FeedLink:
    """Reads from one data host's feed in a thread of its own, connecting again for ever, until `stop`.

    Args:
        host: the data host.
        address: its feed's "host:port".
        reader: who reads.
        sink: where what arrives goes.
        previous: what an earlier link to this host had received.

    Attributes:
        previous: what had arrived on the last stream that its feed answered; the client's lock guards it.
        stream: the newest one.
        queued_bytes: bytes of this link's batches, of streams that broke too, that are not handed out.
        queued_batches: how many these are.
    """

    def __init__(self, host: str, address: str, reader: Reader, sink: Sink, previous: Previous) -> None:
        self.host, self.previous = host, previous
        self.queued_bytes = self.queued_batches = 0
        self._address, self._reader, self._sink = address, reader, sink
        self.stream = Stream(self, sink.lock)
        self._changed = threading.Condition(sink.lock)  # another address, or the end
        self._call: Any = None
        self._stopped = False
        self._lane_ok = True
        self._complained, self._well_s = "", time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"hetero-feed-{host}", daemon=True)
        self._thread.start()

    def move(self, address: str) -> None:
        """Read from another address from now on, if it is another. Takes the lock."""
        with self._sink.lock:
            if address == self._address:
                return
            self._address, self._lane_ok = address, True
            self._changed.notify_all()
            call = self._call
        if call is not None:
            call.cancel()

    def stop(self) -> None:
        """End the thread soon. Takes the lock."""
        with self._sink.lock:
            self._stopped = True
            self.stream.end()
            self._changed.notify_all()
            call = self._call
        if call is not None:
            call.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = _PAUSE_FIRST_S
        while True:
            with self._sink.lock:
                if self._stopped:
                    return
                address = self._address
                stream = self.stream = Stream(self, self._sink.lock)
            began_s = time.monotonic()
            problem = self._try(stream, address)
            if stream.received or time.monotonic() - began_s > _PAUSE_MOST_S:
                pause_s = _PAUSE_FIRST_S
            with self._sink.lock:
                if self._stopped or address != self._address:
                    continue
                if problem is not None:
                    self._complain(address, problem)
                self._changed.wait(pause_s)
            pause_s = min(pause_s * _PAUSE_FACTOR, _PAUSE_MOST_S)

    def _try(self, stream: Stream, address: str) -> str | None:
        """Read one stream to its end. Returns what went wrong, if it is worth a word."""
        connection: Any = None
        try:
            connection = channel(address, _OPTIONS, self._reader.tls)
            return self._read(stream, address, connection)
        except grpc.RpcError as error:
            code = error.code()
            said = explain(
                f"{code.name}: {error.details()}",
                self._reader.tls,
                worked=bool(stream.feed_id or self.previous.feed_id),
            )
            # An address that nobody answers at is ordinary while a feed is replaced.
            ordinary = code is grpc.StatusCode.UNAVAILABLE and not is_handshake(said)
            if code is grpc.StatusCode.CANCELLED or (ordinary and time.monotonic() - self._well_s < _PATIENCE_S):
                return None
            return said
        except (HeteroError, NotNow, OSError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # a thread that ends in silence would leave the rank waiting for ever
            self._break(address, error)
            return None
        finally:
            with self._sink.lock:
                self._call = None
                stream.end()
                if stream.feed_id:
                    self.previous = Previous(stream.feed_id, stream.received)
            if connection is not None:
                connection.close()

    def _read(self, stream: Stream, address: str, connection: Any) -> str | None:
        metadata = ((TOKEN_KEY, self._reader.token),) if self._reader.token else ()
        call = connection.stream_stream(f"/{SERVICE}/Read", None, None)(self._requests(stream), metadata=metadata)
        with self._sink.lock:
            self._call = call
            late = self._stopped or address != self._address
        if late:
            call.cancel()
            return None
        replies = ReplyReader()
        for message in call:
            content = replies.read(message)
            self._take(stream, content)
            if isinstance(content, pb.Welcome) and content.HasField("lane"):
                self._read_lane(stream, address, call, content.lane)
            del message, content  # or the last batch would stay in memory until the next one comes
        return None

    def _read_lane(self, stream: Stream, address: str, call: Any, offer: Any) -> None:
        """Read the lane beside a call to its end, which is the call's, too."""
        host = address.rpartition(":")[0].strip("[]")
        try:
            lane = LaneReader((host, offer.port), offer.ticket)
        except OSError as error:
            if not call.is_active():  # the feed itself is gone
                return
            self._lane_ok = False  # as long as the feed stays where it is
            print(
                f"The feed of {self.host} is read on its call alone, at more CPU a batch: "
                f"port {offer.port} of {host} cannot be reached ({error}).",
                flush=True,
            )
            call.cancel()
            return
        try:
            if call.add_callback(lane.end):  # else it has ended already
                while (content := lane.read()) is not None:
                    self._take(stream, content)
                    del content
        except OSError:
            pass  # how the call ends tells why
        finally:
            lane.close()
            call.cancel()

    def _requests(self, stream: Stream) -> Iterator[bytes]:
        reader, previous = self._reader, self.previous
        hello = pb.ReadHello(
            rank=reader.rank,
            size=reader.size,
            run_id=reader.run_id,
            feed_id=previous.feed_id,
            received=previous.received,
            lane=self._lane_ok and not reader.tls.enabled,
        )
        yield pb.ReadRequest(hello=hello).SerializeToString()
        while (request := stream.next_request(self._sink)) is not None:
            yield request

    def _take(self, stream: Stream, content: Any) -> None:
        if content is None:
            return
        if isinstance(content, pb.EpochEnd):
            self._sink.on_epoch_end(content.epoch)
            return
        with self._sink.lock:
            if isinstance(content, pb.Welcome):
                # Not before: what comes on a stream is counted from the feed's answer on, and a grant lets it come.
                stream.feed_id = content.feed_id
                self._well_s = time.monotonic()
                stream.say(urgent=True)
            elif not stream.feed_id:
                raise NotNow("a reply before `welcome`")
            elif isinstance(content, Arrived):
                self._sink.on_batch(stream, content)
                stream.count(content.size)
            else:
                self._sink.on_split_end(content)
                stream.count()

    def _break(self, address: str, error: Exception) -> None:
        broken = HeteroError(
            f"Rank {self._reader.rank} cannot use what the feed of {self.host} at {address} sent: {error!r}. "
            "Look whether all hosts run the same version of hetero and of the job."
        )
        broken.__cause__ = error
        with self._sink.lock:
            self._stopped = True
            self._sink.on_broken(broken)

    def _complain(self, address: str, problem: str) -> None:
        if problem != self._complained:
            self._complained = problem
            print(
                f"The feed of {self.host} at {address} does not serve this rank, which goes on trying: {problem}",
                flush=True,
            )
