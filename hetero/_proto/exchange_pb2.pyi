from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkRequest(_message.Message):
    __slots__ = ("hello", "reports", "left", "values", "failures", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    left: _containers.RepeatedCompositeFieldContainer[Left]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    goodbye: bool
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[Left, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., goodbye: bool = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ("welcome", "frontiers", "values", "failures")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRONTIERS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    welcome: bool
    frontiers: _containers.RepeatedCompositeFieldContainer[Frontier]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, welcome: bool = ..., frontiers: _Optional[_Iterable[_Union[Frontier, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("rank", "size")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    size: int
    def __init__(self, rank: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("epoch", "batches", "leftover")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LEFTOVER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batches: int
    leftover: int
    def __init__(self, epoch: _Optional[int] = ..., batches: _Optional[int] = ..., leftover: _Optional[int] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("epoch", "steps")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    steps: int
    def __init__(self, epoch: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Frontier(_message.Message):
    __slots__ = ("epoch", "batches", "leftovers", "left_after")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LEFTOVERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_AFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batches: _containers.RepeatedScalarFieldContainer[int]
    leftovers: _containers.RepeatedScalarFieldContainer[int]
    left_after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., batches: _Optional[_Iterable[int]] = ..., leftovers: _Optional[_Iterable[int]] = ..., left_after: _Optional[_Iterable[int]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("rank", "epoch", "message", "exit_code")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    epoch: int
    message: str
    exit_code: int
    def __init__(self, rank: _Optional[int] = ..., epoch: _Optional[int] = ..., message: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class Parcel(_message.Message):
    __slots__ = ("epoch", "step", "to", "part", "header", "size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    to: int
    part: int
    header: bytes
    size: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., to: _Optional[int] = ..., part: _Optional[int] = ..., header: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "parcel")
    DATA_FIELD_NUMBER: _ClassVar[int]
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    parcel: Parcel
    def __init__(self, data: _Optional[bytes] = ..., parcel: _Optional[_Union[Parcel, _Mapping]] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...
