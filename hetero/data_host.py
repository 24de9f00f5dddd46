"""A data host's life: it prepares input until training is over, and leaves whatever became of the trainers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from hetero.control.state import JobState, Outcome
from hetero.data_workers import DataWorkers
from hetero.ending import Ending
from hetero.errors import ChildFailed, DataServiceLost, HeteroError, PeerNeverCame, TrainerLost
from hetero.host import LISTING_KEY, HostConfig
from hetero.life import HostLife
from hetero.plan import LISTER, HostPlan
from hetero.process.failure import Failure
from hetero.process.supervisor import Supervisor
from hetero.spec import ProcessKind, ProcessSpec


class DataHostLife(HostLife):
    """A host that prepares input: there until training is over."""

    _EXIT_CODES: Mapping[Outcome, int] = {
        Outcome.SUCCEEDED: 0,
        Outcome.FAILED: 0,  # the trainer's host reports it; a second failure would bury the cause
        Outcome.STOPPED: 0,
        Outcome.NEVER_STARTED: PeerNeverCame.exit_code,
        Outcome.TRAINER_LOST: TrainerLost.exit_code,
        Outcome.DATA_LOST: DataServiceLost.exit_code,
    }

    def __init__(
        self, config: HostConfig, plan: HostPlan, supervisor: Supervisor, environment: Mapping[str, str]
    ) -> None:
        super().__init__(config, plan, supervisor, environment)
        self._data_workers = DataWorkers(config, plan, self._crew())

    def _introduce(self) -> None:
        self._data_workers.tell()

    def _handle(self, event: object) -> Ending | None:
        ending = super()._handle(event)
        if ending is None:
            self._data_workers.tick()
        return ending

    def _on_state(self, state: JobState) -> Ending | None:
        if not state.ended:
            if self._hosts_coordinator and LISTING_KEY in state.endpoints and LISTER.name not in self._specs:
                self._start(LISTER)
            return None
        ending = self._end_by_state(state, self._EXIT_CODES)
        return ending if ending.exit_code else replace(ending, cause=None)

    def _on_child_done(self, spec: ProcessSpec) -> Ending | None:
        if spec.kind in (ProcessKind.COORDINATOR, ProcessKind.LISTER):
            return None
        # Services run until they are told to stop; one that ends by itself, however well, has stopped preparing input.
        return self._end_by(ChildFailed(f"{spec.name} on {self._config.host} ended by itself with exit code 0."))

    def _on_child_failed(self, spec: ProcessSpec, failure: Failure) -> Ending | None:
        if self._data_workers.on_failed(spec, failure):
            return None
        with contextlib.suppress(HeteroError):  # should the job be lost by this, the coordinator knows why
            age_s = max(0.0, time.time() - failure.time_s)
            self._control.report_failure(failure.to_dict(), age_s, timeout_s=self._tell_timeout_s)
        if spec.kind in (ProcessKind.DISPATCHER, ProcessKind.FEED, ProcessKind.LISTER):
            return self._failed(failure)
        workers = {name for name, other in self._specs.items() if other.kind is ProcessKind.WORKER}
        if self._hosts_coordinator or not workers <= self._given_up:
            return None  # other workers go on; with none left anywhere the coordinator ends the job
        return self._failed(failure)

    def _coordinator_gone(self, seconds: float) -> HeteroError:
        return DataServiceLost(
            f"The coordinator at {self._config.control_address} has not answered for {seconds:.0f} s: the first data "
            f"host ({self._topology.coordinator_host.name}) is lost, and with it the input, or this host is cut off. "
            "See that host's log."
        )
