"""Everything hetero raises, with the exit code that each error ends a launcher with.

HeteroError (1)
├── SettingsError (2)        wrong options, all of them in one message
├── TopologyError (2)        the cluster description cannot be used
├── JobFileError (2)         the job file cannot be found, read or understood
├── EngineError (2)          the chosen engine cannot run this input
├── PortInUse (2)            a port that cannot be another is taken
├── Unauthorised (2)         the job's token is missing or wrong
├── InputError (1)           the job's own input is unusable: ragged rows, an empty epoch
├── ChildFailed (1)          a process of this host ended badly
├── PeerFailed (1)           another rank or host ended the job; the cause lies there
├── CoordinatorUnreachable (3)
│   └── PeerNeverCame (3)    a host that the job needs did not come in time
├── DataServiceLost (4)      nobody is left who could prepare input
├── TrainerLost (5)          the trainers' lease lapsed
└── Stopped (128 + signal)   a signal asked this host to leave
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Sequence


class HeteroError(Exception):
    """Base of all errors raised by hetero.

    Attributes:
        exit_code: What a launcher ends with.
        secondary: Whether the error only follows from one elsewhere, which is the cause to report.
    """

    exit_code: int = 1
    secondary: bool = False


class SettingsError(HeteroError):
    """One or more options are wrong.

    Args:
        problems: One sentence each: the option, the value it got, what it needs.
    """

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = "Wrong settings" if len(self.problems) == 1 else f"{len(self.problems)} wrong settings"
        super().__init__(f"{head}:\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class TopologyError(HeteroError):
    """The description of the cluster is missing, broken or does not fit the settings."""

    exit_code = 2


class JobFileError(HeteroError):
    """The job reference or the file behind it cannot be used."""

    exit_code = 2


class EngineError(HeteroError):
    """The engine cannot run what the job's `inputs` returned; the message names an engine that can."""

    exit_code = 2


class PortInUse(HeteroError):
    """A port that peers rely on is taken."""

    exit_code = 2


class Unauthorised(HeteroError):
    """The coordinator refused the token."""

    exit_code = 2


class InputError(HeteroError):
    """The input that the job produced breaks the contract of a batch or an epoch."""


class ChildFailed(HeteroError):
    """A process of this host failed, or ended by a signal that nobody here sent."""


class PeerFailed(HeteroError):
    """Another rank or host ended the job; this error only follows from that one."""

    secondary = True


class CoordinatorUnreachable(HeteroError):
    """The coordinator gave no answer for the whole of the time allowed."""

    exit_code = 3


class PeerNeverCame(CoordinatorUnreachable):
    """A host that the job cannot do without did not appear before the start deadline."""


class DataServiceLost(HeteroError):
    """All data workers are gone for good: waiting for input would never end."""

    exit_code = 4


class TrainerLost(HeteroError):
    """The trainers gave no sign of life for a whole lease."""

    exit_code = 5


class Stopped(HeteroError):
    """A signal ended this host's part in the job.

    Args:
        signum: The signal received, SIGTERM or SIGINT.
        why: Who sent it, where that is known.
    """

    def __init__(self, signum: int, why: str = "") -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"stopped by {_signal.Signals(signum).name}{why and f': {why}'}")
