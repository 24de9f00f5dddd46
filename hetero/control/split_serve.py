"""A feed's stream to the split book: asks for splits, tells what became of them, hears what is not its own any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from hetero import tls as transport
from hetero._proto import splits_pb2 as pb
from hetero.control.channel import CHANNEL_OPTIONS, details, metadata_of, retry_pauses_s
from hetero.errors import SettingsError
from hetero.tls import PLAIN, Tls

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
MAX_LIST_BYTES = 15 * 1024 * 1024
_WHY_IS_LOST = "Internal error from Core"  # gRPC's word for a write that fails as the call ends, not for why it did
_REFUSAL_S = 0.25  # for a refusal to come, where a write would hide it
_PATH = "/hetero.v1.Splits/Serve"


class ServeListener(Protocol):
    """What a feed does with the split book's words; called in the event loop."""

    def hello(self) -> pb.ServeHello:
        """Return what is held and what was done, of epochs that have not ended."""

    def wanted(self) -> int:
        """Return how many workers are idle now; a new stream begins, and counts what it asks for from here."""

    def on_reply(self, reply: pb.ServeReply) -> None:
        """Do what the book says."""

    def stats(self) -> pb.FeedStats:
        """Return the figures now; asked about once a second."""


class ServeLink:
    """Keeps a feed's stream open, through restarts of the coordinator; belongs to one event loop.

    What was sent is lost when a stream breaks, but for `bad` and `returned`, which are said again on the next one until
    their epoch is over; the listener's `hello` tells the rest.

    Args:
        address: The coordinator's "host:port", or what tells where it is now.
        token: The job's shared secret, None if it has none.
        host: This host.
        feed_id: Names this start of the feed.
        listener: Told what the book says.
        cluster: What the hosts of the job know themselves by.
        tls: Whether and with what to encrypt.

    Raises:
        SettingsError: The token has characters that cannot be sent.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        token: str | None,
        host: str,
        feed_id: str,
        listener: ServeListener,
        *,
        cluster: str | None = None,
        tls: Tls = PLAIN,
    ) -> None:
        self._address: Callable[[], str] = (lambda: str(address)) if isinstance(address, str) else address
        self._metadata, self._tls = metadata_of(token, cluster), tls
        self._host, self._feed_id, self._listener = host, feed_id, listener
        self._outbox = pb.ServeRequest()
        self._something = asyncio.Event()
        self._unsettled = pb.ServeRequest()  # bad and returned ones of epochs that go on
        self._ended: set[int] = set()
        self._heard = False  # whether the coordinator has said something on this stream
        self._silent = False  # whether its loss was logged
        self._why_is_lost = False  # whether a write hid why the last stream ended
        self._worked = False  # whether it was ever heard

    def send(self, request: pb.ServeRequest) -> None:
        """Say something soon, together with what else there is to say; `wanted` is the total since `wanted()`."""
        for given_up in (self._unsettled, self._outbox):
            given_up.bad.extend(request.bad)
            given_up.returned.extend(request.returned)
        self._outbox.done.extend(request.done)
        self._outbox.wanted = max(self._outbox.wanted, request.wanted)
        if request.HasField("list"):
            self._outbox.list.CopyFrom(_sendable(request.list))
        if request.HasField("stats"):
            self._outbox.stats.CopyFrom(request.stats)
        self._something.set()

    async def run(self) -> None:
        """Keep the stream open until cancelled; whatever the listener raises ends it."""
        pauses = retry_pauses_s()
        while True:
            try:
                async with transport.aio_channel(self._address(), CHANNEL_OPTIONS, self._tls) as channel:
                    call = channel.stream_stream(
                        _PATH,
                        request_serializer=pb.ServeRequest.SerializeToString,
                        response_deserializer=pb.ServeReply.FromString,
                    )(metadata=self._metadata)
                    try:
                        if await self._converse(call):
                            pauses = retry_pauses_s()
                    finally:
                        call.cancel()
            except (grpc.RpcError, asyncio.InvalidStateError, SettingsError) as error:
                self._complain(error)
            await asyncio.sleep(next(pauses))

    async def _converse(self, call: Any) -> bool:
        """Talk on one stream until it ends; return whether the coordinator was heard."""
        hello, ended = self._listener.hello(), sorted(self._ended)
        hello.host, hello.feed_id = self._host, self._feed_id
        hello.ended.extend(ended)
        self._outbox = pb.ServeRequest()
        first = pb.ServeRequest(hello=hello, wanted=self._listener.wanted())
        first.MergeFrom(self._unsettled)
        self._heard = False
        tasks = [asyncio.create_task(self._read(call))]
        try:
            if self._why_is_lost:
                await asyncio.wait(tasks, timeout=_REFUSAL_S)
            tasks.append(asyncio.create_task(self._write(call, first)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.RpcError as error:
            self._complain(error)
        except asyncio.InvalidStateError as error:  # said after the end, of which only the call knows the reason
            self._complain(ConnectionError(await call.details()) if call.done() else error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._heard

    async def _read(self, call: Any) -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            if self._silent:
                logger.info("the feed of %s has found the coordinator again", self._host)
            self._heard, self._silent, self._worked = True, False, True
            self._take(reply)

    async def _write(self, call: Any, first: pb.ServeRequest) -> None:
        await call.write(first)
        clock = asyncio.get_running_loop().time
        stats_s = clock()
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._something.wait(), max(0.0, stats_s - clock()))
            self._something.clear()
            request, self._outbox = self._outbox, pb.ServeRequest()
            if clock() >= stats_s:
                stats_s = clock() + STATS_INTERVAL_S
                request.stats.CopyFrom(self._listener.stats())
            if request.ListFields():
                await call.write(request)

    def _take(self, reply: pb.ServeReply) -> None:
        if reply.epochs_ended:
            self._ended.update(reply.epochs_ended)
            kept = pb.ServeRequest()
            kept.bad.extend(bad for bad in self._unsettled.bad if bad.id.epoch not in self._ended)
            kept.returned.extend(key for key in self._unsettled.returned if key.epoch not in self._ended)
            self._unsettled = kept
        self._listener.on_reply(reply)

    def _complain(self, error: Exception) -> None:
        what = transport.explain(details(error), self._tls, worked=self._worked)
        self._why_is_lost = _WHY_IS_LOST in what
        if self._why_is_lost:
            return  # the next try tells: it listens before it writes
        if not self._silent:
            logger.warning("the feed of %s has lost the coordinator, trying on: %s", self._host, what)
            self._silent = True


def _sendable(splits: pb.SplitList) -> pb.SplitList:
    """Return the list, or a failure in its place if it is too large to be sent."""
    size = splits.ByteSize()
    if size <= MAX_LIST_BYTES:
        return splits
    message = (
        f"the job's list of {len(splits.values)} splits takes {size / 1e6:.0f} MB, at most "
        f"{MAX_LIST_BYTES / 1e6:.0f} MB can be sent: let a split be a group of files, or name them more briefly"
    )
    return pb.SplitList(cause_json=json.dumps({"exception": "InputError", "message": message}))
