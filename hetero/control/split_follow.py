"""A rank's stream to the split book: says which epochs it reads, obeys fences, hears when an epoch is over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from hetero import tls as transport
from hetero._proto import splits_pb2 as pb
from hetero.control.channel import CHANNEL_OPTIONS, details, metadata_of, retry_pauses_s
from hetero.errors import SettingsError
from hetero.tls import PLAIN, Tls

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
BYE_S = 1.0
"""How long `close` tries to tell the coordinator."""
JOIN_S = 5.0
_PATH = "/hetero.v1.Splits/Follow"


class FollowListener(Protocol):
    """What a rank does with the split book's words; called from the follower's threads."""

    def on_fence(self, epoch: int, attempt: int, splits: Sequence[int]) -> Mapping[int, bytes]:
        """Refuse these splits' batches of attempts up to `attempt` from now on; return bitmaps of what has arrived."""

    def on_epoch_end(self, epoch: int) -> None:
        """Every batch of the epoch is at some rank, or nobody wants the rest. May be called more than once."""

    def highest_attempt(self) -> int:
        """Return the highest attempt seen, 0 at first."""

    def stats(self) -> pb.RankStats:
        """Return the figures now; asked about once a second."""


class SplitFollower:
    """A thread that keeps a rank's stream open, through restarts of the coordinator, until `close`.

    Args:
        address: The coordinator's "host:port", or what tells where it is now.
        token: The job's shared secret, None if it has none.
        rank: This rank.
        size: Number of ranks.
        run_id: Name of the run.
        listener: Told what the book says.
        stray_channels: Channels that are spread over the hosts and of which this host has files.
        cluster: What the hosts of the job know themselves by.
        tls: Whether and with what to encrypt.

    Raises:
        SettingsError: The token has characters that cannot be sent.
    """

    def __init__(  # noqa: PLR0917 - who, where and to whom; always given by position
        self,
        address: str | Callable[[], str],
        token: str | None,
        rank: int,
        size: int,
        run_id: str,
        listener: FollowListener,
        *,
        stray_channels: Sequence[str] = (),
        cluster: str | None = None,
        tls: Tls = PLAIN,
    ) -> None:
        self._address: Callable[[], str] = (lambda: str(address)) if isinstance(address, str) else address
        self._metadata, self._tls = metadata_of(token, cluster), tls
        self._rank, self._size, self._run_id, self._listener = rank, size, run_id, listener
        self._stray_channels = tuple(stray_channels)
        self._changed = threading.Condition()
        # Said anew after each reconnection; epochs that have ended move to `_ended`.
        self._begun: set[int] = set()
        self._left: set[int] = set()
        self._ended: set[int] = set()
        self._obeyed: dict[int, dict[int, int]] = {}  # by epoch and split: the highest attempt refused
        self._outbox = pb.FollowRequest()
        self._stream = 0  # number of the newest one
        self._call: Any = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hetero-follow", daemon=True)
        self._thread.start()

    def begin(self, epoch: int) -> None:
        """Say that this rank reads an epoch, or is about to. Returns at once; may be repeated."""
        with self._changed:
            if epoch not in self._begun and epoch not in self._ended:
                self._begun.add(epoch)
                self._outbox.begun.append(epoch)
                self._changed.notify_all()

    def leave(self, epoch: int) -> None:
        """Say that this rank takes nothing more of an epoch. Returns at once; may be repeated."""
        with self._changed:
            if epoch not in self._left and epoch not in self._ended:
                self._left.add(epoch)
                self._outbox.left.append(epoch)
                self._changed.notify_all()

    def close(self) -> None:
        """Say goodbye and end all threads; takes at most a few seconds. May be repeated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            return
        self._thread.join(BYE_S)
        with self._changed:
            call = self._call
        if self._thread.is_alive() and call is not None:
            call.cancel()
        self._thread.join(JOIN_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pauses, heard, complained, worked = retry_pauses_s(), False, False, False
        while not self._closed:
            try:
                with transport.channel(self._address(), CHANNEL_OPTIONS, self._tls) as channel:
                    for reply in self._connect(channel):
                        if not heard and complained:
                            logger.info("rank %d follows the coordinator again", self._rank)
                        pauses, heard, complained, worked = retry_pauses_s(), True, False, True
                        self._take(reply)
            except (grpc.RpcError, SettingsError) as error:  # SettingsError: a TLS file is being replaced
                if not self._closed and not complained:
                    what = transport.explain(details(error), self._tls, worked=worked)
                    logger.warning("rank %d has lost the coordinator, trying on: %s", self._rank, what)
                    complained = True
            except Exception:  # a mistake of the listener's: the book says it again on the next stream
                logger.exception("rank %d cannot do what the coordinator says, trying again", self._rank)
            heard = False
            with self._changed:
                self._stream += 1  # ends the requests of the old stream
                self._call = None
                self._changed.notify_all()
                if not self._closed:
                    self._changed.wait_for(lambda: self._closed, next(pauses))

    def _connect(self, channel: grpc.Channel) -> Iterator[pb.FollowReply]:
        with self._changed:
            self._stream += 1
            method = channel.stream_stream(
                _PATH,
                request_serializer=pb.FollowRequest.SerializeToString,
                response_deserializer=pb.FollowReply.FromString,
            )
            call: Iterator[pb.FollowReply] = method(self._requests(self._stream), metadata=self._metadata)
            self._call = call
            return call

    def _requests(self, stream: int) -> Iterator[pb.FollowRequest]:
        """Yield what there is to say on one stream; runs in a thread of gRPC's."""
        yield self._hello()
        stats_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or stream != self._stream or self._outbox.ListFields(),
                    max(0.0, stats_s - time.monotonic()),
                )
                if stream != self._stream:
                    return
                request, self._outbox = self._outbox, pb.FollowRequest()
                request.bye = closed = self._closed
            if time.monotonic() >= stats_s:
                stats_s = time.monotonic() + STATS_INTERVAL_S
                self._add_stats(request)
            if request.ListFields():
                yield request
            if closed:
                return

    def _hello(self) -> pb.FollowRequest:
        with self._changed:
            self._outbox = pb.FollowRequest()  # all of it is in what follows, or is asked for again
            hello = pb.FollowHello(rank=self._rank, size=self._size, run_id=self._run_id, ended=sorted(self._ended))
            hello.stray_channels.extend(self._stray_channels)
            for epoch, floors in self._obeyed.items():
                by_attempt: dict[int, list[int]] = {}
                for split, attempt in floors.items():
                    by_attempt.setdefault(attempt, []).append(split)
                for attempt, splits in by_attempt.items():
                    hello.obeyed.add(epoch=epoch, attempt=attempt, splits=splits)
            request = pb.FollowRequest(hello=hello, begun=sorted(self._begun), left=sorted(self._left))
        request.hello.highest_attempt = self._listener.highest_attempt()
        return request

    def _add_stats(self, request: pb.FollowRequest) -> None:
        try:
            request.stats.CopyFrom(self._listener.stats())
        except Exception:  # figures are for people; the stream is for the job
            logger.exception("rank %d cannot tell its figures", self._rank)
        request.stats.rank = self._rank

    def _take(self, reply: pb.FollowReply) -> None:
        for fence in reply.fences:
            with self._changed:  # before it is done: a coordinator that hears of one fence too many only repeats work
                floors = self._obeyed.setdefault(fence.epoch, {})
                floors.update({split: max(fence.attempt, floors.get(split, 0)) for split in fence.splits})
            arrived = self._listener.on_fence(fence.epoch, fence.attempt, tuple(fence.splits))
            answer = pb.Fenced(id=fence.id)
            for split, batches in arrived.items():
                answer.arrived.add(split=split, batches=batches)
            with self._changed:
                self._outbox.fenced.append(answer)
                self._changed.notify_all()
        for epoch in reply.epochs_ended:
            with self._changed:
                self._ended.add(epoch)
                self._begun.discard(epoch)
                self._left.discard(epoch)
                self._obeyed.pop(epoch, None)
            self._listener.on_epoch_end(epoch)
