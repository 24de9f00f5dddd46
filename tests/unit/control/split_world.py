"""Feeds, ranks and a coordinator around a SplitBook, with messages that are late and everything that can break."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hetero import bitmap
from hetero.control.split_epoch import Fence, Report, SplitId
from hetero.control.split_journal import Memory
from hetero.control.splits import SplitBook

Step = Callable[[], None]


@dataclass
class Task:
    """A split in a feed's hands."""

    key: SplitId
    skip: bytes
    next: int = 0
    prepared: list[int] = field(default_factory=list)
    unacknowledged: set[int] = field(default_factory=set)
    replayed: int = 0


class FakeRank:
    """Takes each batch once, refuses what it was told to refuse, reads one epoch after the other."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.arrived: dict[tuple[int, int], bytearray] = {}
        self.floors: dict[tuple[int, int], int] = {}
        self.highest = 0
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.up: deque[Step] = deque()
        self.down: deque[Any] = deque()
        self.connected = False

    @property
    def reads(self) -> int | None:
        return min(self.begun - self.ended, default=None)

    def connect(self) -> None:
        self.disconnect()
        book, self.connected = self.world.book, True
        fences = [Fence(0, e, floor, [s]) for (e, s), floor in self.floors.items() if e not in self.ended]
        said = {"obeyed": fences, "ended": sorted(self.ended), "begun": sorted(self.begun - self.ended)}
        highest = self.highest
        self.up.append(lambda: book.rank_hello(self.rank, self.world.size, highest_attempt=highest, left=(), **said))

    def disconnect(self) -> None:
        if self.connected and not self.up_has_hello():
            self.world.book.rank_gone(self.rank)
        self.connected = False
        self.up.clear()
        self.down.clear()

    def up_has_hello(self) -> bool:
        return self.rank not in self.world.book._ranks or not self.world.book._ranks[self.rank].connected

    def begin(self) -> None:
        number = max(self.begun, default=-1) + 1
        self.begun.add(number)
        if self.connected:
            book = self.world.book
            self.up.append(lambda: book.rank_begun(self.rank, number))

    def hear(self) -> None:
        mail, book = self.down.popleft(), self.world.book
        for fence in mail.fences:
            answer = {}
            for split in fence.splits:
                at = (fence.epoch, split)
                self.floors[at] = max(fence.attempt, self.floors.get(at, 0))
                if self.arrived.get(at):
                    answer[split] = bytes(self.arrived[at])
            self.highest = max(self.highest, fence.attempt)
            self.up.append(lambda i=fence.id, a=answer: book.rank_fenced(self.rank, i, a))
        self.ended.update(mail.ended)

    def receive(self, key: SplitId, sequence: int) -> None:
        self.highest = max(self.highest, key.attempt)
        at = (key.epoch, key.split)
        if key.attempt <= self.floors.get(at, 0) or bitmap.has(self.arrived.get(at, b""), sequence):
            return
        bitmap.add(self.arrived.setdefault(at, bytearray()), sequence)
        self.world.accepted.append((*at, sequence))


class FakeFeed:
    """One start of a host's feed with its workers; little room for batches that no rank has acknowledged."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.held: dict[tuple[int, int], Task] = {}
        self.done: dict[tuple[int, int], Report] = {}
        self.ended: set[int] = set()
        self.up: deque[Step] = deque()
        self.down: deque[Any] = deque()
        self.data: deque[tuple[FakeRank, SplitId, int]] = deque()
        self.acknowledged: deque[tuple[SplitId, int]] = deque()
        self.connected = self.introduced = self.dead = False
        self.has_to_list = self.knows_list = False
        self.wanted = self.credit = 0

    @property
    def idle(self) -> int:
        """A worker has ended once its last batch is prepared; the feed holds its split until ranks have it all."""
        return self.world.workers - sum(task.next < self.world.batches(task.key.split) for task in self.held.values())

    def connect(self) -> None:
        self.disconnect()
        self.connected, book = True, self.world.book
        held, done, ended = [task.key for task in self.held.values()], list(self.done.values()), set(self.ended)
        wanted = self.wanted = self.credit = self.idle

        def hello() -> None:
            self.introduced = True
            book.feed_hello(self.host, held, done, ended)
            book.feed_wanted(self.host, wanted)

        self.up.append(hello)

    def disconnect(self) -> None:
        if self.introduced:
            self.world.book.feed_gone(self.host)
        self.connected = self.introduced = self.has_to_list = False
        self.up.clear()
        self.down.clear()

    def say(self, step: Callable[[SplitBook], None]) -> None:
        if self.connected:
            book = self.world.book
            self.up.append(lambda: step(book))

    def ask(self) -> None:
        self.list_splits()
        missing = self.idle - self.credit
        if missing > 0 and self.connected:
            self.wanted, self.credit = self.wanted + missing, self.credit + missing
            total = self.wanted
            self.say(lambda book: book.feed_wanted(self.host, total))

    def hear(self) -> None:
        mail = self.down.popleft()
        for key in mail.revoked:
            task = self.held.get((key.epoch, key.split))
            if task is not None and task.key.attempt <= key.attempt:
                del self.held[key.epoch, key.split]
        for number in mail.ended:
            self.ended.add(number)
            for at in [at for at in self.held if at[0] == number]:
                del self.held[at]
            self.done = {at: report for at, report in self.done.items() if at[0] != number}
        for assignment in mail.assignments:
            key = assignment.id
            self.credit = max(0, self.credit - 1)
            assert (key.epoch, key.split) not in self.held
            assert self.world.home_of.get(assignment.value, self.host) == self.host
            task = self.held[key.epoch, key.split] = Task(key, assignment.arrived)
            self.settle(task)  # it may have no batches at all
        self.has_to_list = self.has_to_list or mail.list_splits
        self.list_splits()
        self.ask()

    def list_splits(self) -> None:
        """Answer with the list if it was made here before, or else if a worker is idle."""
        if self.has_to_list and (self.knows_list or self.idle > 0):
            self.has_to_list, self.knows_list = False, True
            self.say(lambda book: book.feed_list(self.host, *self.world.list_of(self.host)))

    def work(self, task: Task) -> None:
        """Prepare the task's next batch."""
        total = self.world.batches(task.key.split)
        while task.next < total and bitmap.has(task.skip, task.next):
            task.next += 1
            task.replayed += 1
        if task.next < total:
            task.prepared.append(task.next)
            task.next += 1
        self.settle(task)
        self.ask()

    def moves(self, task: Task) -> Iterator[Step]:
        total = self.world.batches(task.key.split)
        left = [s for s in range(task.next, total) if not bitmap.has(task.skip, s)]
        if task.next < total and (not left or len(task.prepared) + len(task.unacknowledged) < self.world.room):
            yield lambda: self.work(task)
        if task.prepared and self.world.readers(task.key):
            yield lambda: self.send(task)

    def send(self, task: Task) -> None:
        """Send the oldest batch to a rank that reads."""
        rank, sequence = self.world.random.choice(self.world.readers(task.key)), task.prepared.pop(0)
        task.unacknowledged.add(sequence)
        self.data.append((rank, task.key, sequence))

    def settle(self, task: Task) -> None:
        key = task.key
        if task.next >= self.world.batches(key.split) and not task.prepared and not task.unacknowledged:
            del self.held[key.epoch, key.split]
            report = Report(key, "done", task.next, task.replayed)
            self.done[key.epoch, key.split] = report
            self.say(lambda book: book.feed_report(self.host, report))
            self.ask()

    def give_back(self, task: Task) -> None:
        del self.held[task.key.epoch, task.key.split]
        self.say(lambda book: book.feed_report(self.host, Report(task.key, "returned")))
        self.ask()

    def deliver(self) -> None:
        rank, key, sequence = self.data.popleft()
        rank.receive(key, sequence)
        if not self.dead:
            self.acknowledged.append((key, sequence))

    def hear_receipt(self) -> None:
        key, sequence = self.acknowledged.popleft()
        task = self.held.get((key.epoch, key.split))
        if task is not None and task.key == key:
            task.unacknowledged.discard(sequence)
            self.settle(task)


