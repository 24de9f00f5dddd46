"""A trainer host's life: its ranks, the rendezvous if it is the chief, and the word that ends the job for everybody."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero.control.state import JobState, Outcome
from hetero.errors import DataServiceLost, HeteroError, PeerNeverCame, TrainerLost
from hetero.host import HostConfig
from hetero.life import Ending, HostLife
from hetero.plan import HostPlan
from hetero.process.failure import Failure, first_failure
from hetero.process.supervisor import Supervisor
from hetero.spec import ProcessKind, ProcessSpec
from hetero.summary import write_summary
from hetero.topology import Role

if TYPE_CHECKING:
    from hetero.training.horovod import RendezvousHandle

SETTLE_S = 2.0
"""How long a failure that only follows from another one waits for that other one to be told.

A rank that died is told of by its launcher at once. A host that vanished is known after a lease; then its peers' ranks,
broken off in an allreduce, have nothing to say but that somebody is gone.
"""


class TrainerHostLife(HostLife):
    """A host that trains: there until its ranks have ended."""

    _EXIT_CODES: Mapping[Outcome, int] = {
        Outcome.SUCCEEDED: 0,
        Outcome.FAILED: 1,
        Outcome.STOPPED: 128 + signal.SIGTERM,
        Outcome.NEVER_STARTED: PeerNeverCame.exit_code,
        Outcome.TRAINER_LOST: TrainerLost.exit_code,
        Outcome.DATA_LOST: DataServiceLost.exit_code,
    }

    def __init__(
        self, config: HostConfig, plan: HostPlan, supervisor: Supervisor, environment: Mapping[str, str]
    ) -> None:
        super().__init__(config, plan, supervisor, environment)
        self._is_chief = config.topology.chief == config.topology.current
        self._rendezvous: RendezvousHandle | None = None
        self._done: set[str] = set()
        self._failures: list[Failure] = []
        self._settled_s: float | None = None
        self._overdue_s: float | None = None

    def _loop(self) -> Ending:
        try:
            return super()._loop()
        finally:
            if self._rendezvous is not None:
                self._rendezvous.stop()

    def _handle(self, event: object) -> Ending | None:
        ending = super()._handle(event)
        if ending is None and self._settled_s is not None and time.monotonic() > self._settled_s:
            return self._failed_ranks()
        if ending is None and self._overdue_s is not None and time.monotonic() > self._overdue_s:
            return Ending(0)
        return ending

    def _training_is_over(self) -> None:
        """Bound the wait for ranks that only have to end: rank 0 ends when all ranks have handed in their results."""
        self._overdue_s = self._overdue_s or time.monotonic() + self._settings.grace_s

    def _on_state(self, state: JobState) -> Ending | None:
        if state.ended and state.outcome is not Outcome.SUCCEEDED:
            ending = self._end_by_state(state, self._EXIT_CODES)
            asked_for = state.failure.suggested_exit_code if state.failure else None
            failed = state.outcome is Outcome.FAILED and asked_for
            return replace(ending, exit_code=asked_for or 1) if failed else ending
        if state.ended:
            self._training_is_over()
        if self._is_chief and self._rendezvous is None and all(host.registered for host in state.trainer_hosts):
            self._start_rendezvous(state)
        return None

    def _start_rendezvous(self, state: JobState) -> None:
        from hetero.training.horovod import start_rendezvous  # brings NumPy, which no other launcher needs

        slots = [(host.name, host.ranks) for host in state.trainer_hosts]
        self._rendezvous = start_rendezvous(
            slots,
            self._topology.current.address,
            interface=self._topology.interface,
            timeout_s=self._settings.start_timeout_s,
        )
        self._control.publish("slots", json.dumps(slots))
        self._control.publish("rendezvous", self._rendezvous.endpoint)

    def _on_child_done(self, spec: ProcessSpec) -> Ending | None:
        if spec.kind is not ProcessKind.RANK:
            return None
        if not self._run.finished(self._config.host, spec.name).exists():
            text = f"{spec.name} on {self._config.host} ended with exit code 0 before its training was over (os._exit?)"
            return self._on_child_failed(spec, Failure(self._config.host, spec.name, time.time(), 0, message=text))
        self._done.add(spec.name)
        if self._is_chief and spec.name == "rank-0":
            self._training_is_over()
        ranks = {name for name, other in self._specs.items() if other.kind is ProcessKind.RANK}
        return Ending(0) if ranks <= self._done else None

    def _on_child_failed(self, _spec: ProcessSpec, failure: Failure) -> Ending | None:
        self._failures.append(failure)
        if failure.secondary:
            # Another rank failed first; its launcher is about to say so.
            wait_s = SETTLE_S + (self._settings.lease_s if len(self._topology.trainers) > 1 else 0.0)
            self._settled_s = self._settled_s or time.monotonic() + wait_s
            return None
        return self._failed_ranks()

    def _failed_ranks(self) -> Ending:
        return self._failed(first_failure(self._failures))

    def _tell(self, ending: Ending) -> Ending:
        if ending.failure is not None:
            return self._tell_failure(ending, ending.failure)
        if ending.exit_code == 0 and self._is_chief:
            with contextlib.suppress(HeteroError):  # unheard, the lapsing lease tells the data hosts
                self._state = self._control.end_training(Outcome.SUCCEEDED, timeout_s=self._tell_timeout_s)
        return super()._tell(ending)

    def _tell_failure(self, ending: Ending, failure: Failure) -> Ending:
        first = None
        with contextlib.suppress(HeteroError):
            self._state = self._control.end_training(
                Outcome.FAILED,
                failure.to_dict(),
                age_s=max(0.0, time.time() - failure.time_s),
                wait_for_primary_s=SETTLE_S if failure.secondary else 0.0,
                timeout_s=self._tell_timeout_s,
            )
            first = self._state.failure
        self._control.leave(ending.reason, report=self._report(), timeout_s=self._tell_timeout_s)
        return replace(ending, cause=first or failure)

    def _coordinator_gone(self, seconds: float) -> HeteroError:
        where = f"The coordinator at {self._config.control_address} has not answered for {seconds:.0f} s"
        host = self._topology.coordinator_host
        if host.role is Role.DATA:
            return DataServiceLost(f"{where}: the first data host ({host.name}) is gone, and with it the input.")
        return TrainerLost(f"{where}: the chief ({host.name}) is gone.")

    def _write(self, ending: Ending) -> None:
        super()._write(ending)
        if self._is_chief:
            outcome = "succeeded" if ending.exit_code == 0 else "stopped" if ending.exit_code > 128 else "failed"
            write_summary(self._config, self._state, outcome, own=self._report())
