"""What follows from what feeds and ranks have said: whose a split is, when an epoch ends, who gets what next. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from hetero.control.split_epoch import Epoch, Holder, Report, SplitId
from hetero.control.split_mail import Assignment, Feed, Past, Skipped
from hetero.control.split_state import FEED_WAIT_S, SplitState
from hetero.control.state import failure_of

logger = logging.getLogger(__name__)

STRANGER_WAIT_S = 3.0
"""The same for feeds of hosts that have not registered."""
RELIEF_WAIT_S = 5.0
"""How long a worker whose split was taken has to ask for another one before the next split is taken: the first may have
been a split whose batches only wait for ranks, so that no worker got free."""


class SplitRules(SplitState):
    """What follows from the state of a split book; `SplitBook` takes the peers' messages.

    Args: those of `SplitState`.
    """

    # --- epochs -------------------------------------------------------------------------------------------------------

    @property
    def _knows_all_epochs(self) -> bool:
        """Whether an epoch that is begun only now is new to earlier coordinators too: a rank would have said so."""
        return self._all_here and not any(rank.closed for rank in self._ranks.values())

    def _open(self, number: int, *, fresh: bool) -> Epoch:
        epoch = self.epochs[number] = Epoch(number, fresh=fresh and number not in self._remembered)
        if number in self._remembered:
            epoch.remember(*self._remembered.pop(number))
        return epoch

    def _begin(self, rank: int, number: int, *, fresh: bool) -> None:
        if number in self._ended:
            self._ranks[rank].mail.ended.append(number)
            self.pending.add(rank)
            return
        self._ranks[rank].begun.add(number)
        epoch = self.epochs.get(number) or self._open(number, fresh=fresh)
        epoch.begun = True

    def _leave(self, rank: int, number: int) -> None:
        if number in self.epochs:
            self.epochs[number].left.add(rank)

    def _end_unread(self) -> None:
        """End the epochs of which no rank takes anything more."""
        for epoch in tuple(self.epochs.values()):
            if self._all_here and all(rank.closed or n in epoch.left for n, rank in self._ranks.items()):
                self._end(epoch.number)

    def _end(self, number: int) -> None:
        self._ended.add(number)
        epoch = self.epochs.pop(number, None)
        if epoch is not None:
            self.past.append(Past(number, epoch.done_count, epoch.batches))
            for split, holder in epoch.held.items():
                feed = self._feeds[holder.host]
                feed.held.discard((number, split))
                self._revoke(feed, SplitId(number, split, holder.attempt))
        self._fences.drop(number)
        self._floors.pop(number, None)
        self._remembered.pop(number, None)
        for feed in self._feeds.values():
            if feed.connected:
                feed.mail.ended.append(number)
                self.pending.add(feed.host)
        for rank, reader in self._ranks.items():
            if reader.connected and number in reader.begun:
                reader.mail.ended.append(number)
                self.pending.add(rank)
            reader.begun.discard(number)
        self._change(important=True)

    def _settle(self) -> None:
        """Decide whose the splits of an epoch are that an earlier coordinator may have handed out."""
        if self.splits is None or not self._all_here:
            return
        for epoch in [epoch for epoch in self.epochs.values() if not epoch.settled]:
            if not epoch.fresh and self._awaits_feeds():
                continue
            if not epoch.begun:  # all ranks are here and none reads it: it is over, and a feed has not heard of it
                self._end(epoch.number)
                continue
            settlement = epoch.settle(self._hosts_of, self._floors.pop(epoch.number, {}))
            for split, holder in epoch.held.items():
                self._feeds[holder.host].held.add((epoch.number, split))
            for host, key in settlement.refused:
                self._revoke(self._feeds[host], key)
            self._fence(epoch, settlement.unknown)
            for host, report in settlement.reports:
                self._handle(self._feeds[host], report)
            if epoch.complete and epoch.number in self.epochs:
                self._end(epoch.number)

    def _awaits_feeds(self) -> bool:
        """Whether feeds may still come that hold splits of an earlier coordinator; only their work would be lost."""
        if not self._resumed:
            return False
        passed_s = self._clock() - self._started_s
        return any(
            not feed.connected and not feed.gone and passed_s < (FEED_WAIT_S if feed.registered else STRANGER_WAIT_S)
            for feed in self._feeds.values()
            if feed.registered or not feed.spare
        )

    # --- splits -------------------------------------------------------------------------------------------------------

    def _claim(self, feed: Feed, key: SplitId) -> bool:
        """Return whether a split that a feed holds, or held, is or may be its own."""
        if feed.gone or key.epoch in self._ended:
            return False
        epoch = self.epochs.get(key.epoch) or self._open(key.epoch, fresh=False)
        if epoch.settled:
            return epoch.held.get(key.split) == Holder(feed.host, key.attempt)
        self._resumed = True
        epoch.claim(feed.host, key.split, key.attempt)
        return True

    def _handle(self, feed: Feed, report: Report) -> None:
        key = report.id
        epoch = self.epochs.get(key.epoch)
        if epoch is None:
            return
        if not epoch.settled:
            if epoch.claimed(feed.host, key):
                epoch.queue(feed.host, report)
            return
        if epoch.held.get(key.split) != Holder(feed.host, key.attempt):
            return
        if report.kind == "returned":
            self._give_up(feed, {(key.epoch, key.split)})
            return
        if report.kind == "bad" and not self._skip_bad:
            if self.failure is None:
                self.failure = {"host": feed.host, **report.cause}
            return  # the split stays where it is, so that no epoch ends as if all were well
        if report.kind == "bad" and self.values is not None:
            why = failure_of(report.cause).describe()
            logger.warning("the rest of split %d of epoch %d is left out: %s", key.split, key.epoch, why)
            self.skipped.append(Skipped(key.epoch, key.split, self.values[key.split], feed.host, why))
        self.replayed += report.replayed
        feed.held.discard((key.epoch, key.split))
        epoch.finish(key.split, report.batches)
        self._change()
        if epoch.complete:
            self._end(epoch.number)

    def _give_up(self, feed: Feed, splits: Iterable[tuple[int, int]]) -> None:
        """Take splits from a feed; they are handed out again once all ranks have agreed."""
        by_epoch: dict[int, list[int]] = {}
        for number, split in sorted(splits):
            by_epoch.setdefault(number, []).append(split)
            feed.held.discard((number, split))
            del self.epochs[number].held[split]
        for number, lost in by_epoch.items():
            self._fence(self.epochs[number], lost)

    def _fence(self, epoch: Epoch, splits: Sequence[int]) -> None:
        epoch.fencing.update(splits)
        ranks = [number for number, rank in self._ranks.items() if not rank.closed]
        for pending in self._fences.raise_(epoch.number, self._attempt, splits, ranks):
            for number in ranks:
                if self._ranks[number].connected:
                    self._ranks[number].mail.fences.append(pending.fence)
                    self.pending.add(number)

    def _advance(self) -> None:
        """Hand out whatever can be."""
        self._settle()
        for pending in self._fences.take_answered():
            epoch = self.epochs[pending.fence.epoch]
            for split in pending.fence.splits:
                epoch.make_ready(split, pending.arrived.get(split, b""))
        self._judge_losses()
        self._judge_strays()
        if self.splits is None:
            if self.may_list or self.epochs:
                self._ask_for_lists()
            return
        while (next_one := self._next_hand_out()) is not None:
            epoch, split, feed = next_one
            self._attempt += 1
            arrived = epoch.hand_out(split, Holder(feed.host, self._attempt))
            feed.given += 1
            feed.held.add((epoch.number, split))
            key = SplitId(epoch.number, split, self._attempt)
            feed.mail.assignments.append(Assignment(key, self.splits.values[split], arrived))
            self.pending.add(feed.host)
        waiting = self._first_waiting()
        if waiting is not None and waiting.ready:
            self._relieve(SplitId(waiting.number, waiting.lowest_ready, 0))

    def _next_hand_out(self) -> tuple[Epoch, int, Feed] | None:
        """Return the lowest split that a feed waits for and may have, and of such feeds the one that waits for most."""
        found = [(*place, feed) for feed in self._feeds.values() if feed.credit > 0 and (place := self._next_for(feed))]
        if not found:
            return None
        number, split, feed = min(found, key=lambda one: (one[0], one[1], one[2].spare, -one[2].credit))
        return self.epochs[number], split, feed

    def _next_for(self, feed: Feed) -> tuple[int, int] | None:
        """Return a feed's next split; a later epoch waits while an earlier one may soon have one for it."""
        for number, epoch in sorted(self.epochs.items()):
            if (split := epoch.next_for(feed.host)) is not None:
                return number, split
            if epoch.is_awaited_by(feed.host):
                return None
        return None

    def _first_waiting(self) -> Epoch | None:
        """Return the lowest epoch that has splits to hand out; later ones wait even while it cannot."""
        return min((e for e in self.epochs.values() if e.waiting), key=lambda epoch: epoch.number, default=None)

    def _relieve(self, waiting: SplitId) -> None:
        """Take a later split from a worker if all work on later ones.

        Ranks may have no room for those before they have had this one: then nobody would ever ask for it.
        """
        if self._relieved is not None:
            relieved, wanted, at_s = self._relieved
            if relieved.wanted == wanted and self._clock() - at_s < RELIEF_WAIT_S:
                return
            self._relieved = None
        serving = [feed for feed in self._feeds.values() if feed.serves and feed.held]
        depth = 2 if self._deterministic else 1
        if not serving or any(key[:depth] <= waiting[:depth] for feed in serving for key in feed.held):
            return
        host = self._hosts_of[waiting.split]
        able = [feed for feed in serving if host in (None, feed.host)]
        if not able:
            return
        (number, split), feed = max(((max(feed.held), feed) for feed in able), key=lambda one: one[0])
        self._revoke(feed, SplitId(number, split, self.epochs[number].held[split].attempt))
        self._give_up(feed, {(number, split)})
        self._relieved = (feed, feed.wanted, self._clock())

    def _change(self, *, important: bool = False) -> None:
        self.version += 1
        if important:
            self.important_version = self.version