class World:
    """All of it. `steps` lists what can happen next; who drives it chooses."""

    def __init__(
        self,
        seed: int,
        *,
        ranks: int,
        hosts: int,
        workers: int,
        splits: int,
        epochs: int,
        deterministic: bool,
        sharded: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.size, self.workers, self.last, self.deterministic = ranks, workers, epochs - 1, deterministic
        self.hosts = [f"d{i}" for i in range(hosts)]
        self.values = [f'"{i}"' for i in range(splits)]
        self.sharded = sharded and splits > 0
        homes = [self.random.choice((None, *self.hosts)) if self.sharded else None for _ in self.values]
        self.home_of = {value: home for value, home in zip(self.values, homes, strict=True) if home is not None}
        self.lengths = [self.random.randrange(4) for _ in range(splits)]
        self.room = self.random.randint(1, 3)
        self.accepted: list[tuple[int, int, int]] = []
        self.memories: list[Memory] = []
        self.gone: set[str] = set()
        self.gone_for_good: set[str] = set()
        self.asleep: set[object] = set()  # peers of which nothing is heard, and who hear nothing, for a while
        self.now_s, self.restarts = 0.0, 0
        self.book = self.make_book(None)
        self.ranks = [FakeRank(self, rank) for rank in range(ranks)]
        self.feeds = {host: FakeFeed(self, host) for host in self.hosts}
        self.zombies: list[FakeFeed] = []

    def make_book(self, memory: Memory | None) -> SplitBook:
        book = SplitBook(
            self.hosts,
            deterministic=self.deterministic,
            sharded=("training",) if self.sharded else (),
            epochs=self.last + 1,
            first_attempt=1_000_000 * self.restarts,
            memory=memory,
            clock=lambda: self.now_s,
        )
        book.set_hosts(self.hosts, self.gone)
        return book

    def list_of(self, host: str) -> tuple[list[str], dict[int, str]]:
        """Return the splits that a host lists, and which of them read from a channel of which it has its own files."""
        listed = [value for value in self.values if self.home_of.get(value, host) == host]
        return listed, {position: "training" for position, value in enumerate(listed) if value in self.home_of}

    def batches(self, split: int) -> int:
        return self.lengths[split]

    def readers(self, key: SplitId) -> list[FakeRank]:
        """Return the ranks that have room for a batch of this split."""
        if self.deterministic:
            got = {(e, s, q) for e, s, q in self.accepted if e == key.epoch}
            before = {(key.epoch, s, q) for s in range(key.split) for q in range(self.batches(s))}
            if not before <= got:
                return []
        return [rank for rank in self.ranks if rank.reads == key.epoch]

    # --- what happens -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield what goes its way."""
        for peer in self.awake(*self.ranks, *self.feeds.values()):
            if not peer.connected:
                yield peer.connect
            if peer.up:
                yield lambda peer=peer: self.hand_in(peer)
            if peer.down:
                yield peer.hear
        for rank in self.awake(*self.ranks):
            if len(rank.begun - rank.ended) < 2 and max(rank.begun, default=-1) < self.last:
                yield rank.begin
        for feed in self.awake(*self.feeds.values(), *self.zombies):
            if feed.data:
                yield feed.deliver
            if feed.acknowledged:
                yield feed.hear_receipt
            for task in feed.held.values():
                yield from feed.moves(task)
        if self.gone - self.gone_for_good:
            yield self.come_back
        yield self.tick

    def awake(self, *peers: Any) -> list[Any]:
        return [peer for peer in peers if peer not in self.asleep]

    def faults(self) -> Iterator[Step]:
        """Yield what goes wrong."""
        yield self.restart
        for peer in (*self.ranks, *self.feeds.values()):
            if peer.connected:
                yield peer.disconnect
        for host, feed in self.feeds.items():
            yield lambda host=host: self.kill_feed(host)
            for task in feed.held.values():
                yield lambda feed=feed, task=task: feed.give_back(task)
        seldom = 0.05 if self.sharded else 1.0  # it ends most of such worlds
        if len(self.gone) < len(self.hosts) - 1 and self.random.random() < seldom:
            yield self.lose_host

    def hand_in(self, peer: FakeRank | FakeFeed) -> None:
        """Let the book take a message, and send what it has to say."""
        peer.up.popleft()()
        self.pass_on()

    def pass_on(self) -> None:
        if self.memories[-1:] != [memory := self.book.memory()]:
            self.memories.append(memory)
        for feed in self.feeds.values():
            if feed.host in self.book.pending and feed.introduced:
                feed.down.append(self.book.feed_mail(feed.host))
        for rank in self.ranks:
            if rank.rank in self.book.pending and rank.connected and not rank.up_has_hello():
                rank.down.append(self.book.rank_mail(rank.rank))
        self.book.pending.clear()

    def restart(self) -> None:
        """Replace the coordinator by one that remembers all, something or nothing."""
        self.restarts += 1
        if self.random.random() < 0.5:  # the ledger has forgotten too
            self.gone = set(self.gone_for_good)
        memory = self.random.choice(
            [None, None, *self.memories[-1:], *self.random.sample(self.memories, bool(self.memories))]
        )
        for peer in (*self.ranks, *self.feeds.values()):
            peer.connected = False
            peer.up.clear()
            peer.down.clear()
        for feed in self.feeds.values():
            feed.introduced = False
        self.book = self.make_book(memory)

    def kill_feed(self, host: str) -> None:
        """Start a feed anew; what the old one had sent may still arrive."""
        old = self.feeds[host]
        old.disconnect()
        old.held.clear()
        old.acknowledged.clear()
        old.dead = True
        self.zombies.append(old)
        self.feeds[host] = FakeFeed(self, host)
        self.pass_on()

    def lose_host(self) -> None:
        """The ledger gives a host up; its feed may well go on, and even be connected."""
        host = self.random.choice([host for host in self.hosts if host not in self.gone])
        self.gone.add(host)
        if self.random.random() < 0.5:
            self.gone_for_good.add(host)
        self.book.set_hosts(self.hosts, self.gone)
        self.pass_on()

    def come_back(self) -> None:
        self.gone.discard(self.random.choice(sorted(self.gone - self.gone_for_good)))
        self.book.set_hosts(self.hosts, self.gone)
        self.pass_on()

    def tick(self) -> None:
        self.now_s += self.random.choice((0.1, 1.0, 11.0))
        self.book.tick()
        self.pass_on()

    @property
    def over(self) -> bool:
        return all(rank.ended >= set(range(self.last + 1)) for rank in self.ranks)

    def run(self, steps: int, fault_rate: float) -> None:
        """Let that many things happen, then only good ones until the last epoch is over everywhere, or cannot be."""
        for step in range(steps):
            if step % 25 == 0:
                everybody = (*self.ranks, *self.feeds.values(), *self.zombies)
                self.asleep = {peer for peer in everybody if self.random.random() < 0.3}
            bad = self.random.random() < fault_rate
            choices = list(self.faults() if bad else self.steps())
            if choices and self.book.loss is None:
                self.random.choice(choices)()
        self.asleep = set()
        for _ in range(20_000):
            if self.over or self.book.loss is not None:
                return
            self.random.choice(list(self.steps()))()
        raise AssertionError(f"stuck: epochs {[(e.number, e.held, e.fencing) for e in self.book.epochs.values()]}")
