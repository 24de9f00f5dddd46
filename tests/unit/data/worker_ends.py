"""Both ends of the link between workers and a feed: a feed that notes what it hears, workers as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hetero._proto import feed_pb2 as pb
from hetero.data.worker_frames import FrameReader, address_of, pack
from hetero.data.worker_link import Task, WorkerServer

DEADLINE_S = 40.0
SECRET = b"s" * 32
_numbers = itertools.count()


def fresh_name() -> str:
    """Return a socket name that no other test has."""
    return f"hetero-test-{os.getpid()}-{next(_numbers)}"


class Recorder:
    """Notes everything that it is told, and frees nothing unless `frees` is set."""

    def __init__(self, *, frees: bool = False) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.ports: list[Any] = []
        self.batches: list[Any] = []
        self.contents: list[bytes] = []
        self.frees = frees
        self._changed = asyncio.Event()

    def on_worker(self, port):
        self.ports.append(port)
        self._note("worker", port.name)

    def on_batch(self, port, batch):
        self.batches.append(batch)
        self.contents.append(bytes(port.payload(batch.slot)))
        if self.frees:
            port.free(batch.slot)
        self._note("batch", batch.sequence)

    def on_end(self, port, batches, replayed):
        self._note("end", batches, replayed)

    def on_failed(self, port, cause, batches, replayed):
        self._note("failed", cause, batches, replayed)

    def on_abandoned(self, port):
        self._note("abandoned")

    def on_splits(self, port, values):
        self._note("splits", values)

    def on_list_failed(self, port, cause):
        self._note("list_failed", cause)

    def on_gone(self, port):
        self._note("gone", port.name)

    def count(self, kind: str) -> int:
        return sum(event[0] == kind for event in self.heard)

    def last(self, kind: str) -> tuple[Any, ...]:
        return next(event for event in reversed(self.heard) if event[0] == kind)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until it holds, which only what is heard can bring about."""
        try:
            async with _timeout(DEADLINE_S):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"heard only {self.heard[-20:]}") from None

    async def until_heard(self, kind: str, times: int = 1) -> tuple[Any, ...]:
        """Wait for the n-th event of a kind and return the latest."""
        await self.until(lambda: self.count(kind) >= times)
        return self.last(kind)

    def _note(self, *event):
        self.heard.append(event)
        self._changed.set()


@contextlib.asynccontextmanager
async def _timeout(seconds: float) -> AsyncIterator[None]:
    task = asyncio.current_task()
    assert task is not None
    expired = []

    def expire():
        expired.append(True)
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if expired:
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


async def eventually(condition: Callable[[], Any], what: str = "it did not happen") -> None:
    """Wait for something that nobody tells of."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def feed(name: str, *, frees: bool = False) -> AsyncIterator[Recorder]:
    """A feed in this process that listens under `name`."""
    recorder = Recorder(frees=frees)
    server = WorkerServer(name, SECRET, recorder)
    await server.start()
    try:
        yield recorder
    finally:
        server.close()


_WORKER = """
import os, signal, sys, time
import numpy as np
from hetero.data import feed_worker

def list_splits():
    return [0, "b", {"c": None}]

%s

name, secret, capacity = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
feed_worker.serve(name, secret, "worker-0", capacity, make_inputs, list_splits, host="algo-1")
"""

COUNTING = """
def make_inputs(value, epoch):
    for number in range(value):
        yield {"x": np.full((2, 8), 100 * epoch + number, dtype=np.int64)}
"""


@contextlib.contextmanager
def worker(
    name: str, source: str = COUNTING, capacity: int = 1 << 20, *, secret: bytes = SECRET, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A worker process whose `make_inputs` is defined by `source`; killed at the end."""
    code = _WORKER % textwrap.dedent(source)
    arguments = [sys.executable, "-u", "-c", code, name, secret.hex(), str(capacity)]
    process = subprocess.Popen(arguments, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def first_array(batch: Any, content: bytes) -> np.ndarray:
    """Read the first array of a batch back by its layout."""
    layout = pb.Layout.FromString(batch.layout)
    spec = layout.arrays[0]
    piece = content[spec.offset : spec.offset + spec.bytes]
    return np.frombuffer(piece, dtype=spec.dtype).reshape(tuple(spec.shape))


def memory_files(pid: int | None = None) -> int:
    """Return how many memories of workers a process has mapped."""
    gc.collect()  # of feeds of other tests that were let go with slots in use
    return Path(f"/proc/{pid or os.getpid()}/maps").read_text().count("hetero-arena")


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


def task(value, **options):
    return Task(**{"epoch": 0, "split": 0, "value_json": json.dumps(value), "attempt": 1, **options})


def sequences(recorder):
    return [batch.sequence for batch in recorder.batches]


def values(recorder):
    """The first number of every batch that has come."""
    return [
        int(first_array(batch, content)[0, 0])
        for batch, content in zip(recorder.batches, recorder.contents, strict=True)
    ]


def in_feed(source=COUNTING, *, frees=True, capacity=1 << 20, **options):
    """Decorate a test that is called with the feed's recorder and a worker's process, once it has connected."""

    def decorate(test):
        async def connected(*arguments):
            name = fresh_name()
            async with feed(name, frees=frees) as recorder:
                with worker(name, source, capacity, **options) as process:
                    await recorder.until_heard("worker")
                    await test(recorder, process, *arguments)

        def test_function():
            run(connected())

        test_function.__name__, test_function.__doc__ = test.__name__, test.__doc__
        return test_function

    return decorate


HELLO = pack("hello", name="worker-0", pid=1, secret=SECRET.hex())


class Peer:
    """A raw client of the socket, in the event loop."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address_of(name))
        self.socket.setblocking(False)
        self._reader = FrameReader()
        self._frames = []

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    def send_arena(self, arena, number=None, size=None):
        frame = pack("arena", number=arena.number if number is None else number, size=size or arena.size)
        assert socket.send_fds(self.socket, [frame], [arena.fd]) == len(frame)

    async def frame(self):
        while not self._frames:
            piece = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 1 << 16), 10)
            assert piece, "cut off"
            self._reader.add(piece)
            self._frames.extend(self._reader.frames())
        return self._frames.pop(0)

    async def is_cut_off(self):
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 1), 10) == b""
        return True


@contextlib.contextmanager
def peer(name):
    made = Peer(name)
    with made.socket:
        yield made


def batch(slot, sequence=0, layout=b"layout"):
    return pack("batch", layout, sequence=sequence, rows=2, slot=slot)


async def still_works(name, recorder):
    """A worker that comes now is heard."""
    before = recorder.count("worker")
    with peer(name) as other:
        await other.send(HELLO)
        await recorder.until_heard("worker", before + 1)


async def greeted(recorder, worker, arena):
    await worker.send(HELLO)
    worker.send_arena(arena)
    await recorder.until_heard("worker", len(recorder.ports) + 1)
