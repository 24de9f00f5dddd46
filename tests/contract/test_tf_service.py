"""tf.data service with real processes, real ports and real signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensorflow as tf

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from hetero.data import tf_service
from hetero.data.tf_server import serve_dispatcher, serve_worker
from hetero.errors import DataServiceLost, EngineError, InputError, PortInUse

HOST = "127.0.0.1"
SERVER = """
    import sys
    from pathlib import Path
    from hetero.data.tf_server import serve_dispatcher, serve_worker

    def say(word):
        return lambda number: print(word, number, flush=True)

    kind, *args = sys.argv[1:]
    if kind == "dispatcher":
        serve_dispatcher(int(args[0]), Path(args[1]), run_id="run", on_listening=say("port"))
    else:
        serve_worker(args[0], "127.0.0.1", int(args[1]), port_file=Path(args[2]), tick_s=0.1,
                     on_listening=say("port"), on_tick=say("open"))
"""


def until(condition: Callable[[], object], what: str, limit_s: float = 15.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


class Server:
    """A dispatcher or worker process; its lines are read by a thread."""

    def __init__(self, *args: object) -> None:
        self.started = time.monotonic()
        self.port = 0
        self.up_s = 0.0
        self.open_tasks: int | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER), *map(str, args)], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                return  # killed in mid-line
            word, number = line.split()
            if word == "port":
                self.up_s = time.monotonic() - self.started
                self.port = int(number)
            else:
                self.open_tasks = int(number)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def ready(self) -> Server:
        until(lambda: self.port or self.process.poll() is not None, "the server listens")
        assert self.process.poll() is None
        return self

    def kill(self) -> None:
        """End it as a crash would, at once; it must still have been running."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        self._reader.join()
        self.process.stdout.close()  # type: ignore[union-attr]


class Cluster:
    """One dispatcher and its workers."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.folder = folder
        self.base = free_port()
        self.dispatcher = Server("dispatcher", self.base, folder / "dispatcher").ready()
        self.workers = [self.start_worker(index) for index in range(workers)]
        for worker in self.workers:
            worker.ready()

    def start_worker(self, index: int) -> Server:
        return Server("worker", self.dispatcher.address, self.base + 1, self.folder / f"port-{index}")

    def restart_dispatcher(self) -> None:
        self.dispatcher = Server("dispatcher", self.base, self.folder / "dispatcher").ready()

    def open(self, name: str, dataset: Any, **options: Any) -> tf_service.TfDataSource:
        address = self.dispatcher.address
        dataset_id = tf_service.register_epoch(dataset, address, dataset_id=name)
        return tf_service.open_epoch(address, dataset_id, job_name=name, **options)

    def stop(self) -> None:
        for server in (*self.workers, self.dispatcher):
            server.kill()


class Reader(threading.Thread):
    """Consumes a source, keeps the row ids."""

    def __init__(self, source: tf_service.TfDataSource) -> None:
        super().__init__(daemon=True)
        self.source = source
        self.ids: list[int] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for batch in self.source:
                self.ids += [int(row) for row in batch]
        except BaseException as error:
            self.error = error

    def rows(self, limit_s: float = 15.0) -> list[int]:
        self.join(limit_s)
        assert not self.is_alive(), f"still waiting after {len(self.ids)} rows"
        if self.error is not None:
            raise self.error
        return self.ids


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def slow_range(rows: int, loops: int = 3000) -> Any:
    """Row ids 0 .. rows-1, one a batch, each costing some time in the graph."""

    def work(row: Any) -> Any:
        spent = tf.while_loop(lambda i, _: i < loops, lambda i, s: (i + 1, tf.sin(s)), (0, 1.0))[1]
        return row + tf.cast(spent * 0, tf.int64)

    return tf.data.Dataset.range(rows).map(work).batch(1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests that harm nothing; it outlives the tests and ends with the module."""
    made = Cluster(tmp_path_factory.mktemp("healthy"))
    try:
        yield made
    finally:
        made.stop()


def test_two_consumers_share_every_row_over_epochs(healthy: Cluster) -> None:
    address = healthy.dispatcher.address
    for epoch in range(3):
        name = f"epoch-{epoch}"
        dataset = tf.data.Dataset.from_tensor_slices([[0, 50], [50, 100], [100, 103], [103, 300]]).flat_map(
            lambda span: tf.data.Dataset.range(tf.cast(span[0], tf.int64), tf.cast(span[1], tf.int64)).batch(7)
        )
        dataset_id = tf_service.register_epoch(dataset, address, dataset_id=name)
        readers = [
            Reader(tf_service.open_epoch(address, dataset_id, spec, job_name=name))
            for spec in (dataset.element_spec, None)
        ]
        assert sorted(row for reader in readers for row in reader.rows()) == list(range(300))


