from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SplitId(_message.Message):
    __slots__ = ("epoch", "split", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    split: int
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., split: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ServeRequest(_message.Message):
    __slots__ = ("hello", "wanted", "done", "bad", "returned", "list", "stats")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    hello: ServeHello
    wanted: int
    done: _containers.RepeatedCompositeFieldContainer[SplitDone]
    bad: _containers.RepeatedCompositeFieldContainer[SplitBad]
    returned: _containers.RepeatedCompositeFieldContainer[SplitId]
    list: SplitList
    stats: FeedStats
    def __init__(self, hello: _Optional[_Union[ServeHello, _Mapping]] = ..., wanted: _Optional[int] = ..., done: _Optional[_Iterable[_Union[SplitDone, _Mapping]]] = ..., bad: _Optional[_Iterable[_Union[SplitBad, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[SplitId, _Mapping]]] = ..., list: _Optional[_Union[SplitList, _Mapping]] = ..., stats: _Optional[_Union[FeedStats, _Mapping]] = ...) -> None: ...

class ServeHello(_message.Message):
    __slots__ = ("host", "feed_id", "held", "done", "ended")
    HOST_FIELD_NUMBER: _ClassVar[int]
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    host: str
    feed_id: str
    held: _containers.RepeatedCompositeFieldContainer[SplitId]
    done: _containers.RepeatedCompositeFieldContainer[SplitDone]
    ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, host: _Optional[str] = ..., feed_id: _Optional[str] = ..., held: _Optional[_Iterable[_Union[SplitId, _Mapping]]] = ..., done: _Optional[_Iterable[_Union[SplitDone, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ...) -> None: ...

class SplitDone(_message.Message):
    __slots__ = ("id", "batches", "replayed")
    ID_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    id: SplitId
    batches: int
    replayed: int
    def __init__(self, id: _Optional[_Union[SplitId, _Mapping]] = ..., batches: _Optional[int] = ..., replayed: _Optional[int] = ...) -> None: ...

class SplitBad(_message.Message):
    __slots__ = ("id", "batches", "replayed", "cause_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_JSON_FIELD_NUMBER: _ClassVar[int]
    id: SplitId
    batches: int
    replayed: int
    cause_json: str
    def __init__(self, id: _Optional[_Union[SplitId, _Mapping]] = ..., batches: _Optional[int] = ..., replayed: _Optional[int] = ..., cause_json: _Optional[str] = ...) -> None: ...

class SplitList(_message.Message):
    __slots__ = ("values", "cause_json", "local")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_JSON_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    cause_json: str
    local: _containers.RepeatedCompositeFieldContainer[LocalSplits]
    def __init__(self, values: _Optional[_Iterable[str]] = ..., cause_json: _Optional[str] = ..., local: _Optional[_Iterable[_Union[LocalSplits, _Mapping]]] = ...) -> None: ...

class LocalSplits(_message.Message):
    __slots__ = ("channel", "splits")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    channel: str
    splits: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, channel: _Optional[str] = ..., splits: _Optional[_Iterable[int]] = ...) -> None: ...

class FeedStats(_message.Message):
    __slots__ = ("workers", "waiting_batches", "waiting_bytes", "ranks")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BATCHES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStats]
    waiting_batches: int
    waiting_bytes: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStats]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStats, _Mapping]]] = ..., waiting_batches: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStats, _Mapping]]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("name", "rows", "batches", "splits", "epoch", "split", "waiting_batches")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    WAITING_BATCHES_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    batches: int
    splits: int
    epoch: int
    split: int
    waiting_batches: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., batches: _Optional[int] = ..., splits: _Optional[int] = ..., epoch: _Optional[int] = ..., split: _Optional[int] = ..., waiting_batches: _Optional[int] = ...) -> None: ...

