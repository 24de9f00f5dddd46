"""Which split is whose: the rules by which every batch of an epoch reaches exactly one rank. No network here.

Exactly once rests on three facts, none of which needs this process to remember anything:

- a split that may have been handed out before is handed out again only after every rank has promised to refuse whatever
  comes late of it, and has said what it has (`Fence`);
- attempts only grow, also from one coordinator to the next;
- ranks and feeds outlive the coordinator, and whoever connects says first what it knows.

`SplitBook` takes the peers' messages as calls and leaves mail for them; `pending` names whoever has some. Hosts are
named by text, ranks by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetero.control.split_epoch import Fence, Report, SplitId
from hetero.control.split_journal import Memory
from hetero.control.split_lists import HostList
from hetero.control.split_mail import FeedMail, Rank, RankMail
from hetero.control.split_rules import SplitRules


class Mismatch(Exception):
    """A peer belongs to another job, or to another idea of this one."""


class SplitBook(SplitRules):
    """Hands out splits, lowest (epoch, split) first; not thread-safe. All handling takes constant time or nearly so.

    Args: those of `SplitState`.

    Attributes:
        pending: Feeds (their hosts) and ranks that have mail.
        failure: Why the job must end; None as long as it need not.
        splits, values: The list of splits, and the JSON texts in it; None until it is known.
        loss: A host that was given up and that the job cannot do without; None as long as there is none.
        replayed: Batches that were prepared a second time.
        skipped: Splits that were left out.
        version, important_version: Grow with each change, and with each that is worth writing down at once.
    """

    # --- what feeds say -----------------------------------------------------------------------------------------------

    def feed_hello(
        self, host: str, held: Iterable[SplitId], reports: Iterable[Report], ended: Iterable[int] = ()
    ) -> None:
        """Begin a feed's stream: what it holds and has finished counts, whatever else it was given is handed out again.

        Args:
            host: Its host.
            held: What it has in hand.
            reports: What it has finished or given up, of epochs that have not ended; old ones do no harm.
            ended: Epochs of whose end it has heard.
        """
        feed, told, held, reports = self._feeds[host], set(ended), set(held), list(reports)
        feed.connected, feed.wanted, feed.given = True, 0, 0
        feed.mail = FeedMail(ended=sorted(self._ended - told))
        self.pending.add(host)
        self._forget_request(feed)
        for number in told - self._ended:
            self._end(number)
        for epoch in self.epochs.values():
            if not epoch.settled:
                epoch.forget(host)
        kept = set()
        for key in held | {report.id for report in reports}:
            self._attempt = max(self._attempt, key.attempt)
            if self._claim(feed, key):
                kept.add((key.epoch, key.split))
            elif key in held:
                feed.mail.revoked.append(key)
        self._give_up(feed, feed.held - kept)
        for report in reports:
            self._handle(feed, report)
        self._advance()

    def feed_wanted(self, host: str, wanted: int) -> None:
        """Note how many splits a feed has asked for on its stream, in total."""
        feed = self._feeds[host]
        feed.wanted = max(feed.wanted, wanted)
        self._advance()

    def feed_report(self, host: str, report: Report) -> None:
        """Note what became of a split; reports of attempts that were given up are ignored."""
        self._handle(self._feeds[host], report)
        self._advance()

    def feed_list(self, host: str, values: Sequence[str], channels: Mapping[int, str] | None = None) -> None:
        """Take a host's list of splits; the first one holds for the whole run.

        Args:
            host: Who has listed them.
            values: JSON texts.
            channels: By position, the channel that a split reads from, where each host has other files of it.
        """
        if self.splits is None:
            self._take_list(host, HostList(tuple(values), channels or {}))
            self._change(important=True)
            self._advance()

    def feed_gone(self, host: str) -> None:
        """End a feed's stream; what it holds stays its own until it comes again or its host is given up."""
        feed = self._feeds[host]
        feed.connected, feed.mail = False, FeedMail()
        self._forget_request(feed)
        self._advance()

    def set_hosts(self, registered: Iterable[str], gone: Iterable[str]) -> None:
        """Say which hosts there are, and which were given up: their splits are handed out again."""
        registered, gone = set(registered), set(gone)
        for host, feed in self._feeds.items():
            feed.registered = host in registered
            newly, feed.gone = host in gone and not feed.gone, host in gone
            if newly:
                self._forget_request(feed)
                for epoch in self.epochs.values():
                    for key in epoch.claims_of(host):
                        self._revoke(feed, key)
                    epoch.forget(host)
                for number, split in feed.held:
                    self._revoke(feed, SplitId(number, split, self.epochs[number].held[split].attempt))
                self._give_up(feed, set(feed.held))
        self._advance()

    # --- what ranks say -----------------------------------------------------------------------------------------------

    def rank_hello(
        self,
        rank: int,
        size: int,
        *,
        highest_attempt: int = 0,
        obeyed: Iterable[Fence] = (),
        ended: Iterable[int] = (),
        begun: Iterable[int] = (),
        left: Iterable[int] = (),
        stray_channels: Iterable[str] = (),
    ) -> None:
        """Begin a rank's stream.

        Args:
            rank: The rank.
            size: Number of ranks.
            highest_attempt: The highest one that it has seen.
            obeyed: Fences that it has obeyed, in epochs that have not ended.
            ended: Epochs of whose end it has heard.
            begun: Epochs that it reads.
            left: Epochs that it takes nothing more of.
            stray_channels: Channels that are spread over the hosts and of which the rank's host has files.

        Raises:
            Mismatch: There are other ranks than that.
        """
        if not 0 <= rank < size or self._size not in (None, size):
            raise Mismatch(f"rank {rank} of {size} is not part of this job, which has {self._size or size} ranks")
        self._size, told = size, set(ended)
        self._strays |= dict.fromkeys(stray_channels, rank)
        self._resumed = self._resumed or highest_attempt > 0
        self._attempt = max(self._attempt, highest_attempt)
        self._ranks[rank] = Rank(connected=True)
        self._ranks[rank].mail.fences = self._fences.unanswered(rank)
        self.pending.add(rank)
        for fence in obeyed:
            self._attempt = max(self._attempt, fence.attempt)
            floors = self._floors.setdefault(fence.epoch, {})
            floors.update({split: max(fence.attempt, floors.get(split, 0)) for split in fence.splits})
        for number in told - self._ended:
            self._end(number)
        for number in {*begun, *left} - told:
            self._begin(rank, number, fresh=False)
        for number in left:
            self._leave(rank, number)
        self._end_unread()
        self._advance()

    def rank_begun(self, rank: int, number: int) -> None:
        """Open an epoch, if it is not open yet."""
        self._begin(rank, number, fresh=self._knows_all_epochs)
        self._advance()

    def rank_left(self, rank: int, number: int) -> None:
        """Note that a rank takes nothing more of an epoch; one that all have left ends."""
        self._begin(rank, number, fresh=self._knows_all_epochs)
        self._leave(rank, number)
        self._end_unread()
        self._advance()

    def rank_fenced(self, rank: int, fence_id: int, arrived: Mapping[int, bytes]) -> None:
        """Take a rank's answer to a fence: by split, the bitmap of batches that it has."""
        self._fences.answer(rank, fence_id, arrived)
        self._advance()

    def rank_bye(self, rank: int) -> None:
        """Note that a rank takes nothing more at all; nobody waits for its word any longer."""
        self._ranks[rank].closed = True
        self._fences.excuse(rank)
        self._change()
        self._end_unread()
        self._advance()

    def ranks_ended(self, ranks: Iterable[int]) -> None:
        """Take the launchers' word that ranks have ended well: their own goodbye may have been lost."""
        for rank in ranks:
            known = self._ranks.get(rank)
            if rank < (self._size or 0) and (known is None or not known.closed):
                self._ranks[rank] = known or Rank()
                self.rank_bye(rank)

    def rank_gone(self, rank: int) -> None:
        """End a rank's stream; it will come again."""
        self._ranks[rank].connected, self._ranks[rank].mail = False, RankMail()

    # --- what they are told -------------------------------------------------------------------------------------------

    def feed_mail(self, host: str) -> FeedMail:
        """Take what is to be told to a feed."""
        self.pending.discard(host)
        mail, self._feeds[host].mail = self._feeds[host].mail, FeedMail()
        return mail

    def rank_mail(self, rank: int) -> RankMail:
        """Take what is to be told to a rank."""
        self.pending.discard(rank)
        mail, self._ranks[rank].mail = self._ranks[rank].mail, RankMail()
        return mail

    def tick(self) -> None:
        """Let time pass; to be called about twice a second."""
        self._advance()

    def memory(self) -> Memory:
        """Return what spares a later coordinator work."""
        return Memory(
            splits=self.splits,
            attempt=self._attempt,
            size=self._size,
            closed=tuple(number for number, rank in self._ranks.items() if rank.closed),
            replayed=self.replayed,
            skipped=tuple(self.skipped),
            ended=tuple(sorted(self._ended)),
            past=tuple(self.past),
            epochs={**self._remembered, **{e.number: (bytes(e.done), e.batches) for e in self.epochs.values()}},
        )
