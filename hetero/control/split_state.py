"""The state of a split book; how it comes to know the list of splits, and which host it cannot do without. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hetero import bitmap
from hetero.control.split_causes import of_emptiness, of_stray
from hetero.control.split_epoch import Epoch, SplitId
from hetero.control.split_fences import Fences
from hetero.control.split_journal import Memory
from hetero.control.split_lists import HostList, Loss, Splits, hosts_of, merge
from hetero.control.split_mail import Feed, Rank

FEED_WAIT_S = 10.0
"""How long splits that an earlier coordinator handed out wait for the feeds that may hold them."""
_PAST_EPOCHS = 20


class SplitState:
    """The state of a split book.

    Args:
        hosts: The hosts of the job: those that prepare input, and those that may have local workers to help with it.
        deterministic: Whether ranks read an epoch split by split.
        skip_bad: Whether a split in which the job's code fails is left out; else it ends the job (`failure`).
        sharded: Channels of which each host has other files. With any, each of `listers` lists its own splits.
        listers: Hosts that may be asked to list splits; by default all. The others are trainer hosts, most of which
            never have a feed: nobody waits for one, and data hosts are served first.
        epochs: How many there will be at least.
        first_attempt: Must be above every attempt that an earlier coordinator handed out.
        memory: What an earlier coordinator kept; may be old.
        clock: Monotonic seconds.

    Attributes:
        splits: The list of splits; None until it is known.
        lists: Of hosts that have listed their own, while others have not.
        loss: The host that was given up and cannot be done without; None as long as there is none.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        deterministic: bool = False,
        skip_bad: bool = False,
        sharded: Sequence[str] = (),
        listers: Sequence[str] | None = None,
        epochs: int = 0,
        first_attempt: int = 0,
        memory: Memory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        kept = memory or Memory()
        self.pending: set[str | int] = set()
        self.failure: Mapping[str, object] | None = None
        self.loss: Loss | None = None
        self.lists: dict[str, HostList] = {}
        self.may_list = True  # whether the job's code may be asked for its splits before an epoch is begun
        self.replayed, self.skipped = kept.replayed, list(kept.skipped)
        self.version = self.important_version = 0  # the latter: of the last change that is worth writing down at once
        self.epochs: dict[int, Epoch] = {}  # the open ones
        self.past = deque(kept.past, _PAST_EPOCHS)
        self._deterministic, self._skip_bad, self._clock = deterministic, skip_bad, clock
        self._sharded, self._number_of_epochs = tuple(sharded), epochs
        self._listers = tuple(hosts if listers is None else listers)
        self._started_s = clock()
        self._attempt = max(first_attempt, kept.attempt)
        self._fences = Fences(self._attempt)
        self._floors: dict[int, dict[int, int]] = {}
        self._size = kept.size
        self._ranks = {rank: Rank(closed=True) for rank in kept.closed}
        self._feeds = {host: Feed(host, spare=host not in self._listers) for host in hosts}
        self._ended = set(kept.ended)
        self._remembered = dict(kept.epochs)
        self._resumed = memory is not None
        self._list_asked: dict[str, bool] = {}  # hosts that were asked for the list: whether a worker was idle
        self._list_asked_s = self._started_s
        self._relieved: tuple[Feed, int, float] | None = None  # from which feed, what it had asked for, and when
        self._spared: set[tuple[int, str]] = set()  # epochs and lost hosts of which nothing is left to be read in them
        self._strays: dict[str, int] = {}  # channels of which a trainer host has files, and a rank on it
        self._know_splits(kept.splits)

    # --- the list of splits -------------------------------------------------------------------------------------------

    @property
    def values(self) -> tuple[str, ...] | None:
        """The splits, JSON texts; None until they are known."""
        return None if self.splits is None else self.splits.values

    @property
    def unlisted(self) -> tuple[str, ...]:
        """The hosts that still have to list splits of their own, in a job whose hosts have files of their own."""
        if not self._sharded or self.splits is not None:
            return ()
        return tuple(host for host in self._listers if host not in self.lists)

    def _take_list(self, host: str, listed: HostList) -> None:
        """Note a host's list; the first one holds for the whole run: of all hosts, or of this one."""
        if not self._sharded:
            self._know_splits(merge({host: HostList(listed.values)}))
        elif host in self.unlisted:
            self.lists[host] = listed
            if not self.unlisted:
                self._know_splits(merge({name: self.lists.pop(name) for name in self._listers}))
                if not self.values:
                    self.failure = of_emptiness(self._listers, self._sharded)

    def _know_splits(self, splits: Splits | None) -> None:
        self.splits = splits
        self._hosts_of = () if splits is None else hosts_of(splits)
        self._own: dict[str, list[int]] = {}  # by host, the splits that it alone can prepare
        for split, host in enumerate(self._hosts_of):
            if host is not None:
                self._own.setdefault(host, []).append(split)

    def _judge_strays(self) -> None:
        """Find out whether trainer hosts have a part of what data hosts read: nobody would read that."""
        if self.failure is None and self._strays and self.splits is not None:
            read = {home.channel for home in self.splits.homes if home is not None}
            stray = next((name for name in self._strays if name in read), None)
            self.failure = None if stray is None else of_stray(stray, self._strays[stray])
            self._strays = {}

    # --- asking for it ------------------------------------------------------------------------------------------------

    def _ask_for_lists(self) -> None:
        """Ask for the list of splits: any one host, or each that has files of its own."""
        if not self._sharded:
            feeds = [feed for feed in self._feeds.values() if not feed.spare and not feed.gone]
            self._ask_one_of(feeds or list(self._feeds.values()))  # a trainer host only if nobody else is left
        for host in self.unlisted:
            self._ask_one_of([self._feeds[host]])

    def _ask_one_of(self, feeds: Sequence[Feed]) -> None:
        """Ask a feed with an idle worker for the list of splits.

        If all workers have splits of an earlier coordinator in hand, all feeds are asked: one may know the list.
        """
        hungry = max(feeds, key=lambda feed: feed.credit, default=None)
        if hungry is not None and hungry.credit > 0:
            if not any(self._list_asked.get(feed.host) for feed in feeds):
                self._ask(hungry, idle=True)
            return
        busy = [feed for feed in feeds if feed.serves and self._claims(feed)]
        for feed in busy:
            if feed.host not in self._list_asked:
                self._ask(feed, idle=False)
                self._list_asked_s = self._clock()
        if busy and self._clock() - self._list_asked_s > FEED_WAIT_S:
            self._interrupt(busy)

    def _ask(self, feed: Feed, *, idle: bool) -> None:
        feed.mail.list_splits = True
        self.pending.add(feed.host)
        self._list_asked[feed.host] = idle

    def _interrupt(self, busy: Sequence[Feed]) -> None:
        """Take a split from a worker so that it can list the splits.

        All workers may wait until ranks have had a lower split, which nobody can hand out without the list.
        """
        key, host = max(max(self._claims(feed)) for feed in busy)
        self.epochs[key.epoch].disclaim(host, key.split)
        self._revoke(self._feeds[host], key)
        self._list_asked_s = self._clock()

    def _revoke(self, feed: Feed, key: SplitId) -> None:
        if feed.connected:
            feed.mail.revoked.append(key)
            self.pending.add(feed.host)

    def _claims(self, feed: Feed) -> list[tuple[SplitId, str]]:
        unsettled = [epoch for epoch in self.epochs.values() if not epoch.settled]
        return [(key, feed.host) for epoch in unsettled for key in epoch.claims_of(feed.host)]

    def _forget_request(self, feed: Feed) -> None:
        """Expect no answer any longer to what a feed was asked."""
        self._list_asked.pop(feed.host, None)
        if self._relieved is not None and self._relieved[0] is feed:
            self._relieved = None

    # --- hosts that cannot be done without ----------------------------------------------------------------------------

    @property
    def _all_here(self) -> bool:
        """Whether every rank has said hello to this book, or goodbye to an earlier one."""
        return self._size is not None and len(self._ranks) == self._size

    def _judge_losses(self) -> None:
        """Find out whether a host was given up that alone has what is still to be read."""
        for host in self._listers if self._sharded and self.loss is None else ():
            if self._feeds[host].gone and (channels := self._lost_with(host)):
                self.loss = Loss(host, channels, was_listed=self.splits is not None or host in self.lists)
                return

    def _lost_with(self, host: str) -> tuple[str, ...]:
        """Return the channels of which a lost host alone has files that are still to be read."""
        if host in self.unlisted:
            return self._sharded
        if self.splits is None:
            return tuple(sorted(set(self.lists[host].channels.values())))
        own = self._own.get(host, [])
        if not own or not self._all_here or not any(self._lacks(number, host, own) for number in self._ahead()):
            return ()
        homes = [home for split in own if (home := self.splits.homes[split]) is not None]
        return tuple(sorted({home.channel for home in homes} - {""})) or self._sharded

    def _ahead(self) -> set[int]:
        """Return the epochs that are open or will be, as far as is known."""
        if all(rank.closed for rank in self._ranks.values()):
            return set()
        return {*range(self._number_of_epochs), *self.epochs} - self._ended

    def _lacks(self, number: int, host: str, own: Sequence[int]) -> bool:
        """Return whether a split of a lost host is still to be read in an epoch."""
        if (number, host) in self._spared:
            return False
        epoch = self.epochs.get(number)
        if epoch is not None and not epoch.settled:
            return False  # it is not known yet
        done = self._remembered.get(number, (b"", 0))[0] if epoch is None else epoch.done
        if any(not bitmap.has(done, split) for split in own):
            return True
        self._spared.add((number, host))
        return False
