"""The four ways that data_plane.py compares, each as a process that consumes and the processes that feed it.

    python benchmarks/data_streams.py raw|naive|tf_data|grpc FOLDER

starts what the variant needs, prints "ready" as JSON, and then measures one window for each line of JSON on its
standard input: {"rows": 8192, "count": 100, "skip": 12}. The answer is a line too: what the batches behind the first
`skip` took, in wall-clock time and in CPU time (user and system) of all processes of the variant, this one included.

A batch is float32 (rows, 28, 28), made once and sent again and again; the consumer has it as a numpy array.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from hetero.process.child import die_with_parent

Array = npt.NDArray[np.float32]
ROW = (28, 28)
_HOST = "127.0.0.1"
_WINDOW = struct.Struct("!qq")
_START_S = 60.0
_TICK_S = 0.01  # what /proc counts CPU time in


class Stream(Protocol):
    """One way for batches to come here. Entered once; `read` is called again for each window."""

    def __enter__(self) -> Stream:  # noqa: PYI034 - Self needs Python 3.11
        """Start the other processes."""
        ...

    def __exit__(self, *_: object) -> None:
        """End them."""
        ...

    @property
    def pids(self) -> list[int]:
        """The other processes."""
        ...

    def read(self, rows: int, count: int) -> Iterator[Array]:
        """Yield `count` batches, float32 (rows, 28, 28)."""
        ...


def prepared(rows: int) -> Array:
    """Return a batch as it is sent."""
    return np.random.default_rng(rows).random((rows, *ROW), dtype=np.float32)


class Producer:
    """A process of this file that says on its standard output which port it listens on."""

    def __init__(self, role: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), role, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def port(self) -> int:
        """Return the port, waiting for it."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """Kill it: nothing in it is worth an orderly end."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class WithProducers:
    """What variants share that have processes of this file as their other side."""

    def __init__(self) -> None:
        self.producers: list[Producer] = []

    def start(self, role: str, *arguments: object) -> Producer:
        """Start one more process."""
        self.producers.append(Producer(role, *arguments))
        return self.producers[-1]

    @property
    def pids(self) -> list[int]:
        """Return the processes, oldest first."""
        return [producer.pid for producer in self.producers]

    def __exit__(self, *_: object) -> None:
        for producer in reversed(self.producers):
            producer.end()


