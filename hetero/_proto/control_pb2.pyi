from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_WAITING: _ClassVar[Phase]
    PHASE_TRAINING: _ClassVar[Phase]
    PHASE_ENDED: _ClassVar[Phase]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_NONE: _ClassVar[Outcome]
    OUTCOME_SUCCEEDED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_NEVER_STARTED: _ClassVar[Outcome]
    OUTCOME_TRAINER_LOST: _ClassVar[Outcome]
    OUTCOME_DATA_LOST: _ClassVar[Outcome]
    OUTCOME_STOPPED: _ClassVar[Outcome]
PHASE_UNSPECIFIED: Phase
PHASE_WAITING: Phase
PHASE_TRAINING: Phase
PHASE_ENDED: Phase
OUTCOME_NONE: Outcome
OUTCOME_SUCCEEDED: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_NEVER_STARTED: Outcome
OUTCOME_TRAINER_LOST: Outcome
OUTCOME_DATA_LOST: Outcome
OUTCOME_STOPPED: Outcome

class ProcessReport(_message.Message):
    __slots__ = ("name", "pid", "state", "port")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    state: str
    port: int
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class HostReport(_message.Message):
    __slots__ = ("ranks", "workers_alive", "workers_busy", "workers_lost", "workers_gone_for_good", "cpu_s", "processes")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_BUSY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_LOST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_GONE_FOR_GOOD_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    workers_alive: int
    workers_busy: int
    workers_lost: int
    workers_gone_for_good: bool
    cpu_s: float
    processes: _containers.RepeatedCompositeFieldContainer[ProcessReport]
    def __init__(self, ranks: _Optional[int] = ..., workers_alive: _Optional[int] = ..., workers_busy: _Optional[int] = ..., workers_lost: _Optional[int] = ..., workers_gone_for_good: bool = ..., cpu_s: _Optional[float] = ..., processes: _Optional[_Iterable[_Union[ProcessReport, _Mapping]]] = ...) -> None: ...

class HostState(_message.Message):
    __slots__ = ("name", "role", "address", "registered", "report", "left", "lost", "leave_reason", "age_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEAVE_REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    address: str
    registered: bool
    report: HostReport
    left: bool
    lost: bool
    leave_reason: str
    age_s: float
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., registered: bool = ..., report: _Optional[_Union[HostReport, _Mapping]] = ..., left: bool = ..., lost: bool = ..., leave_reason: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class JobState(_message.Message):
    __slots__ = ("version", "restarts", "run_id", "uptime_s", "phase", "outcome", "cause_json", "hosts", "endpoints", "replayed_batches", "skipped_splits")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CAUSE_JSON_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_SPLITS_FIELD_NUMBER: _ClassVar[int]
    version: int
    restarts: int
    run_id: str
    uptime_s: float
    phase: Phase
    outcome: Outcome
    cause_json: str
    hosts: _containers.RepeatedCompositeFieldContainer[HostState]
    endpoints: _containers.ScalarMap[str, str]
    replayed_batches: int
    skipped_splits: int
    def __init__(self, version: _Optional[int] = ..., restarts: _Optional[int] = ..., run_id: _Optional[str] = ..., uptime_s: _Optional[float] = ..., phase: _Optional[_Union[Phase, str]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., cause_json: _Optional[str] = ..., hosts: _Optional[_Iterable[_Union[HostState, _Mapping]]] = ..., endpoints: _Optional[_Mapping[str, str]] = ..., replayed_batches: _Optional[int] = ..., skipped_splits: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("host", "role", "address", "report", "launcher")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    host: str
    role: str
    address: str
    report: HostReport
    launcher: str
    def __init__(self, host: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., report: _Optional[_Union[HostReport, _Mapping]] = ..., launcher: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("state", "lease_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    lease_s: float
    def __init__(self, state: _Optional[_Union[JobState, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("host", "report")
    HOST_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    report: HostReport
    def __init__(self, host: _Optional[str] = ..., report: _Optional[_Union[HostReport, _Mapping]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "version")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    known: bool
    version: int
    def __init__(self, known: bool = ..., version: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("host", "name", "address")
    HOST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    host: str
    name: str
    address: str
    def __init__(self, host: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndTrainingRequest(_message.Message):
    __slots__ = ("host", "outcome", "cause_json", "age_s", "wait_for_primary_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CAUSE_JSON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_PRIMARY_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    outcome: Outcome
    cause_json: str
    age_s: float
    wait_for_primary_s: float
    def __init__(self, host: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., cause_json: _Optional[str] = ..., age_s: _Optional[float] = ..., wait_for_primary_s: _Optional[float] = ...) -> None: ...

class ReportFailureRequest(_message.Message):
    __slots__ = ("host", "cause_json", "age_s", "wait_for_primary_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_JSON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_PRIMARY_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    cause_json: str
    age_s: float
    wait_for_primary_s: float
    def __init__(self, host: _Optional[str] = ..., cause_json: _Optional[str] = ..., age_s: _Optional[float] = ..., wait_for_primary_s: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("host", "reason", "report")
    HOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    reason: str
    report: HostReport
    def __init__(self, host: _Optional[str] = ..., reason: _Optional[str] = ..., report: _Optional[_Union[HostReport, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