def test_arrays_are_read_only_views_and_keep_their_structure(healthy: Cluster) -> None:
    rows = {"image": tf.ones((1, 4, 2), tf.bfloat16), "more": (tf.constant([["a"] * 4]), tf.range(4)[None])}
    (batch,) = healthy.open("structure", tf.data.Dataset.from_tensor_slices(rows))
    assert batch["image"].shape == (4, 2)
    assert not batch["image"].flags.writeable
    assert not batch["more"][1].flags.owndata
    assert list(batch["more"][0]) == [b"a"] * 4


def test_killed_worker_is_replaced_on_its_port_and_the_epoch_ends(cluster: Cluster) -> None:
    reader = Reader(cluster.open("replace", slow_range(300)))
    until(lambda: len(reader.ids) > 40, "rows arrive")
    old = cluster.workers[0]
    old.kill()
    assert reader.is_alive()
    cluster.workers[0] = cluster.start_worker(0).ready()
    assert cluster.workers[0].port == old.port
    ids = reader.rows()
    assert len(ids) == len(set(ids))
    assert 280 <= len(ids) < 300 or set(ids) == set(range(300))


def test_killed_dispatcher_resumes_without_loss_or_repetition(cluster: Cluster) -> None:
    reader = Reader(cluster.open("resume", slow_range(300)))
    until(lambda: len(reader.ids) > 40, "rows arrive")
    cluster.dispatcher.kill()
    assert reader.is_alive()
    cluster.restart_dispatcher()
    assert sorted(reader.rows()) == list(range(300))


def test_worker_that_never_comes_back_is_retired_in_this_epoch_and_the_next(cluster: Cluster) -> None:
    idle = threading.Event()
    reader = Reader(cluster.open("lost", slow_range(200), service_idle=idle.is_set, stuck_after_s=0.5))
    until(lambda: len(reader.ids) > 40, "rows arrive")
    cluster.workers[0].kill()
    lost, survivor = cluster.workers
    until(lambda: survivor.open_tasks == 0, "the survivor has nothing left to do")
    assert reader.is_alive()
    assert not reader.source.is_stuck()
    idle.set()
    until(reader.source.is_stuck, "the source knows that nothing will come")
    dispatcher = tf_service.Dispatcher(cluster.dispatcher.address)
    assert dispatcher.retire("127.0.0.1:1") == 0
    assert dispatcher.retire(lost.address) == 1
    assert dispatcher.retire(lost.address) == 0
    ids = reader.rows()
    assert len(set(ids)) == len(ids) >= 180
    reader = Reader(cluster.open("next", slow_range(50)))
    until(lambda: dispatcher.retire(lost.address), "the next epoch gave the lost worker a task")
    assert sorted(reader.rows()) == list(range(50))
    dispatcher.close()


def test_host_that_froze_delays_the_next_epoch_but_does_not_hold_it(cluster: Cluster) -> None:
    frozen, survivor = cluster.workers
    list(cluster.open("before", slow_range(4)))  # the dispatcher has a connection to each worker by now
    frozen.process.send_signal(signal.SIGSTOP)
    source = cluster.open("after", slow_range(60), service_idle=lambda: survivor.open_tasks == 0, stuck_after_s=1.5)
    reader = Reader(source)
    until(lambda: len(reader.ids) == 60, "the survivor prepares every row")
    assert reader.is_alive()
    dispatcher = tf_service.Dispatcher(cluster.dispatcher.address)
    assert dispatcher.retire(frozen.address) == 1
    dispatcher.close()
    until(source.is_stuck, "the source knows that nothing will come")
    source.close()
    assert sorted(reader.rows(5)) == list(range(60))


def test_close_wakes_a_reader_whose_epoch_cannot_end(cluster: Cluster) -> None:
    reader = Reader(cluster.open("close", slow_range(60)))
    until(lambda: len(reader.ids) > 5, "rows arrive")
    cluster.workers[0].kill()
    cluster.workers[1].kill()
    reader.source.close()
    reader.source.close()
    reader.rows(5)


