"""What mpirun tells a process that it started: which rank it is, of how many. Pure.

SageMaker's toolkit starts the launcher so when a job's `distribution` names mpi: `mpirun` (OpenMPI) on one host of the
trainer group starts `launcher.py` once for each rank of the world, on every host of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero.errors import SettingsError

_VARIABLES = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_JOB = "PMIX_NAMESPACE"
_KILL_AFTER = "OMPI_MCA_odls_base_sigkill_timeout"
_MARGIN_S = 3.0
_KILL_AFTER_S = 1.0  # OpenMPI's own default


@dataclass(frozen=True)
class MpiRank:
    """One process of a world that mpirun started.

    Args:
        rank: Its number in the world, from 0.
        size: Processes of the world.
        local_rank: Its number on its host, from 0.
        local_size: Processes of the world on its host.
        job: Name of the world; differs between two runs of mpirun.
        kill_after_s: Seconds between the SIGTERM that mpirun sends to all when one has failed, and its SIGKILL.

    Raises:
        SettingsError: The numbers contradict each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""
    kill_after_s: float = _KILL_AFTER_S

    def __post_init__(self) -> None:
        """Refuse what no mpirun says."""
        # Ranks are numbered host by host or in turn; either way nobody's local number exceeds that in the world.
        if not (0 <= self.local_rank <= self.rank < self.size and self.local_rank < self.local_size <= self.size):
            said = ", ".join(f"{name}={getattr(self, field)}" for field, name in _VARIABLES.items())
            raise SettingsError([f"mpirun's variables contradict each other: {said}. Unset them, or start by mpirun"])

    @property
    def leads_host(self) -> bool:
        """Whether this is the process that stands for its host; the others only look after a rank each."""
        return self.local_rank == 0

    @property
    def leads_world(self) -> bool:
        """Whether this is rank 0 of the world, whose host is the chief."""
        return self.rank == 0

    @property
    def aborted_within_s(self) -> float:
        """How long mpirun takes, with all hosts there, to end everything after one process has failed."""
        return 2 * self.kill_after_s + _MARGIN_S  # it waits that long before SIGTERM, and again before SIGKILL

    @staticmethod
    def started(environ: Mapping[str, str]) -> bool:
        """Return whether mpirun started the process with this environment."""
        return any(environ.get(name) for name in _VARIABLES.values())

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> MpiRank | None:
        """Read OpenMPI's variables; None where this process was not started by mpirun.

        Raises:
            SettingsError: Some of them are missing or no numbers, or they contradict each other.
        """
        if not cls.started(environ):
            return None
        said = {field: environ.get(name, "") for field, name in _VARIABLES.items()}
        wrong = [f"{_VARIABLES[field]} is {value!r}" for field, value in said.items() if not _is_number(value)]
        if wrong:
            problem = (
                f"mpirun's variables are not whole: {', '.join(wrong)}; each needs a number. Start the launcher by "
                f"OpenMPI's mpirun, or unset all of them"
            )
            raise SettingsError([problem])
        numbers = {field: int(value) for field, value in said.items()}
        return cls(**numbers, job=environ.get(_JOB, ""), kill_after_s=_kill_after_s(environ))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _kill_after_s(environ: Mapping[str, str]) -> float:
    text = environ.get(_KILL_AFTER, "")
    return max(_KILL_AFTER_S, float(text)) if _is_number(text) else _KILL_AFTER_S
