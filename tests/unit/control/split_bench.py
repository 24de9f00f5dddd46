"""A split book with hands: feeds and ranks that say one thing at a time."""

from __future__ import annotations

from hetero.control.split_epoch import Fence, Report, SplitId
from hetero.control.split_journal import Memory
from hetero.control.splits import SplitBook


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A book with two feeds, `d1` and `d2`, and two ranks, none of them connected yet."""

    def __init__(self, splits: int | None = 4, **options: object) -> None:
        self.clock, self.splits = Clock(), splits
        self.begin_again(**options)

    def begin_again(self, memory: Memory | None = None, first_attempt: int = 0, **options: object) -> None:
        self.book = SplitBook(("d1", "d2"), clock=self.clock, memory=memory, first_attempt=first_attempt, **options)
        self.book.set_hosts({"d1", "d2"}, ())
        if self.splits is not None and self.book.values is None:
            self.book.feed_list("d1", [f'"{split}"' for split in range(self.splits)])

    def feed(self, host: str, wanted: int = 0, held=(), reports=(), ended=()) -> None:
        self.book.feed_hello(host, held, reports, ended)
        if wanted:
            self.book.feed_wanted(host, wanted)

    def ranks(self, *begun: int, **said: object) -> None:
        for rank in range(2):
            self.book.rank_hello(rank, 2, **{"begun": begun, **said})
        self.answer()

    def answer(self, arrived: dict[int, dict[int, bytes]] | None = None) -> list[Fence]:
        """Let all ranks answer their fences; `arrived` is by rank and split."""
        seen = []
        for rank in range(2):
            for fence in self.book.rank_mail(rank).fences:
                seen.append(fence)
                self.book.rank_fenced(rank, fence.id, (arrived or {}).get(rank, {}))
        return seen

    def given(self, host: str) -> list[tuple[int, int]]:
        self.mail = self.book.feed_mail(host)
        self.keys = [assignment.id for assignment in self.mail.assignments]
        return [(key.epoch, key.split) for key in self.keys]

    def open(self, *epochs: int) -> None:
        """Connect the ranks and let them begin epochs that are new."""
        self.ranks()
        for number in epochs:
            self.book.rank_begun(0, number)
            self.book.rank_begun(1, number)

    def done(self, host: str, *keys: SplitId, replayed: int = 0) -> None:
        for key in keys:
            self.book.feed_report(host, Report(key, "done", 5, replayed))
