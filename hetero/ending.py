"""What can end a host's part in the job, and the end that came of it."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import HeteroError
from hetero.process.failure import Failure


@dataclass(frozen=True)
class SignalReceived:
    """A signal reached the launcher, or what stands for one."""

    signum: int
    why: str = ""


@dataclass(frozen=True)
class JoinFailed:
    """The coordinator could not be reached or refused this host."""

    error: HeteroError


@dataclass(frozen=True)
class Unreachable:
    """The coordinator has not answered for this long."""

    seconds: float


@dataclass(frozen=True)
class Ending:
    """The one reason why this host's part is over.

    Attributes:
        exit_code: What the launcher exits with.
        failure: This host's own failure, which its peers do not know yet.
        reason: Why it leaves before the end, for the peers; empty if the job is over.
        cause: The failure behind the end, wherever it happened; None if all went well.
    """

    exit_code: int
    failure: Failure | None = None
    reason: str = ""
    cause: Failure | None = None
