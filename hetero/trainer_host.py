"""A trainer host's life: its ranks, the rendezvous if it is the chief, and the word that ends the job for everybody."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero.control.state import HostReport, JobState, Outcome, first_rank_key
from hetero.ending import Ending, SignalReceived
from hetero.errors import DataServiceLost, HeteroError, PeerNeverCame, Stopped, TrainerLost
from hetero.host import HostConfig
from hetero.life import HostLife
from hetero.plan import HostPlan
from hetero.process.console import PROGRESS_VARIABLE
from hetero.process.failure import Failure, first_failure
from hetero.process.supervisor import Supervisor
from hetero.siblings import Siblings
from hetero.spare_cpus import LocalWorkers
from hetero.spec import ProcessKind, ProcessSpec
from hetero.stopping import checkpoint_outcome, leave_order
from hetero.summary import in_words, write_summary
from hetero.topology import Role

if TYPE_CHECKING:
    from hetero.training.horovod import RendezvousHandle

SETTLE_S = 2.0
"""How long a failure that only follows from another one waits for that other one to be told.

A rank that died is told of by its launcher at once. A host that vanished is known after a lease; then its peers' ranks,
broken off in an allreduce, have nothing to say but that somebody is gone.
"""
EXPLAIN_S = 0.3
"""How long a launcher that mpirun tells to stop waits to hear which other one has failed: mpirun kills after 1 s."""
_MPIRUN = "mpirun does so with all when it is stopped itself, and when one has failed (the first error in its output)"


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
        self._is_chief = config.is_chief
        if self._is_chief:
            with contextlib.suppress(OSError):
                self._run.checkpoint(config.host).unlink()  # of an earlier run
        self._siblings = Siblings(config.run(), config.host, config.mpi) if config.mpi else None
        self._asked_to_stop = False
        self._rendezvous: RendezvousHandle | None = None
        self._done: set[str] = set()
        self._failures: list[Failure] = []
        self._settled_s: float | None = None
        self._overdue_s: float | None = None
        self._local = LocalWorkers(config, plan, self._crew())

    def _introduce(self) -> None:
        if self._config.mpi is not None:
            key, first = first_rank_key(self._config.host), str(self._config.mpi.rank)
            self._control.publish(key, first, timeout_s=self._settings.start_timeout_s)

    def _report(self) -> HostReport:
        report = super()._report()
        return report if self._siblings is None else self._siblings.with_others(report)

    def _tell_siblings(self, *, done: bool = False) -> None:
        if self._siblings is not None:
            self._siblings.tell(super()._report(), done=done)

    def _loop(self) -> Ending:
        self._tell_siblings()
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
        if ending is None and self._overdue_s is None:
            self._local.tick()
        return ending

    def _training_is_over(self) -> None:
        """Bound the wait for ranks that only have to end: rank 0 ends when all ranks have handed in their results."""
        self._overdue_s = self._overdue_s or time.monotonic() + self._settings.grace_s

    def _end_by_outcome(self, state: JobState) -> Ending:
        ending = self._end_by_state(state, self._EXIT_CODES)
        asked_for = state.failure.suggested_exit_code if state.failure else None
        failed = state.outcome is Outcome.FAILED and asked_for
        return replace(ending, exit_code=asked_for or 1) if failed else ending

    def _on_state(self, state: JobState) -> Ending | None:
        if state.ended and state.outcome is not Outcome.SUCCEEDED:
            return self._end_by_outcome(state)
        if state.ended:
            self._training_is_over()
        if self._is_chief and self._rendezvous is None and (slots := self._slots(state)):
            self._start_rendezvous(slots)
        return None

    def _on_stop(self, event: SignalReceived) -> Ending | None:
        """Leave; but mpirun, which stops everybody when one has failed, is not the reason if that one is known soon."""
        if self._siblings is None or self._asked_to_stop:
            return super()._on_stop(event)
        self._asked_to_stop = True
        vanished = [sibling for sibling in self._siblings.others() if sibling.vanished]
        if vanished:
            whose = f"the launcher of rank-{vanished[0].local_rank}"
            text = f"{whose} is gone without a word: it was killed (out of memory?)"
            return self._failed(Failure(self._config.host, "launcher", time.time(), message=text))
        event = event if event.why else replace(event, why=_MPIRUN)
        threading.Timer(EXPLAIN_S, self._supervisor.post, [event]).start()
        return None

    def _slots(self, state: JobState) -> list[tuple[str, int]] | None:
        """Return the hosts with their numbers of ranks, in the order of ranks; None while one is missing."""
        hosts = list(state.trainer_hosts)
        if self._config.mpi is not None:
            first = {host.name: state.endpoints.get(first_rank_key(host.name)) for host in hosts}
            if None in first.values():
                return None
            hosts.sort(key=lambda host: int(first[host.name] or 0))
        return [(host.name, host.ranks) for host in hosts] if all(host.registered for host in hosts) else None

    def _start_rendezvous(self, slots: list[tuple[str, int]]) -> None:
        from hetero.training.horovod import start_rendezvous  # brings NumPy, which no other launcher needs

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

    def _on_child_failed(self, spec: ProcessSpec, failure: Failure) -> Ending | None:
        if self._plan.is_local(spec):
            self._local.on_failed(spec, failure)
            return None
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
        if self._is_chief:
            self._local.note()
        else:
            self._local.tell()
        if ending.exit_code == 0 and self._is_chief:
            with contextlib.suppress(HeteroError):  # unheard, the lapsing lease tells the data hosts
                self._state = self._control.end_training(Outcome.SUCCEEDED, timeout_s=self._tell_timeout_s)
        state = self._say_goodbye(ending) or self._control.state
        if ending.reason and state is not None and state.ended:
            # Asked to stop, and the job had ended already: that is why.
            return ending if state.outcome in (Outcome.STOPPED, Outcome.SUCCEEDED) else self._end_by_outcome(state)
        return ending

    def _say_goodbye(self, ending: Ending) -> JobState | None:
        """Say that this host goes; return the state after it."""
        return self._control.leave(ending.reason, report=self._report(), timeout_s=self._tell_timeout_s)

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
        self._say_goodbye(ending)
        return replace(ending, cause=first or failure)

    def _before_stop(self, ending: Ending) -> None:
        self._local.close()
        within_s = None if self._killed_at_s is None else max(0.05, self._killed_at_s - time.monotonic())
        for spec in self._specs.values():
            if spec.kind is ProcessKind.RANK:
                leave_order(self._run.order(self._config.host, spec.name), ending.exit_code, within_s)

    def _after_stop(self, ending: Ending) -> Ending:
        told = None if self._config.mpi else self._stopped_by  # mpirun tells all to stop where one has ended so
        if ending.exit_code == DataServiceLost.exit_code and told is not None:
            # All hosts were told to stop, and the data hosts were the first to leave.
            ending = replace(self._end_by(Stopped(told)), failure=None)
        if ending.cause is None or ending.cause.message is None:
            return ending
        said = self._run.checkpoint(self._config.host) if self._is_chief else None
        outcome = checkpoint_outcome(said, ending.exit_code, self._chief())
        if not outcome:
            return ending
        return replace(ending, cause=replace(ending.cause, message=f"{ending.cause.message}; {outcome}"))

    def _chief(self) -> str:
        """Return the name of the host with rank 0, as far as it is known."""
        known = self._state.endpoints if self._state and self._config.mpi else {}
        first = (host.name for host in self._topology.trainers if known.get(first_rank_key(host.name)) == "0")
        return next(first, self._topology.chief.name)

    def _coordinator_gone(self, seconds: float) -> HeteroError:
        where = f"The coordinator at {self._config.control_address} has not answered for {seconds:.0f} s"
        host = self._topology.coordinator_host
        if host.role is Role.DATA:
            text = f"the first data host ({host.name}) is lost, and with it the input, or this host is cut off."
            return DataServiceLost(f"{where}: {text}")
        return TrainerLost(f"{where}: the chief ({host.name}) is lost, or this host is cut off.")

    def _note(self, ending: Ending) -> None:
        self._tell_siblings(done=True)
        super()._note(ending)

    def _write(self, ending: Ending) -> None:
        super()._write(ending)
        if self._is_chief:
            outcome = "succeeded" if ending.exit_code == 0 else "stopped" if ending.exit_code > 128 else "failed"
            summary = write_summary(
                self._config,
                self._state,
                outcome,
                own=self._report(),
                local=self._local.summary(),
                tuning=self._local.tuning(),
            )
            if os.environ.get(PROGRESS_VARIABLE) != "events":  # `hetero run` shows all of it itself
                print(f"[{Role.TRAINER.value} {self._config.host}] {in_words(summary)}", flush=True)
