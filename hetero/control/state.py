"""The job's state as every host sees it: frozen values, and the only place that turns them into protobuf and back."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero._proto import control_pb2 as pb
from hetero.process.failure import Failure

MAX_CAUSE_BYTES = 64 * 1024
_MAX_TEXT_CHARS = 12_000
_MAX_LINES = 40
_MAX_LINE_CHARS = 500


class Phase(str, enum.Enum):
    """WAITING -> TRAINING -> ENDED; or WAITING -> ENDED. Never back."""

    WAITING = "waiting"
    TRAINING = "training"
    ENDED = "ended"


class Outcome(str, enum.Enum):
    """How a job ended; NONE until it has."""

    NONE = "none"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    NEVER_STARTED = "never_started"
    TRAINER_LOST = "trainer_lost"
    DATA_LOST = "data_lost"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ProcessReport:
    """One process of a host, as its supervisor sees it."""

    name: str
    pid: int
    state: str
    port: int | None = None


@dataclass(frozen=True)
class HostReport:
    """What a host tells of itself with each heartbeat.

    Args:
        ranks: Training processes that it runs.
        workers_alive: Data workers that run now.
        workers_busy: Data workers that prepare input now.
        workers_lost: Data workers that died since the start, replaced ones included.
        workers_gone_for_good: No data worker is left and none will be started again.
        cpu_s: CPU time of all processes of the host since the start, in seconds.
        processes: The processes themselves.
    """

    ranks: int = 0
    workers_alive: int = 0
    workers_busy: int = 0
    workers_lost: int = 0
    workers_gone_for_good: bool = False
    cpu_s: float = 0.0
    processes: tuple[ProcessReport, ...] = ()


@dataclass(frozen=True)
class HostState:
    """One expected host; its numbers are those of its latest report, kept after it has left."""

    name: str
    role: str
    address: str = ""
    registered: bool = False
    ranks: int = 0
    workers_alive: int = 0
    workers_busy: int = 0
    workers_lost: int = 0
    workers_gone_for_good: bool = False
    cpu_s: float = 0.0
    processes: tuple[ProcessReport, ...] = ()
    left: bool = False
    lost: bool = False
    leave_reason: str = ""
    age_s: float = 0.0


@dataclass(frozen=True)
class JobState:
    """The whole job at one moment; `hosts` lists every expected host, data hosts first.

    Args:
        version: Grows with each change; states are ordered by (restarts, version).
        restarts: How often the coordinator was restarted.
        cause: The failure behind the outcome, with the fields of `hetero.process.failure.Failure`.
        endpoints: Where things listen: "dispatcher" -> "algo-1:6000".
        replayed_batches: Batches that were prepared a second time because a worker was lost (engine `grpc`).
        skipped_splits: Splits left out because the job's code failed in them (engine `grpc`).
    """

    version: int
    restarts: int
    run_id: str
    uptime_s: float
    phase: Phase
    outcome: Outcome = Outcome.NONE
    cause: dict[str, object] | None = None
    hosts: tuple[HostState, ...] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)
    replayed_batches: int = 0
    skipped_splits: int = 0

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.phase is Phase.ENDED

    @property
    def failure(self) -> Failure | None:
        """The cause as a failure; None if there is none."""
        return None if self.cause is None else failure_of(self.cause)

    @property
    def data_hosts(self) -> tuple[HostState, ...]:
        """The expected data hosts."""
        return tuple(host for host in self.hosts if host.role == "data")

    @property
    def trainer_hosts(self) -> tuple[HostState, ...]:
        """The expected trainer hosts."""
        return tuple(host for host in self.hosts if host.role == "trainer")

    @property
    def workers_alive(self) -> int:
        """Living data workers on the hosts that still serve."""
        return sum(host.workers_alive for host in self.hosts if not host.lost and not host.left)

    def host(self, name: str) -> HostState | None:
        """Return the state of one host, None if the job does not expect it."""
        return next((host for host in self.hosts if host.name == name), None)

    def to_dict(self) -> dict[str, object]:
        """Return the state as JSON values."""
        return dataclasses.asdict(self)


def first_rank_key(host: str) -> str:
    """Return the name under which a trainer host that mpirun started publishes the number of its first rank."""
    return f"first-rank/{host}"


def failure_of(cause: Mapping[str, object]) -> Failure:
    """Return a cause as a failure; what a caller left out, or filled with nonsense, is taken as unknown."""
    try:
        return Failure.from_dict({"host": "", "process": "coordinator", "time_s": 0.0, **cause})
    except ValueError:
        return Failure("", "coordinator", 0.0, message=str(dict(cause)))


def report_to_proto(report: HostReport) -> pb.HostReport:
    """Encode a report."""
    return pb.HostReport(
        ranks=report.ranks,
        workers_alive=report.workers_alive,
        workers_busy=report.workers_busy,
        workers_lost=report.workers_lost,
        workers_gone_for_good=report.workers_gone_for_good,
        cpu_s=report.cpu_s,
        processes=[pb.ProcessReport(name=p.name, pid=p.pid, state=p.state, port=p.port or 0) for p in report.processes],
    )


def report_from_proto(message: pb.HostReport) -> HostReport:
    """Decode a report."""
    return HostReport(
        ranks=message.ranks,
        workers_alive=message.workers_alive,
        workers_busy=message.workers_busy,
        workers_lost=message.workers_lost,
        workers_gone_for_good=message.workers_gone_for_good,
        cpu_s=message.cpu_s,
        processes=tuple(ProcessReport(p.name, p.pid, p.state, p.port or None) for p in message.processes),
    )


def report_to_json(report: HostReport) -> dict[str, object]:
    """Return a report as JSON values."""
    return dataclasses.asdict(report)


def report_from_json(value: Mapping[str, Any]) -> HostReport:
    """Rebuild a report from `report_to_json`."""
    fields = dict(value)
    processes = tuple(ProcessReport(**process) for process in fields.pop("processes", ()))
    return HostReport(**fields, processes=processes)


def host_state(name: str, role: str, report: HostReport, **fields: Any) -> HostState:
    """Join a host's latest report with what the coordinator knows of it."""
    numbers = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    return HostState(name=name, role=role, **numbers, **fields)


