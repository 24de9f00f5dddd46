"""Feeds, ranks and a coordinator around a SplitBook, with messages that are late and everything that can break."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from split_fakes import FakeFeed, FakeRank, Step

from hetero.control.split_epoch import SplitId
from hetero.control.split_journal import Memory
from hetero.control.splits import SplitBook


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