class RankStats(_message.Message):
    __slots__ = ("rank", "rows", "batches", "waiting_batches", "waiting_bytes", "epoch")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BATCHES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    rows: int
    batches: int
    waiting_batches: int
    waiting_bytes: int
    epoch: int
    def __init__(self, rank: _Optional[int] = ..., rows: _Optional[int] = ..., batches: _Optional[int] = ..., waiting_batches: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ServeReply(_message.Message):
    __slots__ = ("welcome", "assignments", "revoked", "list_splits", "epochs_ended")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    LIST_SPLITS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_ENDED_FIELD_NUMBER: _ClassVar[int]
    welcome: bool
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    revoked: _containers.RepeatedCompositeFieldContainer[SplitId]
    list_splits: bool
    epochs_ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, welcome: bool = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., revoked: _Optional[_Iterable[_Union[SplitId, _Mapping]]] = ..., list_splits: bool = ..., epochs_ended: _Optional[_Iterable[int]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("id", "value", "arrived")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    id: SplitId
    value: str
    arrived: bytes
    def __init__(self, id: _Optional[_Union[SplitId, _Mapping]] = ..., value: _Optional[str] = ..., arrived: _Optional[bytes] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("hello", "begun", "left", "fenced", "stats", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: FollowHello
    begun: _containers.RepeatedScalarFieldContainer[int]
    left: _containers.RepeatedScalarFieldContainer[int]
    fenced: _containers.RepeatedCompositeFieldContainer[Fenced]
    stats: RankStats
    bye: bool
    def __init__(self, hello: _Optional[_Union[FollowHello, _Mapping]] = ..., begun: _Optional[_Iterable[int]] = ..., left: _Optional[_Iterable[int]] = ..., fenced: _Optional[_Iterable[_Union[Fenced, _Mapping]]] = ..., stats: _Optional[_Union[RankStats, _Mapping]] = ..., bye: bool = ...) -> None: ...

class FollowHello(_message.Message):
    __slots__ = ("rank", "size", "run_id", "highest_attempt", "obeyed", "ended", "stray_channels")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OBEYED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STRAY_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    size: int
    run_id: str
    highest_attempt: int
    obeyed: _containers.RepeatedCompositeFieldContainer[Fence]
    ended: _containers.RepeatedScalarFieldContainer[int]
    stray_channels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., size: _Optional[int] = ..., run_id: _Optional[str] = ..., highest_attempt: _Optional[int] = ..., obeyed: _Optional[_Iterable[_Union[Fence, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ..., stray_channels: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("welcome", "fences", "epochs_ended")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_ENDED_FIELD_NUMBER: _ClassVar[int]
    welcome: bool
    fences: _containers.RepeatedCompositeFieldContainer[Fence]
    epochs_ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, welcome: bool = ..., fences: _Optional[_Iterable[_Union[Fence, _Mapping]]] = ..., epochs_ended: _Optional[_Iterable[int]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("id", "epoch", "attempt", "splits")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    id: int
    epoch: int
    attempt: int
    splits: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., splits: _Optional[_Iterable[int]] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("id", "arrived")
    ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    id: int
    arrived: _containers.RepeatedCompositeFieldContainer[Arrived]
    def __init__(self, id: _Optional[int] = ..., arrived: _Optional[_Iterable[_Union[Arrived, _Mapping]]] = ...) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("split", "batches")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    split: int
    batches: bytes
    def __init__(self, split: _Optional[int] = ..., batches: _Optional[bytes] = ...) -> None: ...

class GetInputRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InputState(_message.Message):
    __slots__ = ("splits", "epochs", "hosts", "ranks", "replayed_batches", "skipped")
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    splits: int
    epochs: _containers.RepeatedCompositeFieldContainer[EpochState]
    hosts: _containers.RepeatedCompositeFieldContainer[HostFeed]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStats]
    replayed_batches: int
    skipped: _containers.RepeatedCompositeFieldContainer[SkippedSplit]
    def __init__(self, splits: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[EpochState, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostFeed, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankStats, _Mapping]]] = ..., replayed_batches: _Optional[int] = ..., skipped: _Optional[_Iterable[_Union[SkippedSplit, _Mapping]]] = ...) -> None: ...

class EpochState(_message.Message):
    __slots__ = ("epoch", "done", "held", "batches", "ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    done: int
    held: int
    batches: int
    ended: bool
    def __init__(self, epoch: _Optional[int] = ..., done: _Optional[int] = ..., held: _Optional[int] = ..., batches: _Optional[int] = ..., ended: bool = ...) -> None: ...

class HostFeed(_message.Message):
    __slots__ = ("host", "connected", "stats", "stats_age_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STATS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    connected: bool
    stats: FeedStats
    stats_age_s: float
    def __init__(self, host: _Optional[str] = ..., connected: bool = ..., stats: _Optional[_Union[FeedStats, _Mapping]] = ..., stats_age_s: _Optional[float] = ...) -> None: ...

class SkippedSplit(_message.Message):
    __slots__ = ("epoch", "split", "value", "host", "cause")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    split: int
    value: str
    host: str
    cause: str
    def __init__(self, epoch: _Optional[int] = ..., split: _Optional[int] = ..., value: _Optional[str] = ..., host: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...
