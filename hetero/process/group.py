"""What the owner of a group of children sees: its state, its children's states, and the events of both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero.process.failure import Failure


class GroupState(Enum):
    """State of the group, with all its transitions.

    IDLE -> RUNNING                     first start
    RUNNING -> DEGRADED                 a child failed and waits to be started again
    DEGRADED -> RUNNING                 every such child runs again
    RUNNING | DEGRADED -> FAILED        a critical child failed for good; others may still run
    RUNNING -> SUCCEEDED                all have ended, no critical one by a failure
    any -> STOPPING -> STOPPED          stop() of all
    """

    IDLE = "idle"
    RUNNING = "running"
    DEGRADED = "degraded"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ChildState(Enum):
    """State of one child: RUNNING <-> WAITING (for its restart), then one of the last three."""

    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ChildEnded:
    """A child has been reaped.

    Args:
        name: The child.
        exit_code: Its exit code, None if a signal ended it.
        signal: Name of that signal.
        failure: Why it counts as failed; None if it ended well or because we stopped it.
        final: False if it will be started again.
        stopped: Whether it ended because we asked it to.
        attempts_left: Restarts left after the coming one.
        restart_in_s: Wait until that restart, None if there will be none.
    """

    name: str
    exit_code: int | None
    signal: str | None
    failure: Failure | None
    final: bool
    stopped: bool = False
    attempts_left: int = 0
    restart_in_s: float | None = None


@dataclass(frozen=True)
class ChildRestarted:
    """A child that had failed runs again; `attempt` counts its restarts from 1."""

    name: str
    pid: int
    attempt: int


@dataclass(frozen=True)
class ChildStatus:
    """One child as `children` shows it; `pid` is None unless it runs, `uptime_s` 0."""

    name: str
    pid: int | None
    state: ChildState
    restarts: int
    exit_code: int | None
    signal: str | None
    uptime_s: float
