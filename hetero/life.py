"""One host's part in the job, from the first process started to the last one reaped.

HostLife holds what all hosts share; `hetero.data_host` and `hetero.trainer_host` say what ends their part and how. The
loop turns events into at most one `Ending`; `_leave` carries it out. Peers are told before children are stopped, so
that nobody pays for a host that waits out a grace period.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace

from hetero import clusters
from hetero.control.channel import unresolved
from hetero.control.state import HostReport, JobState, Outcome, ProcessReport
from hetero.crew import Crew, crew_of
from hetero.departure import Departure
from hetero.ending import Ending, JoinFailed, SignalReceived, Unreachable
from hetero.errors import ChildFailed, HeteroError, PeerNeverCame, Stopped
from hetero.frozen import FrozenServices
from hetero.host import CONFIG_VARIABLE, PORT_VARIABLE, PROCESS_VARIABLE, HostConfig, feed_key, open_tasks, worker_key
from hetero.plan import HostPlan
from hetero.process import memory_folder
from hetero.process.child import ChildSpec
from hetero.process.failure import Failure, record_exception, sagemaker_text
from hetero.process.group import ChildEnded
from hetero.process.last_words import LastWords
from hetero.process.parent import PARENT_GONE
from hetero.process.supervisor import Supervisor
from hetero.rundir import LAUNCHER, read_json, write_json_atomic
from hetero.spec import ProcessKind, ProcessSpec

TELL_TIMEOUT_S = 5.0
"""How long a host that leaves tries to tell its peers."""
UNHEARD_TIMEOUT_S = 0.2
"""The same towards a coordinator that has not answered for a whole lease."""
COORDINATOR_START_S = 3.0
"""A coordinator that runs for less than this may only just be coming up."""
_SERVICES = (ProcessKind.DISPATCHER, ProcessKind.FEED, ProcessKind.WORKER)
_ORPHANED = "the process that started this launcher has ended"
MPIRUN_MARGIN_S = 0.5
"""How long before mpirun's SIGKILL a launcher has ended its children, to write what became of it."""


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
        self._tell_timeout_s = TELL_TIMEOUT_S
        self._signals = 0
        self._stopped_by: int | None = None
        self._killed_at_s: float | None = None
        self._workers_lost = 0
        self._given_up: set[str] = set()
        services = [spec.name for spec in (*plan.processes, *plan.later_processes) if spec.kind in _SERVICES]
        pulses = {name: self._run.pulse(config.host, name) for name in services}
        self._frozen = FrozenServices(pulses, self._settings.lease_s, self._note_stopped)
        self._hosts_coordinator = plan.runs_coordinator
        self._last_words: LastWords | None = None
        self._refused = False
        self._joined = False
        self._met_s: float | None = None

    def run(self) -> tuple[int, Failure | None]:
        """Live this host's life; return the launcher's exit code and the failure behind it, if there is one."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda number, _frame: self._on_signal(number))
        if callable(signal.getsignal(PARENT_GONE)):  # the launcher watches its parent
            signal.signal(PARENT_GONE, lambda *_: self._supervisor.post(SignalReceived(signal.SIGTERM, _ORPHANED)))
        if (path := clusters.failure_file(os.environ)) is not None:
            self._last_words = LastWords(path, self._run.path / f".{self._config.run_id}.reserve")
        try:
            self._make_work_folder()
            for spec in self._plan.processes:
                self._start(spec)
            threading.Thread(target=self._join, name="join", daemon=True).start()
            ending = self._loop()
        except HeteroError as error:
            ending = self._end_by(error)
        except Exception as error:  # no memory, no threads, or a mistake of ours: the peers have to hear of it too
            traceback.print_exc()
            ending = self._end_by(error)
        return self._leave(ending)

    def _make_work_folder(self) -> None:
        self._run.make_work(self._config.host)
        with contextlib.suppress(OSError):
            self._run.met(self._config.host).unlink(missing_ok=True)  # an earlier launcher's
        if self._plan.of_kind(ProcessKind.DISPATCHER):
            folder = memory_folder.make(self._config.run_id)
            if folder is not None:
                self._supervisor.own(folder)

    def _note_stopped(self, name: str, why: str) -> None:
        error, host = ChildFailed(f"{name} on {self._config.host} {why}."), self._config.host
        record_exception(self._run.error(host, name), error, host=host, process=name)

    def _on_signal(self, signum: int) -> None:
        """Ask for the end; asked again, do not wait for anybody. Runs between two bytecodes of the main thread."""
        self._signals += 1
        self._stopped_by = self._stopped_by or signum
        self._supervisor.post(SignalReceived(signum))
        mpi = self._config.mpi
        if self._signals > 1:
            self._supervisor.hurry()
        elif mpi is not None:  # mpirun will send SIGKILL soon
            left_s = max(0.0, mpi.kill_after_s - MPIRUN_MARGIN_S)
            self._killed_at_s = time.monotonic() + left_s
            self._tell_timeout_s = min(self._tell_timeout_s, left_s / 2)
            self._supervisor.hurry(within_s=left_s)

    # What a host of either role adds.

    def _on_state(self, state: JobState) -> Ending | None:
        raise NotImplementedError

    def _on_child_failed(self, spec: ProcessSpec, failure: Failure) -> Ending | None:
        raise NotImplementedError

    def _on_child_done(self, spec: ProcessSpec) -> Ending | None:
        raise NotImplementedError

    def _on_stop(self, event: SignalReceived) -> Ending | None:
        # The peers hear of it as the reason for leaving: a stop is the job's end, and no failure of this host.
        return replace(self._end_by(Stopped(event.signum, event.why)), failure=None)

    def _crew(self) -> Crew:
        parts = (self._config, self._control, self._supervisor)
        return crew_of(*parts, start=self._start, report=self._report, given_up=self._given_up)

    def _introduce(self) -> None:
        """Tell the peers what they must know of this host beside its report; once it is registered."""

    def _tell(self, ending: Ending) -> Ending:
        """Tell the peers; return the ending with what they knew better."""
        self._control.leave(ending.reason, report=self._report(), timeout_s=self._tell_timeout_s)
        return ending

    def _coordinator_gone(self, seconds: float) -> HeteroError:
        raise NotImplementedError

    def _before_stop(self, ending: Ending) -> None:
        """Say to the children why they are about to be stopped."""

    def _after_stop(self, ending: Ending) -> Ending:
        """Return the ending with what the children made of it."""
        return ending

    # Start.

    def _start(self, spec: ProcessSpec) -> None:
        host = self._topology.current
        self._specs[spec.name] = spec
        environment = {**self._environment, **spec.env, PROCESS_VARIABLE: spec.name, PORT_VARIABLE: str(spec.port or 0)}
        for left in (self._run.finished(host.name, spec.name), self._run.order(host.name, spec.name)):
            left.unlink(missing_ok=True)
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
                endless=spec.kind not in (ProcessKind.RANK, ProcessKind.LISTER),
            )
        )

    def _join(self) -> None:
        """Register with the coordinator, which may not be up yet, and keep the lease; runs in a thread."""
        post = self._supervisor.post
        try:
            self._control.register(self._report(), self._settings.start_timeout_s)
            self._joined = True
            self._introduce()
        except HeteroError as error:
            post(JoinFailed(error))
            return
        self._control.watch(post)
        self._control.start_lease(
            self._report, lambda seconds: post(Unreachable(seconds)), on_answer=self._note_answered
        )

    def _note_answered(self) -> None:
        """Touch the file whose age says when the coordinator has last answered, for health checks from outside."""
        with contextlib.suppress(OSError):
            self._run.pulse(self._config.host, LAUNCHER).touch()

    def _report(self) -> HostReport:
        """Return what this host tells of itself with each heartbeat."""
        children = self._supervisor.children()
        endpoints = self._state.endpoints if self._state else {}
        workers = [spec.name for spec in tuple(self._specs.values()) if spec.kind is ProcessKind.WORKER]
        running = {child.name for child in children if child.pid is not None}
        tasks = {name: open_tasks(endpoints.get(worker_key(self._config.host, name))) for name in workers}
        alive = [name for name in workers if name in running and tasks[name] is not None]
        return HostReport(
            ranks=self._plan.ranks,
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
        keys = {"dispatcher": process, "feed": feed_key(self._config.host)}
        key = keys.get(process, worker_key(self._config.host, process))
        address = endpoints.get(key, "").partition(" ")[0]
        if process == "coordinator":
            address = self._control.address
        elif self._config.engine == "grpc" and process.startswith("worker-"):
            return None  # announced with its feed's address: it listens nowhere itself
        return int(address.rpartition(":")[2]) if address else None

    # Watch.

    def _loop(self) -> Ending:
        deadline_s = time.monotonic() + self._settings.start_timeout_s + TELL_TIMEOUT_S
        while True:
            event = self._supervisor.next_event(timeout_s=1.0)
            ending = self._handle(event)
            if ending is not None:
                return ending
            self._frozen.check(self._supervisor.children())
            if not self._joined and (ending := self._on_unreachable(self._silent_s())) is not None:
                return ending
            if self._state is None and time.monotonic() > deadline_s:
                return self._end_by(self._no_coordinator())

    def _silent_s(self) -> float:
        """Return for how long the coordinator has answered a process of this host but not this launcher; 0 if not.

        Services can be faster than their launcher. A coordinator that they have found and that this one never hears is
        lost, like one that falls silent later; it is not one that has yet to come.
        """
        if self._met_s is None and (address := read_json(self._run.met(self._config.host))) is not None:
            self._met_s = time.monotonic()
            self._control.look_at(address)
        return 0.0 if self._met_s is None else time.monotonic() - self._met_s

    def _handle(self, event: object) -> Ending | None:
        ending = None
        if isinstance(event, SignalReceived):
            ending = self._on_stop(event)
        elif isinstance(event, JoinFailed):
            self._refused = not isinstance(event.error, PeerNeverCame)
            ending = self._end_by(self._no_coordinator() if isinstance(event.error, PeerNeverCame) else event.error)
        elif isinstance(event, Unreachable):
            ending = self._on_unreachable(event.seconds)
        elif isinstance(event, JobState):
            ending = self._on_new_state(event)
        elif isinstance(event, ChildEnded):
            ending = self._on_child_ended(event)
        return ending

    def _on_new_state(self, state: JobState) -> Ending | None:
        prefix = worker_key(self._config.host, "")
        known = self._state.endpoints if self._state else {}
        self._state = state
        if any(name.startswith(prefix) and name not in known for name in state.endpoints):
            self._control.report_now()  # a worker of this host serves: training may be waiting for that
        return self._on_state(state)

    def _on_unreachable(self, seconds: float) -> Ending | None:
        if self._hosts_coordinator:
            if seconds > self._settings.lease_s / 2:
                spared_s = max(self._settings.lease_s / 2, COORDINATOR_START_S)
                self._frozen.kill("coordinator", self._supervisor.children(), at_least_s=spared_s)
            return None
        if seconds < self._settings.lease_s:
            return None
        self._tell_timeout_s = UNHEARD_TIMEOUT_S
        return self._end_by(self._coordinator_gone(seconds))

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

    def _end_by(self, error: Exception) -> Ending:
        exit_code = error.exit_code if isinstance(error, HeteroError) else 1
        failure = Failure(
            host=self._config.host,
            process="launcher",
            time_s=time.time(),
            exception=type(error).__name__,
            message=str(error),
            suggested_exit_code=exit_code,
        )
        return Ending(exit_code, failure=failure, reason=str(error), cause=failure)

    def _end_by_state(self, state: JobState, exit_codes: Mapping[Outcome, int]) -> Ending:
        return Ending(exit_codes[state.outcome], cause=state.failure)

    def _no_coordinator(self) -> PeerNeverCame:
        self._tell_timeout_s = UNHEARD_TIMEOUT_S
        why = f"host {self._topology.coordinator_host.name} did not come, or --control-port differs between hosts"
        return PeerNeverCame(
            f"No coordinator answered at {self._config.control_address} within {self._settings.start_timeout_s:g} s: "
            f"{unresolved(self._config.control_address) or why}. See that host's log."
        )

    def _leave(self, ending: Ending) -> tuple[int, Failure | None]:
        if not self._refused:  # who was not let in has nothing to say in the job: another may play this host
            ending = self._tell(ending)
        with contextlib.suppress(OSError):
            self._note(ending)  # at once: whoever stops this launcher may not wait for its children
        self._before_stop(ending)
        others = [spec.name for spec in self._specs.values() if spec.kind is not ProcessKind.COORDINATOR]
        self._supervisor.stop(others)
        ending = self._after_stop(ending)
        departure = Departure(self._config, self._control, self._supervisor)
        if self._hosts_coordinator:
            told = self._stopped_by is not None
            departure.wait_for_farewells(stopped=told, killed_at_s=lambda: self._killed_at_s)
        try:
            self._write(ending)
        except OSError as error:  # a full disk changes nothing about how the job ended
            with contextlib.suppress(OSError):
                print(f"cannot write what the run leaves in {self._run.path}: {error}", flush=True)
        if clusters.leaves_after_chief(os.environ) and self._joined and self._tell_timeout_s != UNHEARD_TIMEOUT_S:
            departure.let_chief_end_first(lambda: self._stopped_by is not None, self._note_answered)
        self._supervisor.stop()
        self._control.close()
        if self._last_words is not None:
            self._last_words.close()
        return ending.exit_code, ending.cause

    def _note(self, ending: Ending) -> None:
        """Write the cause where it is looked for; the chief's word is the last one. May be repeated."""
        if ending.cause is None:
            return
        chief, words = self._config.is_chief, self._last_words
        if words is not None and ending.exit_code:
            with contextlib.suppress(OSError):
                if chief or self._config.mpi is None or not words.said:  # else it may be another launcher's
                    words.write(sagemaker_text(ending.cause))
        if chief or not self._run.failure.exists():
            write_json_atomic(self._run.failure, ending.cause.to_dict())

    def _write(self, ending: Ending) -> None:
        """Write what the host leaves."""
        if ending.cause is not None:
            role = self._topology.current.role.value
            with contextlib.suppress(OSError):
                print(f"[{role} {self._config.host}] {ending.cause.describe()}", flush=True)
        self._note(ending)
