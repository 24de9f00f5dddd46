"""One host's part in the job, from the first process started to the last one reaped.

HostLife holds what all hosts share; DataHostLife and TrainerHostLife say what ends their part and how. The loop turns
events into at most one `Ending`; `_leave` carries it out. Peers are told before children are stopped, so that nobody pays
for a host that waits out a grace period.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero.control.state import HostReport, JobState, Outcome, ProcessReport
from hetero.errors import DataServiceLost, HeteroError, PeerNeverCame, Stopped, TrainerLost
from hetero.host import CONFIG_VARIABLE, PORT_VARIABLE, PROCESS_VARIABLE, HostConfig, open_tasks, worker_key
from hetero.plan import HostPlan
from hetero.process.child import ChildSpec
from hetero.process.failure import Failure, first_failure
from hetero.process.supervisor import ChildEnded, ChildRestarted, Supervisor
from hetero.rundir import write_json_atomic
from hetero.spec import ProcessKind, ProcessSpec
from hetero.summary import write_summary
from hetero.topology import Role

if TYPE_CHECKING:
    from hetero.training.horovod import RendezvousHandle

TELL_TIMEOUT_S = 5.0
SETTLE_S = 2.0
"""How long a failure that only follows from another one waits for that other one."""
FAREWELL_S = 1.5
"""How long the coordinator outlives the end so that every peer has heard of it."""


@dataclass(frozen=True)
class SignalReceived:
    """A signal reached the launcher."""

    signum: int


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


class HostLife:
    """What every host does.

    Args:
        config: Which host this is, in which job.
        plan: The processes of this host.
        supervisor: Starts and ends them; entered and left by the caller.
        environment: Environment of the children.
    """

    def __init__(
        self, config: HostConfig, plan: HostPlan, supervisor: Supervisor, environment: Mapping[str, str]
    ) -> None:
        self._config, self._plan, self._supervisor = config, plan, supervisor
        self._settings, self._topology = config.settings, config.topology
        self._run = config.run()
        self._environment = {**environment, CONFIG_VARIABLE: config.to_json()}
        self._specs = {spec.name: spec for spec in plan.processes}
        self._control = config.connect()
        self._state: JobState | None = None
        self._workers_lost = 0
        self._given_up: set[str] = set()
        self._hosts_coordinator = config.topology.coordinator_host == config.topology.current

    def run(self) -> tuple[int, Failure | None]:
        """Live this host's life; return the launcher's exit code and the failure behind it, if there is one."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda number, _frame: self._supervisor.post(SignalReceived(number)))
        try:
            for spec in self._plan.processes:
                self._start(spec)
            threading.Thread(target=self._join, name="join", daemon=True).start()
            ending = self._loop()
        except HeteroError as error:
            ending = self._end_by(error)
        return self._leave(ending)

    # What a host of either role adds.

    def _on_state(self, state: JobState) -> Ending | None:
        raise NotImplementedError

    def _on_child_failed(self, spec: ProcessSpec, failure: Failure) -> Ending | None:
        raise NotImplementedError

    def _on_child_done(self, spec: ProcessSpec) -> Ending | None:
        """Handle a child that ended well; only ranks do that."""
        return None

    def _tell(self, ending: Ending) -> Ending:
        """Tell the peers; return the ending with what they knew better."""
        self._control.leave(ending.reason, report=self._report(), timeout_s=TELL_TIMEOUT_S)
        return ending

    def _coordinator_gone(self, seconds: float) -> HeteroError:
        raise NotImplementedError

    # Start.

    def _start(self, spec: ProcessSpec) -> None:
        host = self._topology.current
        environment = {**self._environment, **spec.env, PROCESS_VARIABLE: spec.name, PORT_VARIABLE: str(spec.port or 0)}
        self._supervisor.start(
            ChildSpec(
                name=spec.name,
                argv=(sys.executable, "-m", spec.module, *spec.args),
                env=environment,
                log_path=self._run.log(host.name, spec.name),
                prefix=f"[{host.role.value} {host.name} {spec.name}] ",
                restarts=spec.restarts,
                error_path=self._run.error(host.name, spec.name),
                critical=spec.critical,
            )
        )

    def _join(self) -> None:
        """Register with the coordinator, which may not be up yet, and keep the lease; runs in a thread."""
        post = self._supervisor.post
        try:
            self._control.register(self._report(), self._settings.start_timeout_s)
        except HeteroError as error:
            post(JoinFailed(error))
            return
        self._control.watch(post)
        self._control.start_lease(self._report, lambda seconds: post(Unreachable(seconds)))

    def _report(self) -> HostReport:
        """Return what this host tells of itself with each heartbeat."""
        children = self._supervisor.children()
        endpoints = self._state.endpoints if self._state else {}
        workers = [spec.name for spec in self._plan.processes if spec.kind is ProcessKind.WORKER]
        running = {child.name for child in children if child.pid is not None}
        tasks = {name: open_tasks(endpoints.get(worker_key(self._config.host, name))) for name in workers}
        alive = [name for name in workers if name in running and tasks[name] is not None]
        return HostReport(
            ranks=sum(spec.kind is ProcessKind.RANK for spec in self._plan.processes),
            workers_alive=len(alive),
            workers_busy=sum(bool(tasks[name]) for name in alive),
            workers_lost=self._workers_lost,
            workers_gone_for_good=bool(workers) and all(name in self._given_up for name in workers),
            cpu_s=self._supervisor.cpu_s() + time.process_time(),
            processes=tuple(
                ProcessReport(child.name, child.pid or 0, child.state.value, self._port(child.name))
                for child in children
            ),
        )

    def _port(self, process: str) -> int | None:
        endpoints = self._state.endpoints if self._state else {}
        key = process if process == "dispatcher" else worker_key(self._config.host, process)
        address = endpoints.get(key, "").partition(" ")[0]
        if process == "coordinator":
            address = self._config.control_address
        return int(address.rpartition(":")[2]) if address else None

    # Watch.

    def _loop(self) -> Ending:
        deadline_s = time.monotonic() + self._settings.start_timeout_s + TELL_TIMEOUT_S
        while True:
            event = self._supervisor.next_event(timeout_s=1.0)
            ending = self._handle(event)
            if ending is not None:
                return ending
            if self._state is None and time.monotonic() > deadline_s:
                return self._end_by(self._no_coordinator())

    def _handle(self, event: object) -> Ending | None:
        if isinstance(event, SignalReceived):
            stopped = Stopped(event.signum)
            return Ending(stopped.exit_code, reason=str(stopped))
        if isinstance(event, JoinFailed):
            return self._end_by(self._no_coordinator() if isinstance(event.error, PeerNeverCame) else event.error)
        if isinstance(event, Unreachable):
            if self._hosts_coordinator or event.seconds < self._settings.lease_s:
                return None
            return self._end_by(self._coordinator_gone(event.seconds))
        if isinstance(event, JobState):
            self._state = event
            return self._on_state(event)
        if isinstance(event, ChildRestarted):
            return None
        if isinstance(event, ChildEnded):
            return self._on_child_ended(event)
        return None

    def _on_child_ended(self, event: ChildEnded) -> Ending | None:
        spec = self._specs[event.name]
        self._control.report_now()
        if event.failure is None:
            return self._on_child_done(spec)
        if spec.kind is ProcessKind.WORKER:
            self._workers_lost += 1
        wrong_settings = event.failure.suggested_exit_code == 2
        if not event.final and not wrong_settings:
            return None
        if spec.kind is ProcessKind.COORDINATOR:
            return self._failed(event.failure)
        self._given_up.add(spec.name)
        return self._on_child_failed(spec, event.failure)

    # End.

    def _failed(self, failure: Failure) -> Ending:
        return Ending(failure.suggested_exit_code or 1, failure=failure, reason=failure.describe(), cause=failure)

    def _end_by(self, error: HeteroError) -> Ending:
        failure = Failure(
            host=self._config.host,
            process="launcher",
            time_s=time.time(),
            exception=type(error).__name__,
            message=str(error),
            suggested_exit_code=error.exit_code,
        )
        return Ending(error.exit_code, failure=failure, reason=str(error), cause=failure)

    def _end_by_state(self, state: JobState, exit_codes: Mapping[Outcome, int]) -> Ending:
        return Ending(exit_codes[state.outcome], cause=cause_of(state))

    def _no_coordinator(self) -> PeerNeverCame:
        host = self._topology.coordinator_host
        return PeerNeverCame(
            f"No coordinator answered at {self._config.control_address} within {self._settings.start_timeout_s:g} s: host "
            f"{host.name} did not come, or --control-port differs between hosts. See that host's log."
        )

    def _leave(self, ending: Ending) -> tuple[int, Failure | None]:
        ending = self._tell(ending)
        others = [spec.name for spec in self._plan.processes if spec.kind is not ProcessKind.COORDINATOR]
        self._supervisor.stop(others)
        if self._hosts_coordinator:
            self._wait_for_farewells()
        self._supervisor.stop()
        self._control.close()
        self._write(ending)
        return ending.exit_code, ending.cause

    def _wait_for_farewells(self) -> None:
        """Keep the coordinator up until every peer that still lives has heard of the end."""
        deadline_s = time.monotonic() + FAREWELL_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            state = self._control.state
            if state is not None and all(
                host.left or host.lost or not host.registered for host in state.hosts if host.name != self._config.host
            ):
                return
            self._supervisor.next_event(timeout_s=min(left_s, 0.05))

    def _write(self, ending: Ending) -> None:
        """Write failure.json if something failed; the chief's word is the last one."""
        if ending.cause is None:
            return
        print(f"[{self._topology.current.role.value} {self._config.host}] {ending.cause.describe()}", flush=True)
        is_chief = self._topology.chief == self._topology.current
        if is_chief or not self._run.failure.exists():
            write_json_atomic(self._run.failure, ending.cause.to_dict())