class Raw(WithProducers):
    """TCP and nothing else: `sendall` of a prepared buffer, `recv_into` another one."""

    def __enter__(self) -> Raw:  # noqa: PYI034 - Self needs Python 3.11
        self._socket = socket.create_connection((_HOST, self.start("produce-raw").port()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def read(self, rows: int, count: int) -> Iterator[Array]:
        """Yield the same array each time, filled anew."""
        batch = np.empty((rows, *ROW), dtype=np.float32)
        target = batch.reshape(-1).view(np.uint8).data
        self._socket.sendall(_WINDOW.pack(rows, count))
        for _ in range(count):
            have = 0
            while have < batch.nbytes:
                got = self._socket.recv_into(target[have:])
                if not got:
                    raise ConnectionError("the producer is gone")
                have += got
            yield batch

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        super().__exit__(*error)


def produce_raw() -> None:
    """Send as many batches as the consumer asks for."""
    with socket.create_server((_HOST, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := connection.recv(_WINDOW.size, socket.MSG_WAITALL):
        rows, count = _WINDOW.unpack(asked)
        buffer = prepared(rows).reshape(-1).view(np.uint8).data
        for _ in range(count):
            connection.sendall(buffer)


def naive_types() -> tuple[Any, Any]:
    """Return the classes of a request and of a batch, as protoc's Python code would make them.

    message Request { int64 rows = 1; int64 count = 2; }    message Batch { bytes image = 1; int64 rows = 2; }
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="naive.proto", package="naive", syntax="proto3")
    for name, fields in (
        ("Request", {"rows": field.TYPE_INT64, "count": field.TYPE_INT64}),
        ("Batch", {"image": field.TYPE_BYTES, "rows": field.TYPE_INT64}),
    ):
        message = file.message_type.add(name=name)
        for number, (key, kind) in enumerate(fields.items(), 1):
            message.field.add(name=key, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    if hasattr(message_factory, "GetMessageClass"):
        make: Callable[[Any], Any] = message_factory.GetMessageClass
    else:  # protobuf before 4.22
        make = message_factory.MessageFactory(pool).GetPrototype
    request, batch = (make(pool.FindMessageTypeByName(f"naive.{name}")) for name in ("Request", "Batch"))
    return request, batch


_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Naive(WithProducers):
    """What one writes first: a synchronous gRPC server, a message with a bytes field for each batch."""

    def __enter__(self) -> Naive:  # noqa: PYI034 - Self needs Python 3.11
        import grpc

        port = self.start("produce-naive").port()
        self._channel = grpc.insecure_channel(f"{_HOST}:{port}", options=_UNLIMITED)
        self._request, batch = naive_types()
        self._stream = self._channel.unary_stream(
            "/naive.Batches/Read", self._request.SerializeToString, batch.FromString
        )
        return self

    def read(self, rows: int, count: int) -> Iterator[Array]:
        """Yield views of the messages' bytes."""
        for message in self._stream(self._request(rows=rows, count=count)):
            yield np.frombuffer(message.image, dtype=np.float32).reshape(message.rows, *ROW)

    def __exit__(self, *error: object) -> None:
        self._channel.close()
        super().__exit__(*error)


def produce_naive() -> None:
    """Serve batches until killed."""
    import grpc

    request, batch = naive_types()

    def read(asked: Any, _context: Any) -> Iterator[Any]:
        array = prepared(asked.rows)
        for _ in range(asked.count):
            yield batch(image=array.tobytes(), rows=len(array))

    server = grpc.server(futures.ThreadPoolExecutor(2), options=_UNLIMITED)
    handler = grpc.unary_stream_rpc_method_handler(read, request.FromString, batch.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("naive.Batches", {"Read": handler}),))
    print(server.add_insecure_port(f"{_HOST}:0"), flush=True)
    server.start()
    server.wait_for_termination()


class TfData(WithProducers):
    """tf.data service as the `tf_data` engine uses it: dispatcher, one worker, no compression."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._windows = folder, 0

    def __enter__(self) -> TfData:  # noqa: PYI034 - Self needs Python 3.11
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        self._dispatcher = f"{_HOST}:{self.start('produce-tf-dispatcher', self._folder / 'dispatcher').port()}"
        self.start("produce-tf-worker", self._dispatcher).port()
        return self

    def read(self, rows: int, count: int) -> Iterator[Array]:
        """Yield what a rank is given, an epoch a window."""
        import tensorflow as tf

        from hetero.data import tf_service
        from hetero.data.epoch import InputStream

        self._windows += 1
        one = tf.data.Dataset.range(1).map(lambda _: tf.random.stateless_uniform((rows, *ROW), (1, 2)))
        dataset = one.cache().repeat(count)  # made once; what the worker takes again and again lies in its memory
        name = f"window-{self._windows}"
        tf_service.register_epoch(dataset, self._dispatcher, dataset_id=name)
        stream = InputStream(
            lambda _: tf_service.open_epoch(self._dispatcher, name, dataset.element_spec, job_name=name), rows
        )
        for batch in stream.batches(0):
            yield batch.data
        stream.close()


def produce_tf_dispatcher(folder: str) -> None:
    """Serve tf.data's dispatcher until killed."""
    from hetero.data.tf_server import serve_dispatcher

    serve_dispatcher(0, Path(folder), on_listening=lambda port: print(port, flush=True))


def produce_tf_worker(dispatcher: str) -> None:
    """Serve a tf.data worker until killed."""
    from hetero.data.tf_server import serve_worker

    serve_worker(dispatcher, _HOST, 0, on_listening=lambda port: print(port, flush=True))


class Grpc:
    """The `grpc` engine: coordinator, feed and one worker of hetero.children; FeedClient and InputStream in here."""

    def __init__(self, folder: Path) -> None:
        from feed_cluster import FeedCluster

        job = f"{Path(__file__).resolve().parent / 'jobs' / 'windows.py'}:job"
        self._folder, self._windows = folder / "windows", 0
        self._folder.mkdir()
        options = {"params": {"windows": str(self._folder)}}
        self._cluster = FeedCluster(folder, job, data_hosts=1, workers=1, options=options)

    def __enter__(self) -> Grpc:  # noqa: PYI034 - Self needs Python 3.11
        self._cluster.__enter__()
        self._rank = self._cluster.connect(0)
        return self

    @property
    def pids(self) -> list[int]:
        """The other processes."""
        return self._cluster.pids

    def read(self, rows: int, count: int) -> Iterator[Array]:
        """Yield what a rank is given, an epoch a window; the job reads the window's size from a file."""
        window = self._folder / f"{self._windows}.json"
        window.write_text(json.dumps({"rows": rows, "count": count}), encoding="utf-8")
        with self._rank.stream(batch_size=rows) as stream:
            for batch in stream.batches(self._windows):
                yield batch.data
        self._windows += 1

    def __exit__(self, *error: object) -> None:
        self._rank.close()
        self._cluster.__exit__(*error)


VARIANTS: Mapping[str, Callable[[Path], Stream]] = {
    "raw": lambda _folder: Raw(),
    "naive": lambda _folder: Naive(),
    "tf_data": TfData,
    "grpc": Grpc,
}
_PRODUCERS: Mapping[str, Callable[..., None]] = {
    "produce-raw": produce_raw,
    "produce-naive": produce_naive,
    "produce-tf-dispatcher": produce_tf_dispatcher,
    "produce-tf-worker": produce_tf_worker,
}


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds of processes so far, to 10 ms each."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)


def measure(stream: Stream, rows: int, count: int, skip: int) -> dict[str, float]:
    """Read one window; the first `skip` batches, in which pipelines start, do not count."""
    pids = [os.getpid(), *stream.pids]
    number, began_s, before_s, size = 0, 0.0, 0.0, 0
    for batch in stream.read(rows, count):
        if batch.shape != (rows, *ROW) or batch.dtype != np.float32:
            raise ValueError(f"a batch is {batch.dtype} {batch.shape}")
        number, size = number + 1, batch.nbytes
        if number == skip:
            before_s, began_s = cpu_s(pids), time.monotonic()
        elif number == count:
            took_s, used_s = time.monotonic() - began_s, cpu_s(pids) - before_s
    if number != count:
        raise ValueError(f"{number} batches came, not {count}")
    return {"batches": count - skip, "bytes": (count - skip) * size, "took_s": took_s, "cpu_s": used_s}


def main(role: str, *arguments: str) -> None:
    """Be a producer, or a consumer that measures windows until its standard input ends."""
    die_with_parent(os.getppid())
    if role in _PRODUCERS:
        _PRODUCERS[role](*arguments)
        return
    with VARIANTS[role](Path(arguments[0])) as stream:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(stream, **json.loads(line))), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # clients of tf.data service can delay an orderly end by 20 s
