"""What spares a restarted coordinator work: which splits were done. Nothing fails without it, or with an old one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.control.journal import read_journal, replace_journal
from hetero.control.split_lists import Home, Splits
from hetero.control.split_mail import Past, Skipped

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Memory:
    """What a split book keeps for its successor.

    Args:
        splits: The list of splits; None: not known yet.
        attempt: The highest attempt.
        size: Number of ranks; None: not known yet.
        closed: Ranks that have said goodbye.
        replayed: Batches that were prepared a second time.
        skipped: Splits that were left out.
        ended: Epochs that have ended.
        past: The last of them.
        epochs: By open epoch, the bitmap of splits that are done, and how many batches those had.
    """

    splits: Splits | None = None
    attempt: int = 0
    size: int | None = None
    closed: tuple[int, ...] = ()
    replayed: int = 0
    skipped: tuple[Skipped, ...] = ()
    ended: tuple[int, ...] = ()
    past: tuple[Past, ...] = ()
    epochs: Mapping[int, tuple[bytes, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the memory as JSON values, without `splits`."""
        return {
            "attempt": self.attempt,
            "size": self.size,
            "closed": list(self.closed),
            "replayed": self.replayed,
            "skipped": [list(split) for split in self.skipped],
            "ended": list(self.ended),
            "past": [list(epoch) for epoch in self.past],
            "epochs": {str(number): [done.hex(), batches] for number, (done, batches) in self.epochs.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Memory:
        """Rebuild a memory from `to_json` and "splits".

        Raises:
            ValueError: It is none. KeyError, TypeError and AttributeError likewise.
        """
        size = value["size"]
        return cls(
            splits=_splits(value["splits"]),
            attempt=int(value["attempt"]),
            size=None if size is None else int(size),
            closed=tuple(int(rank) for rank in value["closed"]),
            replayed=int(value["replayed"]),
            skipped=tuple(Skipped(int(s[0]), int(s[1]), str(s[2]), str(s[3]), str(s[4])) for s in value["skipped"]),
            ended=tuple(int(number) for number in value["ended"]),
            past=tuple(Past(int(e[0]), int(e[1]), int(e[2])) for e in value["past"]),
            epochs={int(n): (bytes.fromhex(done), int(batches)) for n, (done, batches) in value["epochs"].items()},
        )


def _splits(value: Any) -> Splits | None:
    if value is None:
        return None
    values, homes = value
    if not (isinstance(values, list) and all(isinstance(text, str) for text in values)):
        raise ValueError("the list of splits is none")
    if len(homes) not in (0, len(values)):
        raise ValueError(f"{len(values)} splits and the homes of {len(homes)}")
    return Splits(tuple(values), tuple(home and Home(str(home[0]), str(home[1])) for home in homes))


class SplitJournal:
    """The file of one coordinator's memory.

    Args:
        path: The file.
        run_id: Name of the run; the journal of another one is not used.
        clock: Monotonic seconds.
    """

    def __init__(self, path: Path, run_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._run_id, self._clock = path, run_id, clock
        self._written: tuple[int, int] = (0, 0)
        self._written_s = -WRITE_INTERVAL_S
        self._splits: tuple[Splits | None, str] = (None, "null")

    def read(self) -> Memory | None:
        """Return what was kept; None if there is nothing that can be used."""
        value = read_journal(self._path)
        if value is None or value.get("run_id") != self._run_id:
            return None
        try:
            return Memory.from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            logger.warning("cannot use the journal %s (%r): asking everybody what is done", self._path, error)
            return None

    def write(self, version: int, important: int, memory: Callable[[], Memory], *, now: bool = False) -> None:
        """Write if something has changed, at most every `WRITE_INTERVAL_S`.

        Args:
            version: Grows with each change.
            important: Version of the last change that must not wait.
            memory: Returns what to keep.
            now: Write every change at once.
        """
        if self._written[0] == version:
            return
        if not now and important == self._written[1] and self._clock() - self._written_s < WRITE_INTERVAL_S:
            return
        self._written, self._written_s = (version, important), self._clock()
        kept = memory()
        if kept.splits is not self._splits[0]:  # encoded once: it may have many thousand entries
            self._splits = kept.splits, json.dumps(kept.splits)
        head = json.dumps({"run_id": self._run_id, **kept.to_json()})
        replace_journal(self._path, f'{head[:-1]}, "splits": {self._splits[1]}}}')