def test_failing_pipeline_is_the_jobs_error(healthy: Cluster) -> None:
    dataset = tf.data.TFRecordDataset(["/nowhere/shard-0.tfrecord"]).batch(2)
    reader = Reader(healthy.open("missing", dataset))
    with pytest.raises(InputError, match=r"NotFoundError.*/nowhere/shard-0\.tfrecord"):
        reader.rows()


def test_strangers_on_the_ports_disturb_nothing(healthy: Cluster) -> None:
    reader = Reader(healthy.open("strangers", slow_range(200)))
    until(lambda: len(reader.ids) > 10, "rows arrive")
    strangers = []
    for port in (healthy.dispatcher.port, healthy.workers[0].port):
        for index in range(100):
            stranger = socket.create_connection((HOST, port), timeout=5)
            if index % 2:
                stranger.sendall(os.urandom(64))
            strangers.append(stranger)
        socket.create_connection((HOST, port), timeout=5).close()
    assert sorted(reader.rows()) == list(range(200))
    for stranger in strangers:
        stranger.close()
    assert [s.process.poll() for s in (healthy.dispatcher, *healthy.workers)] == [None] * 3


def test_workers_started_together_share_no_port_and_start_fast(healthy: Cluster) -> None:
    assert len({healthy.dispatcher.port, *(worker.port for worker in healthy.workers)}) == 3
    assert healthy.dispatcher.up_s < 5


def test_taken_ports_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "port").write_text(str(port), encoding="ascii")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hetero.data.tf_server._OWN_PORT_WAIT_S", 0.0)
            with pytest.raises(PortInUse, match=f"port {port}"):
                serve_worker("127.0.0.1:1", HOST, port, port_file=tmp_path / "port")


def test_state_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run_id").write_text("yesterday", encoding="utf-8")
    with pytest.raises(EngineError, match="yesterday"):
        serve_dispatcher(0, tmp_path, run_id="today")


def test_absent_dispatcher_is_not_waited_for_without_end() -> None:
    with pytest.raises(DataServiceLost, match=r"no answer for 0\.5 s"):
        tf_service.register_epoch(slow_range(3), f"{HOST}:{free_port()}", timeout_s=0.5)


def double(row: Any) -> Any:
    return row


def produce() -> Iterator[int]:
    yield 1


class Pair(NamedTuple):
    left: Any
    right: Any


def python_inside() -> Any:
    inner = tf.function(lambda row: tf.py_function(double, [row], tf.int64))
    return tf.data.Dataset.range(4).map(inner).batch(2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: [1, 2], EngineError, "returned a list: .*--engine grpc"),
        (python_inside, EngineError, r"tf.py_function\(double\).*--engine grpc"),
        (
            lambda: tf.data.Dataset.range(4).map(lambda row: tf.numpy_function(double, [row], tf.int64)).batch(2),
            EngineError,
            r"tf.numpy_function\(double\).*--engine grpc",
        ),
        (
            lambda: tf.data.Dataset.from_generator(produce, output_signature=tf.TensorSpec((), tf.int32)).batch(2),
            EngineError,
            r"from_generator\(produce\).*--engine grpc",
        ),
        (lambda: tf.data.Dataset.range(4).batch(2).repeat(), InputError, r"remove \.repeat\(\)"),
        (lambda: tf.data.Dataset.range(0).batch(2), InputError, "is empty"),
        (
            lambda: tf.data.Dataset.range(4).map(lambda row: {"id": row, "two": [row, row]}),
            InputError,
            r"Component \['id'\].* is a scalar",
        ),
        (
            lambda: tf.data.Dataset.range(4).batch(2).map(lambda row: Pair(row, tf.RaggedTensor.from_tensor([row]))),
            InputError,
            r"Component \.right .*is ragged",
        ),
        (
            lambda: tf.data.Dataset.range(4).batch(2).map(lambda row: (row, tf.sparse.from_dense(row))),
            InputError,
            r"Component \[1\] .*is sparse",
        ),
    ],
)
def test_what_the_engine_cannot_run_is_said_beforehand(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        tf_service.check_dataset(make(), "tf_data")
    assert "\n" not in str(caught.value)


def test_local_engine_runs_python() -> None:
    tf_service.check_dataset(python_inside(), "local")
    tf_service.check_dataset([1, 2], "local")
    tf_service.check_dataset(slow_range(3), "tf_data")
