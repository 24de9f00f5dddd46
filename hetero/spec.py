"""Blueprints of processes: what a plan lists and a launcher starts. Pure values, nothing here runs anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class ProcessKind(Enum):
    """What a process of hetero does for its host."""

    COORDINATOR = "coordinator"
    DISPATCHER = "dispatcher"
    FEED = "feed"
    WORKER = "worker"
    RANK = "rank"
    LISTER = "lister"


@dataclass(frozen=True)
class RestartPolicy:
    """How often a process that failed is started again.

    A sliding window rather than a total: a worker that dies once a day for a month is no reason to give up a job, one
    that dies three times in a minute is.

    Args:
        attempts: Restarts allowed within `window_s`; 0 means never.
        window_s: Length of the sliding window, seconds.
        backoff_s: Wait before the first restart of a window; doubles with each further one.
        max_backoff_s: Upper bound of that wait.

    Raises:
        ValueError: A value is out of range; all of them are named.
    """

    attempts: int = 0
    window_s: float = 60.0
    backoff_s: float = 0.2
    max_backoff_s: float = 5.0

    def __post_init__(self) -> None:
        problems = []
        if self.attempts < 0:
            problems.append(f"attempts is {self.attempts}, needs 0 or more")
        if self.window_s <= 0:
            problems.append(f"window_s is {self.window_s}, needs more than 0")
        if not 0 <= self.backoff_s <= self.max_backoff_s:
            problems.append(f"backoff_s is {self.backoff_s}, needs 0 to max_backoff_s ({self.max_backoff_s})")
        if problems:
            raise ValueError("wrong RestartPolicy: " + "; ".join(problems))

    def delay_s(self, restarts: int) -> float:
        """Return the wait before the next restart, after `restarts` of them within the window."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(restarts, 60))


NEVER = RestartPolicy()


@dataclass(frozen=True)
class ProcessSpec:
    """One process of one host, as planned.

    Args:
        name: Unique on its host: "coordinator", "dispatcher", "worker-0", "rank-3", "lister".
        kind: What it does.
        module: Python module that is its main.
        args: Command line after the module.
        env: Variables set on top of the launcher's own environment.
        port: The port it prefers to listen on, None if it listens on none.
        restarts: What happens when it fails.
        critical: Whether its failure for good ends the host's part in the job.
    """

    name: str
    kind: ProcessKind
    module: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    restarts: RestartPolicy = NEVER
    critical: bool = True
