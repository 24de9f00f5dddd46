from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRequest(_message.Message):
    __slots__ = ("hello", "grant", "received")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    hello: ReadHello
    grant: Grant
    received: int
    def __init__(self, hello: _Optional[_Union[ReadHello, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., received: _Optional[int] = ...) -> None: ...

class ReadHello(_message.Message):
    __slots__ = ("rank", "size", "run_id", "feed_id", "received", "lane")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    size: int
    run_id: str
    feed_id: str
    received: int
    lane: bool
    def __init__(self, rank: _Optional[int] = ..., size: _Optional[int] = ..., run_id: _Optional[str] = ..., feed_id: _Optional[str] = ..., received: _Optional[int] = ..., lane: bool = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("epoch", "consumed_bytes", "consumed_batches", "window_bytes", "window_batches", "split")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BATCHES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    consumed_bytes: int
    consumed_batches: int
    window_bytes: int
    window_batches: int
    split: int
    def __init__(self, epoch: _Optional[int] = ..., consumed_bytes: _Optional[int] = ..., consumed_batches: _Optional[int] = ..., window_bytes: _Optional[int] = ..., window_batches: _Optional[int] = ..., split: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("welcome", "batch", "split_end", "epoch_end", "padding", "data")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_END_FIELD_NUMBER: _ClassVar[int]
    EPOCH_END_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    batch: BatchHeader
    split_end: SplitEnd
    epoch_end: EpochEnd
    padding: bytes
    data: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., batch: _Optional[_Union[BatchHeader, _Mapping]] = ..., split_end: _Optional[_Union[SplitEnd, _Mapping]] = ..., epoch_end: _Optional[_Union[EpochEnd, _Mapping]] = ..., padding: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("feed_id", "lane")
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    feed_id: str
    lane: Lane
    def __init__(self, feed_id: _Optional[str] = ..., lane: _Optional[_Union[Lane, _Mapping]] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("port", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("epoch", "split", "sequence", "attempt", "rows", "bytes", "layout")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    split: int
    sequence: int
    attempt: int
    rows: int
    bytes: int
    layout: Layout
    def __init__(self, epoch: _Optional[int] = ..., split: _Optional[int] = ..., sequence: _Optional[int] = ..., attempt: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("arrays", "tree")
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    tree: str
    def __init__(self, arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ..., tree: _Optional[str] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("path", "dtype", "shape", "offset", "bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    bytes: int
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class SplitEnd(_message.Message):
    __slots__ = ("epoch", "split", "attempt", "batches")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    split: int
    attempt: int
    batches: int
    def __init__(self, epoch: _Optional[int] = ..., split: _Optional[int] = ..., attempt: _Optional[int] = ..., batches: _Optional[int] = ...) -> None: ...

class EpochEnd(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