def cause_of(state: JobState) -> Failure | None:
    """Return the failure behind a job's end as the coordinator knows it."""
    if state.cause is None:
        return None
    values: dict[str, Any] = {"host": "", "process": "coordinator", "time_s": time.time(), **state.cause}
    return Failure.from_dict(values)


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

    def _on_state(self, state: JobState) -> Ending | None:
        if not state.ended:
            return None
        ending = self._end_by_state(state, self._EXIT_CODES)
        return ending if ending.exit_code else replace(ending, cause=None)

    def _on_child_failed(self, spec: ProcessSpec, failure: Failure) -> Ending | None:
        if spec.kind is ProcessKind.DISPATCHER:
            return self._failed(failure)
        workers = {name for name, other in self._specs.items() if other.kind is ProcessKind.WORKER}
        if self._hosts_coordinator or not workers <= self._given_up:
            return None  # other workers go on; with none left anywhere the coordinator ends the job
        return self._failed(failure)

    def _coordinator_gone(self, seconds: float) -> HeteroError:
        return DataServiceLost(
            f"The coordinator at {self._config.control_address} has not answered for {seconds:.0f} s: the first data host "
            f"({self._topology.coordinator_host.name}) is gone, and with it the job's input. See that host's log."
        )


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
        self._over: JobState | None = None

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
        return ending

    def _on_state(self, state: JobState) -> Ending | None:
        if state.ended and state.outcome is not Outcome.SUCCEEDED:
            return self._end_by_state(state, self._EXIT_CODES)
        if self._is_chief and self._rendezvous is None and all(host.registered for host in state.trainer_hosts):
            self._start_rendezvous(state)
        return None

    def _start_rendezvous(self, state: JobState) -> None:
        from hetero.training.horovod import start_rendezvous

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
        self._done.add(spec.name)
        ranks = {name for name, other in self._specs.items() if other.kind is ProcessKind.RANK}
        return Ending(0) if ranks <= self._done else None

    def _on_child_failed(self, spec: ProcessSpec, failure: Failure) -> Ending | None:
        self._failures.append(failure)
        if failure.secondary:
            # Another rank failed first; its launcher is about to say so.
            self._settled_s = self._settled_s or time.monotonic() + SETTLE_S
            return None
        return self._failed_ranks()

    def _failed_ranks(self) -> Ending:
        return self._failed(first_failure(self._failures))

    def _tell(self, ending: Ending) -> Ending:
        if ending.failure is not None:
            return self._tell_failure(ending, ending.failure)
        if ending.exit_code == 0 and self._is_chief:
            with contextlib.suppress(HeteroError):  # unheard, the lapsing lease tells the data hosts
                self._state = self._control.end_training(Outcome.SUCCEEDED, timeout_s=TELL_TIMEOUT_S)
        return super()._tell(ending)

    def _tell_failure(self, ending: Ending, failure: Failure) -> Ending:
        first = None
        with contextlib.suppress(HeteroError):
            self._state = self._control.end_training(
                Outcome.FAILED,
                failure.to_dict(),
                age_s=max(0.0, time.time() - failure.time_s),
                wait_for_primary_s=SETTLE_S if failure.secondary else 0.0,
                timeout_s=TELL_TIMEOUT_S,
            )
            first = cause_of(self._state)
        self._control.leave(ending.reason, report=self._report(), timeout_s=TELL_TIMEOUT_S)
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


def life_of(config: HostConfig) -> Callable[[HostConfig, HostPlan, Supervisor, Mapping[str, str]], HostLife]:
    """Return the class of life for this host's role."""
    return DataHostLife if config.topology.current.role is Role.DATA else TrainerHostLife
