"""A feed and a rank as a SplitBook sees them: what they hold, what they say, and what they have not heard yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetero import bitmap
from hetero.control.split_epoch import Fence, Report, SplitId
from hetero.control.splits import SplitBook

if TYPE_CHECKING:
    from split_world import World

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
