"""A rank and a feed as the split service sees them: the real clients with listeners that remember."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from control_running import DEADLINE_S, wait_until

from hetero._proto import splits_pb2 as pb
from hetero.control.split_follow import SplitFollower
from hetero.control.split_serve import ServeLink
from hetero.tls import PLAIN, Tls


class Peers:
    """Ranks and feeds of one test; `close` ends them all."""

    def __init__(self) -> None:
        self._ranks: list[FakeRank] = []
        self._feeds: list[FakeFeed] = []

    def rank(self, address: str, rank: int = 0, size: int = 1, **options: Any) -> FakeRank:
        self._ranks.append(FakeRank(address, rank, size, **options))
        return self._ranks[-1]

    def feed(self, address: str, host: str = "d1", **options: Any) -> FakeFeed:
        self._feeds.append(FakeFeed(address, host, **options))
        return self._feeds[-1]

    def close(self) -> None:
        for rank in self._ranks:
            rank.follower.close()
        for feed in self._feeds:
            feed.stop()


class FakeRank:
    """Remembers fences and ends; `arrived` is by (epoch, split) what it has."""

    def __init__(
        self,
        address: str,
        rank: int = 0,
        size: int = 1,
        token: str | None = None,
        *,
        tls: Tls = PLAIN,
        stray_channels: Sequence[str] = (),
    ) -> None:
        self.fences: list[tuple[int, int, tuple[int, ...]]] = []
        self.ended: list[int] = []
        self.arrived: dict[tuple[int, int], bytes] = {}
        self.highest = 0
        self.rank = rank
        self.follower = SplitFollower(address, token, rank, size, "run-1", self, stray_channels=stray_channels, tls=tls)

    def on_fence(self, epoch: int, attempt: int, splits: Sequence[int]) -> Mapping[int, bytes]:
        self.fences.append((epoch, attempt, tuple(splits)))
        return {split: self.arrived[epoch, split] for split in splits if (epoch, split) in self.arrived}

    def on_epoch_end(self, epoch: int) -> None:
        self.ended.append(epoch)

    def highest_attempt(self) -> int:
        return self.highest

    def stats(self) -> pb.RankStats:
        return pb.RankStats(rows=640, batches=10, waiting_batches=2, epoch=0)


class FakeFeed:
    """A feed's link in an event loop of its own; takes so many splits and finishes those that it is told to."""

    def __init__(
        self,
        address: str,
        host: str = "d1",
        workers: int = 1,
        values: Sequence[str] | None = ('"a"', '"b"'),
        *,
        channel: str = "",
        token: str | None = None,
        tls: Tls = PLAIN,
    ) -> None:
        self.host, self.idle, self.values, self.asked = host, workers, values, 0
        self.channel = channel  # that all of them are of, where each host has files of its own
        self.held: dict[tuple[int, int], pb.Assignment] = {}
        self.finished: list[pb.SplitDone] = []
        self.revoked: list[pb.SplitId] = []
        self.ended: list[int] = []
        self.taken: list[pb.Assignment] = []
        self.hellos = self.listed = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-feed", daemon=True)
        self._thread.start()
        self.link = self.run(self._make(address, token, tls))
        self._task = asyncio.run_coroutine_threadsafe(self.link.run(), self.loop)

    async def _make(self, address: str, token: str | None, tls: Tls) -> ServeLink:
        return ServeLink(address, token, self.host, f"feed-of-{self.host}", self, tls=tls)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def stop(self) -> None:
        if self.loop.is_closed():
            return
        self._task.cancel()
        self.run(asyncio.sleep(0))
        wait_until(lambda: len(asyncio.all_tasks(self.loop)) == 0, "the link's tasks")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()

    @property
    def error(self) -> BaseException | None:
        return self._task.exception(DEADLINE_S)

    # What the link asks.

    def hello(self) -> pb.ServeHello:
        self.hellos += 1
        return pb.ServeHello(held=[one.id for one in self.held.values()], done=self.finished)

    def wanted(self) -> int:
        self.asked = self.idle
        return self.asked

    def stats(self) -> pb.FeedStats:
        worker = pb.WorkerStats(name="worker-0", rows=1280, batches=20, epoch=-1, split=-1)
        return pb.FeedStats(workers=[worker], waiting_batches=4)

    def on_reply(self, reply: pb.ServeReply) -> None:
        self.revoked.extend(reply.revoked)
        for key in reply.revoked:
            if self.held.pop((key.epoch, key.split), None) is not None:
                self.idle += 1
        self.ended.extend(reply.epochs_ended)
        for assignment in reply.assignments:
            self.held[assignment.id.epoch, assignment.id.split] = assignment
            self.taken.append(assignment)
            self.idle -= 1
        if reply.list_splits:
            self.listed += 1
            if self.values is not None:
                splits = pb.SplitList(values=self.values)
                if self.channel:
                    splits.local.add(channel=self.channel, splits=range(len(self.values)))
                self.link.send(pb.ServeRequest(list=splits))

    # What a test makes it do.

    def call(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        self.run(act())

    def finish(self, epoch: int, split: int) -> None:
        """Report a split as done and ask for another one."""

        def act() -> None:
            assignment = self.held.pop((epoch, split))
            done = pb.SplitDone(id=assignment.id, batches=5, replayed=1)
            self.finished.append(done)
            self.idle, self.asked = self.idle + 1, self.asked + 1
            self.link.send(pb.ServeRequest(done=[done], wanted=self.asked))

        wait_until(lambda: (epoch, split) in self.held, f"split {split} of epoch {epoch} at {self.host}")
        self.call(act)

    def say(self, request: pb.ServeRequest) -> None:
        self.call(lambda: self.link.send(request))
