"""A companion's life: where mpirun starts a launcher for each rank, all but a host's first only look after their rank.

The first one stands for the host: it registers, keeps the lease, runs what the host has only once. A companion starts
its rank, watches the coordinator, tells it if the rank fails, and ends when the rank or the job has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from hetero.control.lease import Lease
from hetero.control.state import JobState, Outcome
from hetero.ending import Ending, Unreachable
from hetero.errors import HeteroError
from hetero.host import HostConfig
from hetero.plan import HostPlan
from hetero.process.supervisor import Supervisor
from hetero.trainer_host import TrainerHostLife

_TELL_SIBLINGS_S = 1.0
_LOOKS_IN_A_LEASE = 4  # a state is larger than a heartbeat, and there may be a companion for each of hundreds of ranks


class CompanionLife(TrainerHostLife):
    """A launcher that looks after one rank of a host that another one stands for."""

    def __init__(
        self, config: HostConfig, plan: HostPlan, supervisor: Supervisor, environment: Mapping[str, str]
    ) -> None:
        super().__init__(config, plan, supervisor, environment)
        lease_s = self._settings.lease_s
        self._looks = Lease(lease_s / _LOOKS_IN_A_LEASE, self._look, lambda s: supervisor.post(Unreachable(s)))
        self._looking = False
        self._told_siblings_s = 0.0

    def _join(self) -> None:
        """Watch the coordinator. The host's first launcher registers it, and gives its signs of life."""
        self._joined = True
        self._control.watch(self._supervisor.post)

    def _look(self) -> None:
        """See whether the coordinator still answers."""
        self._control.status(self._settings.lease_s / _LOOKS_IN_A_LEASE)

    def _on_state(self, state: JobState) -> Ending | None:
        if not self._looking:
            self._looking = True
            self._looks.start()
        return super()._on_state(state)

    def _handle(self, event: object) -> Ending | None:
        if time.monotonic() > self._told_siblings_s + _TELL_SIBLINGS_S:
            self._told_siblings_s = time.monotonic()
            self._tell_siblings()
        return super()._handle(event)

    def _say_goodbye(self, ending: Ending) -> JobState | None:
        """Leave the host to its first launcher; but if this one was asked to stop, the job goes no further."""
        if ending.failure is not None or not ending.reason or ending.cause is None:
            return self._control.state
        with contextlib.suppress(HeteroError):
            return self._control.end_training(Outcome.STOPPED, ending.cause.to_dict(), timeout_s=self._tell_timeout_s)
        return self._control.state

    def _note(self, ending: Ending) -> None:
        self._looks.stop(0.0)
        super()._note(ending)
