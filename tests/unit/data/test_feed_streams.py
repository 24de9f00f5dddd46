"""What of a feed's batches reaches which rank, whatever breaks in between. No network: messages go into lists."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from feed_parts import Coordinator, FakePort, assign, assignment, split_id

from hetero import bitmap
from hetero._proto import feed_pb2 as pb
from hetero._proto import splits_pb2
from hetero.data.arrivals import Arrivals
from hetero.data.feed_streams import Streams
from hetero.data.feed_tasks import Tasks
from hetero.data.feed_wire import Arrived, ReplyReader
from hetero.data.feed_wires import CallWire

SPLITS = {0: 5, 1: 0, 2: 9, 3: 1, 4: 4}  # batches of each
RANKS = 3


class Feed:
    """A feed without sockets."""

    def __init__(self, *, deterministic: bool) -> None:
        self.coordinator = Coordinator()
        self.streams = Streams("run-1", "feed", deterministic=deterministic)
        self.tasks = Tasks("algo-1", self.coordinator.hear, self.streams, no_worker_s=60.0, on_worker=lambda _: None)


class Rank:
    """A rank that notes what arrives, with a connection that can break."""

    def __init__(self, feed: Feed, rank: int, *, deterministic: bool) -> None:
        self.feed, self.rank, self.deterministic = feed, rank, deterministic
        self.arrivals = Arrivals()
        self.accepted: list[tuple[int, int]] = []
        self.refused = 0
        self.feed_id, self.received = "", 0
        self.epoch_ended = False
        self.stream = None
        self.writer: asyncio.Task | None = None
        self.pipe: list[bytes] = []
        self.reader = ReplyReader()
        self.is_blocked = False
        self._unblocked = asyncio.Event()

    def connect(self) -> None:
        hello = pb.ReadHello(rank=self.rank, size=RANKS, run_id="run-1", feed_id=self.feed_id, received=self.received)
        self.stream = self.feed.streams.open(hello)
        self.pipe, self.reader, self.count, self.is_welcome = [], ReplyReader(), 0, False
        self.consumed_bytes = self.consumed_batches = 0
        self.writer = asyncio.ensure_future(self.feed.streams.write(self.stream, CallWire(self._write_to(self.pipe))))

    def _write_to(self, pipe: list[bytes]):
        async def write(message: bytes) -> None:
            while self.is_blocked:
                await self._unblocked.wait()
            pipe.append(message)

        return write

    def block(self, *, is_blocked: bool) -> None:
        self.is_blocked = is_blocked
        if not is_blocked:
            self._unblocked.set()
            self._unblocked = asyncio.Event()

    def disconnect(self, *, is_noticed: bool) -> None:
        """Lose what is in the pipe; the feed hears of it now, or by the next hello only."""
        if self.stream is not None and is_noticed:
            self.feed.streams.close(self.stream)
            self.writer.cancel()
        self.stream = None

    def read(self, messages: int) -> None:
        for _ in range(messages):
            if not self.pipe:
                return
            content = self.reader.read(self.pipe.pop(0))
            if isinstance(content, pb.Welcome):
                self.feed_id, self.received = content.feed_id, 0
            elif isinstance(content, pb.EpochEnd):
                self.epoch_ended = True
            elif isinstance(content, pb.SplitEnd):
                assert content.batches == SPLITS[content.split]
                self.arrivals.accept_end(content.epoch, content.split, content.attempt, content.batches)
                self.received += 1
            elif isinstance(content, Arrived):
                self.received += 1
                self._take(content)

    def _take(self, content: Arrived) -> None:
        epoch, split, sequence, attempt = content.batch
        assert content.data["id"].tolist() == [[epoch, split, sequence]] * content.rows
        self.consumed_bytes += content.size
        self.consumed_batches += 1
        if self.arrivals.accept(epoch, split, sequence, attempt):
            self.accepted.append((split, sequence))
        else:
            self.refused += 1

    def say(self) -> None:
        if self.stream is None or not self.feed_id.endswith(self.stream.name):
            return
        asked = -1
        if self.deterministic:
            asked = next((split for split in SPLITS if not self._is_over(split)), len(SPLITS))
        grant = pb.Grant(
            epoch=0,
            consumed_bytes=self.consumed_bytes,
            consumed_batches=self.consumed_batches,
            window_bytes=200,
            window_batches=3,
            split=asked,
        )
        self.feed.streams.take(self.stream, pb.ReadRequest(received=self.received, grant=grant))

    def _is_over(self, split: int) -> bool:
        end = self.arrivals.end(0, split)
        mine = range((self.rank - split) % RANKS, end or 0, RANKS)
        return end is not None and all(self.arrivals.has(0, split, sequence) for sequence in mine)


class Work:
    """A worker that can be moved on batch by batch, and replaced by a new one."""

    def __init__(self, feed: Feed, name: str) -> None:
        self.feed, self.name = feed, name
        self.ports = [FakePort(feed.tasks, name)]
        self.at = self.tasks = self.abandons = 0

    @property
    def port(self) -> FakePort:
        return self.ports[-1]

    def step(self) -> None:
        port = self.port
        if len(port.given) == self.tasks:
            return
        task = port.given[self.tasks]
        if port.abandoned > self.abandons:
            self.abandons, self.tasks, self.at = port.abandoned, self.tasks + 1, 0
            self.feed.tasks.on_abandoned(port)
            return
        while self.at < SPLITS[task.split] and (self.at < task.start or bitmap.has(task.skip, self.at)):
            self.at += 1
        if self.at < SPLITS[task.split]:
            port.batch(self.at, rows=1)
            self.at += 1
        else:
            self.tasks, self.at = self.tasks + 1, 0
            port.end(SPLITS[task.split])

    def die(self) -> None:
        self.port.die()
        self.ports.append(FakePort(self.feed.tasks, self.name))
        self.at = self.tasks = self.abandons = 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("revoking", [False, True])
def test_every_batch_reaches_one_rank_once_whatever_breaks(revoking, deterministic):
    happened: Counter[str] = Counter()
    for seed in range(40):
        asyncio.run(_run(random.Random(seed), happened, revoking=revoking, deterministic=deterministic))
    expected = {"death", "break", "lost", "unnoticed"} | ({"revoked", "refused"} if revoking else set())
    assert all(happened[what] >= 5 for what in expected), happened


async def _run(chance: random.Random, happened: Counter[str], *, revoking: bool, deterministic: bool) -> None:
    run = Run(chance, happened, deterministic=deterministic)
    for _ in range(chance.choice([50, 200, 600])):
        chance.choice([run.move_worker, run.move_coordinator, run.move_rank, run.move_rank])(revoking=revoking)
        if chance.random() < 0.7:
            await settle()
    await run.finish()
    _check(run.feed, run.ranks, run.workers, revoking=revoking, deterministic=deterministic)
    run.feed.tasks.on_reply(splits_pb2.ServeReply(epochs_ended=[0]))
    await settle()
    for rank in run.ranks:
        happened["refused"] += rank.refused
        rank.read(100)
        assert rank.epoch_ended
        rank.writer.cancel()


class Run:
    """An epoch in which everybody does the next thing at a random time, or fails."""

    def __init__(self, chance: random.Random, happened: Counter[str], *, deterministic: bool) -> None:
        self.chance, self.happened = chance, happened
        self.feed = Feed(deterministic=deterministic)
        self.ranks = [Rank(self.feed, rank, deterministic=deterministic) for rank in range(RANKS)]
        self.workers = [Work(self.feed, f"worker-{index}") for index in range(2)]
        self.attempts: dict[int, int] = {}

    def move_worker(self, *, revoking: bool) -> None:
        worker = self.chance.choice(self.workers)
        if self.chance.random() < 0.9:
            worker.step()
        else:
            self.happened["death"] += worker.at > 0
            worker.die()

    def move_coordinator(self, *, revoking: bool) -> None:
        action = self.chance.random()
        if action < 0.3 and self.feed.coordinator.wanted > sum(self.attempts.values()):
            self.assign()
        elif action < 0.4 and revoking and self.attempts:
            self.happened["revoked"] += 1
            self.revoke(self.chance.choice(list(self.attempts)))

    def move_rank(self, *, revoking: bool) -> None:
        rank, action = self.chance.choice(self.ranks), self.chance.random()
        if action < 0.15:
            rank.block(is_blocked=self.chance.random() < 0.5)
        elif rank.stream is None:
            rank.connect()
        elif action < 0.2:
            is_noticed = self.chance.random() < 0.7
            self.happened["break"] += 1
            self.happened["unnoticed"] += not is_noticed
            self.happened["lost"] += rank.stream.handed > rank.received
            rank.disconnect(is_noticed=is_noticed)
        elif action < 0.6:
            rank.say()
        else:
            rank.read(self.chance.randrange(4))

    def assign(self) -> None:
        split = next((split for split in SPLITS if split not in self.attempts), None)
        if split is not None:
            self.attempts[split] = 1
            self.feed.tasks.on_reply(assign(assignment(split)))

    def revoke(self, split: int) -> None:
        """Do what the coordinator does: revoke, fence with all ranks, hand out again."""
        attempt, feed = self.attempts[split], self.feed
        feed.tasks.on_reply(splits_pb2.ServeReply(revoked=[split_id(split, attempt)]))
        arrived = b""
        for rank in self.ranks:
            arrived = bitmap.union(arrived, rank.arrivals.fence(0, attempt, [split]).get(split, b""))
        feed.coordinator.done = [done for done in feed.coordinator.done if done.id.split != split]
        self.attempts[split] = attempt + 1
        feed.tasks.on_reply(assign(assignment(split, attempt + 1, arrived=arrived)))

    async def finish(self) -> None:
        """Nothing fails any more."""
        for _ in SPLITS:
            self.assign()
        for _ in range(400):
            for rank in self.ranks:
                rank.block(is_blocked=False)
                if rank.stream is None:
                    rank.connect()
                rank.read(100)
                rank.say()
            for worker in self.workers:
                worker.step()
            await settle()
            if len(self.feed.coordinator.done) == len(SPLITS):
                break


def _check(feed: Feed, ranks: list[Rank], workers: list[Work], *, revoking: bool, deterministic: bool) -> None:
    assert sorted(done.id.split for done in feed.coordinator.done) == sorted(SPLITS)
    assert all(done.batches == SPLITS[done.id.split] for done in feed.coordinator.done)
    arrived = sorted(batch for rank in ranks for batch in rank.accepted)
    assert arrived == [(split, sequence) for split, batches in SPLITS.items() for sequence in range(batches)]
    if not revoking:
        assert not any(rank.refused for rank in ranks), "no batch was sent again that had arrived"
    if deterministic:
        for rank in ranks:
            assert all((split + sequence) % RANKS == rank.rank for split, sequence in rank.accepted)
            assert all(rank.arrivals.end(0, split) == batches for split, batches in SPLITS.items())
    assert not any(port.memory for worker in workers for port in worker.ports), "all memory was given back"
    assert feed.tasks.stats()[1:] == (0, 0)
    assert not feed.streams._queue.epochs()


def test_a_feed_is_short_where_a_rank_would_take_a_batch_and_none_is_finished():
    async def check() -> None:
        feed = Feed(deterministic=False)
        assert not feed.streams.is_short, "nobody is there"
        stream = feed.streams.open(pb.ReadHello(rank=0, size=1, run_id="run-1"))
        assert not feed.streams.is_short, "nothing is wanted yet"
        grant = pb.Grant(epoch=0, window_bytes=1 << 20, window_batches=4, split=-1)
        feed.streams.take(stream, pb.ReadRequest(grant=grant))
        assert feed.streams.is_short
        worker = FakePort(feed.tasks)
        feed.tasks.on_reply(assign(assignment(0)))
        worker.batch(0)
        assert not feed.streams.is_short, "one is on its way"
        writer = asyncio.ensure_future(feed.streams.write(stream, CallWire(_nowhere)))
        for sequence in range(1, 3):
            await asyncio.sleep(0.01)
            worker.batch(sequence)
        await asyncio.sleep(0.01)
        assert not feed.streams.is_short, "more than half of what it lets come is there"
        feed.streams.take(stream, pb.ReadRequest(received=3))
        assert feed.streams.arrived() == (6, 3)
        grant.consumed_batches, grant.consumed_bytes = 3, stream.window.sent_bytes
        feed.streams.take(stream, pb.ReadRequest(received=3, grant=grant))
        assert feed.streams.is_short
        writer.cancel()

    asyncio.run(check())


async def _nowhere(_: bytes) -> None:
    """Take what a rank is sent."""


def test_ranks_get_equal_shares_and_one_that_takes_nothing_holds_up_nobody():
    async def run() -> None:
        feed = Feed(deterministic=False)
        ranks = [Rank(feed, rank, deterministic=False) for rank in range(RANKS)]
        worker = FakePort(feed.tasks)
        feed.tasks.on_reply(assign(assignment(0)))
        for rank in ranks:
            rank.connect()
        await settle()
        for rank in ranks[:2]:
            rank.read(1)
            rank.say()
        for sequence in range(40):
            worker.batch(sequence, rows=1)
            await settle()
            for rank in ranks[:2]:
                rank.read(10)
                rank.say()
            await settle()
        assert [len(rank.accepted) for rank in ranks] == [20, 20, 0]
        ranks[2].read(1)
        ranks[2].say()
        for sequence in range(40, 60):
            worker.batch(sequence, rows=1)
            for rank in ranks:
                rank.read(10)
                rank.say()
            await settle()
        for rank in ranks:
            rank.read(10)
        assert [len(rank.accepted) for rank in ranks] == [20, 20, 20], "who has had fewest comes first"
        for rank in ranks:
            rank.writer.cancel()

    asyncio.run(run())