def state_to_proto(state: JobState) -> pb.JobState:
    """Encode a job state."""
    return pb.JobState(
        version=state.version,
        restarts=state.restarts,
        run_id=state.run_id,
        uptime_s=state.uptime_s,
        phase=f"PHASE_{state.phase.name}",
        outcome=outcome_to_proto(state.outcome),
        cause_json=cause_to_json(state.cause),
        hosts=[_host_to_proto(host) for host in state.hosts],
        endpoints=dict(state.endpoints),
        replayed_batches=state.replayed_batches,
        skipped_splits=state.skipped_splits,
    )


def state_from_proto(message: pb.JobState) -> JobState:
    """Decode a job state."""
    return JobState(
        version=message.version,
        restarts=message.restarts,
        run_id=message.run_id,
        uptime_s=message.uptime_s,
        phase=Phase[pb.Phase.Name(message.phase).removeprefix("PHASE_")],
        outcome=outcome_from_proto(message.outcome),
        cause=cause_from_json(message.cause_json),
        hosts=tuple(_host_from_proto(host) for host in message.hosts),
        endpoints=dict(message.endpoints),
        replayed_batches=message.replayed_batches,
        skipped_splits=message.skipped_splits,
    )


def outcome_to_proto(outcome: Outcome) -> str:
    """Encode an outcome by its name, which protobuf takes for its number."""
    return f"OUTCOME_{outcome.name}"


def outcome_from_proto(value: pb.Outcome) -> Outcome:
    """Decode an outcome.

    Raises:
        ValueError: The number is none that this version knows.
    """
    return Outcome[pb.Outcome.Name(value).removeprefix("OUTCOME_")]


def cause_to_json(cause: Mapping[str, object] | None) -> str:
    """Encode a cause, shortened to `MAX_CAUSE_BYTES`; an absent one is the empty string."""
    if cause is None:
        return ""
    text = json.dumps(cause, default=str)
    if len(text) <= MAX_CAUSE_BYTES:
        return text
    return json.dumps({key: _shortened(value) for key, value in cause.items()}, default=str)


def cause_from_json(text: str) -> dict[str, object] | None:
    """Decode a cause.

    Raises:
        ValueError: The text is no JSON object.
    """
    if not text:
        return None
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"a cause must be a JSON object, got {type(value).__name__}")  # noqa: TRY004 - a wrong value to the caller
    return value


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > _MAX_TEXT_CHARS:
        half = _MAX_TEXT_CHARS // 2
        return f"{value[:half]}\n[... {len(value) - 2 * half} characters left out ...]\n{value[-half:]}"
    if isinstance(value, (list, tuple)):
        return [str(line)[:_MAX_LINE_CHARS] for line in value[-_MAX_LINES:]]
    return value


def _host_to_proto(host: HostState) -> pb.HostState:
    report = HostReport(**{f.name: getattr(host, f.name) for f in dataclasses.fields(HostReport)})
    return pb.HostState(
        name=host.name,
        role=host.role,
        address=host.address,
        registered=host.registered,
        report=report_to_proto(report),
        left=host.left,
        lost=host.lost,
        leave_reason=host.leave_reason,
        age_s=host.age_s,
    )


def _host_from_proto(message: pb.HostState) -> HostState:
    return host_state(
        message.name,
        message.role,
        report_from_proto(message.report),
        address=message.address,
        registered=message.registered,
        left=message.left,
        lost=message.lost,
        leave_reason=message.leave_reason,
        age_s=message.age_s,
    )
