"""What is known of one epoch's splits, and what peers say about them. Pure.

A split of a settled epoch is in one of four states:

```
        hand out            done, or bad and skipped
  ready ────────▶ held ───────────────────────────────▶ done
    ▲              │ returned, revoked, host lost
    └── fencing ◀──┘
        every rank refuses what comes late, and says what it has
```

An epoch that an earlier coordinator may have handed out is settled only once everybody has said what they know of it.

Some splits can be prepared by one host alone: each host's are handed out in order, as are those of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hetero import bitmap


class SplitId(NamedTuple):
    """One hand-out of a split."""

    epoch: int
    split: int
    attempt: int


class Holder(NamedTuple):
    """Who has a split in hand, and in which attempt."""

    host: str
    attempt: int


@dataclass(frozen=True)
class Report:
    """What became of a split in a feed's hands.

    Args:
        id: The split and the attempt.
        kind: All batches are at ranks; the job's code failed; or the feed has given it up.
        batches: How many the split has, or had until the failure.
        replayed: How many of them were prepared a second time in this attempt.
        cause: The failure, with the fields of `hetero.process.failure.Failure`.
    """

    id: SplitId
    kind: Literal["done", "bad", "returned"] = "done"
    batches: int = 0
    replayed: int = 0
    cause: Mapping[str, object] = field(default_factory=dict)


class Fence(NamedTuple):
    """Refuse batches of these splits whose attempt is not above `attempt`."""

    id: int
    epoch: int
    attempt: int
    splits: Sequence[int]


class Settlement(NamedTuple):
    """How claims to an epoch's splits were decided."""

    refused: list[tuple[str, SplitId]]
    reports: list[tuple[str, Report]]
    unknown: list[int]


class Epoch:
    """The splits of one epoch.

    Args:
        number: The epoch.
        fresh: Whether nobody can have held a split of it before.
    """

    def __init__(self, number: int, *, fresh: bool) -> None:
        self.number = number
        self.fresh = fresh
        self.settled = False
        self.begun = False
        self.left: set[int] = set()
        self.held: dict[int, Holder] = {}
        self.fencing: set[int] = set()
        self.done = bytearray()
        self.done_count = 0
        self.batches = 0
        self._hosts: Sequence[str | None] = ()  # by split, the one that alone can prepare it
        self._ready: dict[str | None, list[int]] = {}  # heaps, by that host
        self._arrived: dict[int, bytes] = {}
        self._claims: dict[str, dict[int, int]] = {}
        self._reports: list[tuple[str, Report]] = []

    # --- before it is settled -----------------------------------------------------------------------------------------

    def remember(self, done: bytes, batches: int) -> None:
        """Take over what is known to be done."""
        self.done, self.done_count, self.batches = bytearray(done), bitmap.count(done), batches

    def claim(self, host: str, split: int, attempt: int) -> None:
        """Note that a host says it holds, or held, a split."""
        claims = self._claims.setdefault(host, {})
        claims[split] = max(attempt, claims.get(split, attempt))

    def claimed(self, host: str, key: SplitId) -> bool:
        """Return whether the host has claimed just this."""
        return self._claims.get(host, {}).get(key.split) == key.attempt

    def claims_of(self, host: str) -> list[SplitId]:
        """Return what the host holds, as it says."""
        over = {report.id.split for other, report in self._reports if other == host}
        claims = self._claims.get(host, {}).items()
        return [SplitId(self.number, split, attempt) for split, attempt in claims if split not in over]

    def disclaim(self, host: str, split: int) -> None:
        """Drop one claim: it was refused."""
        del self._claims[host][split]

    def queue(self, host: str, report: Report) -> None:
        """Keep a report until it is known whose the splits are."""
        self._reports.append((host, report))

    def forget(self, host: str) -> None:
        """Drop all that a host has said: it begins anew, or is gone."""
        self._claims.pop(host, None)
        self._reports = [(other, report) for other, report in self._reports if other != host]

    def settle(self, hosts: Sequence[str | None], floors: Mapping[int, int]) -> Settlement:
        """Decide whose every split is.

        A claim holds if no rank refuses its attempt; of two that do, the later attempt is the one that counts.

        Args:
            hosts: By split, the host that alone can prepare it; None: any can.
            floors: By split, the highest attempt that a rank refuses.

        Returns:
            Claims that were refused; reports to be handled now; splits that nobody holds. Where the epoch is fresh the
            last are none: they are ready.
        """
        count, best = len(hosts), dict[int, Holder]()
        for host, claims in self._claims.items():
            for split, attempt in claims.items():
                valid = 0 <= split < count and not bitmap.has(self.done, split) and attempt > floors.get(split, -1)
                if valid and (split not in best or attempt > best[split].attempt):
                    best[split] = Holder(host, attempt)
        refused = [
            (host, SplitId(self.number, split, attempt))
            for host, claims in self._claims.items()
            for split, attempt in claims.items()
            if best.get(split) != Holder(host, attempt)
        ]
        self.settled, self._hosts, self.held = True, hosts, best
        unknown = [split for split in range(count) if split not in best and not bitmap.has(self.done, split)]
        if self.fresh and not self._claims:
            for split in unknown:  # ascending: each list is a heap
                self._ready.setdefault(hosts[split], []).append(split)
            unknown = []
        settlement = Settlement(refused, self._reports, unknown)
        self._claims, self._reports = {}, []
        return settlement

    # --- afterwards ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a split can be handed out."""
        return any(self._ready.values())

    @property
    def waiting(self) -> bool:
        """Whether a split is still to be handed out."""
        return self.ready or bool(self.fencing) or not self.settled

    def is_awaited_by(self, host: str) -> bool:
        """Return whether a split that cannot be handed out yet may soon be one for this host."""
        return not self.settled or any(self._hosts[split] in (None, host) for split in self.fencing)

    @property
    def complete(self) -> bool:
        """Whether all splits are done."""
        return self.settled and self.done_count == len(self._hosts)

    @property
    def lowest_ready(self) -> int:
        """The lowest split that can be handed out, to whichever host."""
        return min(heap[0] for heap in self._ready.values() if heap)

    def host_of(self, split: int) -> str | None:
        """Return the host that alone can prepare a split, None if any can."""
        return self._hosts[split]

    def next_for(self, host: str) -> int | None:
        """Return the split that is handed to this host next, None if there is none."""
        return min((heap[0] for lane in (None, host) if (heap := self._ready.get(lane))), default=None)

    def hand_out(self, split: int, holder: Holder) -> bytes:
        """Give a host its next split away; return the bitmap of its batches that are at ranks already."""
        heapq.heappop(self._ready[self._hosts[split]])
        self.held[split] = holder
        return self._arrived.pop(split, b"")

    def make_ready(self, split: int, arrived: bytes) -> None:
        """Let a split that was fenced be handed out again."""
        self.fencing.discard(split)
        heapq.heappush(self._ready.setdefault(self._hosts[split], []), split)
        if arrived:
            self._arrived[split] = arrived

    def finish(self, split: int, batches: int) -> None:
        """Note that a split is over; its holder has it no longer."""
        del self.held[split]
        bitmap.add(self.done, split)
        self.done_count += 1
        self.batches += batches
