"""What a worker process makes of tasks and of the job's code."""

from __future__ import annotations

import asyncio
import json
import subprocess

import numpy as np
import psutil
import pytest
from worker_ends import COUNTING, first_array, in_feed, sequences, task, values

from hetero import bitmap

# --- tasks ------------------------------------------------------------------------------------------------------------


@in_feed()
async def test_a_task_gives_its_batches_in_order_and_the_worker_does_another(recorder, process):
    (port,) = recorder.ports
    assert (port.name, port.pid) == ("worker-0", process.pid)
    port.run(task(3, epoch=2))
    assert await recorder.until_heard("end") == ("end", 3, 0)
    assert (sequences(recorder), values(recorder)) == ([0, 1, 2], [200, 201, 202])
    assert {batch.rows for batch in recorder.batches} == {2}

    port.run(task(0))
    assert await recorder.until_heard("end", 2) == ("end", 0, 0)
    port.run(task(1))
    assert await recorder.until_heard("end", 3) == ("end", 1, 0)
    assert values(recorder)[3:] == [0]


@in_feed()
async def test_batches_that_ranks_have_are_left_out_and_counted(recorder, process):
    skip = bytearray()
    for number in (5, 8, 30):
        bitmap.add(skip, number)
    recorder.ports[0].run(task(10, skip=bytes(skip), start=4))

    assert await recorder.until_heard("end") == ("end", 10, 6)
    assert sequences(recorder) == values(recorder) == [4, 6, 7, 9]


EMPTIES = """
def make_inputs(value, epoch):
    for number in range(6):
        rows = 0 if number % 2 else 3
        yield {"x": np.full((rows, 1), number)}
"""


@in_feed(EMPTIES)
async def test_empty_batches_have_no_number(recorder, process):
    recorder.ports[0].run(task(None, start=1))
    assert await recorder.until_heard("end") == ("end", 3, 1)
    assert (sequences(recorder), values(recorder)) == ([1, 2], [2, 4])


KINDS = """
class Batches:
    def __iter__(self):
        try:
            yield (np.full((1, 1), 7), {"names": np.array(["a"], dtype=object)})
        finally:
            print("closed", flush=True)

def make_inputs(value, epoch):
    if value == "list":
        return [np.arange(4, dtype="<i4").reshape(2, 2), np.ones((0, 5)), np.zeros((2, 0, 3))]
    return Batches()
"""


@in_feed(KINDS)
async def test_any_iterable_of_nested_arrays_will_do(recorder, process):
    recorder.ports[0].run(task("list"))
    assert await recorder.until_heard("end") == ("end", 2, 0)
    np.testing.assert_array_equal(first_array(recorder.batches[0], recorder.contents[0]), [[0, 1], [2, 3]])
    assert [batch.slot.size for batch in recorder.batches] == [16, 0]
    recorder.ports[0].run(task("object"))
    assert await recorder.until_heard("end", 2) == ("end", 1, 0)


@in_feed()
async def test_splits_are_listed_as_json(recorder, process):
    recorder.ports[0].list_splits()
    assert await recorder.until_heard("splits") == ("splits", ["0", '"b"', '{"c": null}'])


BAD_LIST = """
def list_splits():
    return [object()] if os.path.exists("/proc") else []

def make_inputs(value, epoch):
    return []
"""


@in_feed(BAD_LIST)
async def test_a_list_that_fails_is_told_and_the_worker_works_on(recorder, process):
    recorder.ports[0].list_splits()
    _, cause = await recorder.until_heard("list_failed")
    assert (cause["exception"], cause["host"], cause["process"]) == ("TypeError", "algo-1", "worker-0")
    recorder.ports[0].run(task(0))
    await recorder.until_heard("end")


# --- what the job's code may do ---------------------------------------------------------------------------------------

RAISING = """
class Nasty(Exception):
    def __init__(self): self.unpicklable = lambda: None
    def __str__(self): raise SystemExit(3)

class Text(str):
    pass

def recurse(): recurse()

def fail(kind):
    if kind == "value": raise ValueError("row 7 of \\udc80 is bad")
    if kind == "exit": sys.exit(0)
    if kind == "nasty": raise Nasty
    if kind == "recursion": recurse()
    if kind == "generator exit": raise GeneratorExit
    if kind == "long": raise ValueError("x" * 10_000_000)
    if kind == "memory": raise MemoryError
    if kind == "stop": raise StopIteration(5)
    if kind == "base": raise BaseException("base")
    if kind == "chain":
        error = None
        for number in range(3000):
            link = ValueError(str(number))
            link.__cause__ = error
            error = link
        raise error

def make_inputs(kind, epoch):
    if epoch:
        fail(kind)
    def generate():
        yield np.zeros((1, 1))
        fail(kind)
    return generate()
"""

EXPECTED = {
    "value": ("ValueError", "row 7 of \\udc80 is bad"),
    "exit": ("SystemExit", "0"),
    "nasty": ("Nasty", "__str__ raised SystemExit"),
    "recursion": ("RecursionError", "maximum recursion depth"),
    "generator exit": ("GeneratorExit", ""),
    "long": ("ValueError", "x" * 1000),
    "memory": ("MemoryError", ""),
    "base": ("BaseException", "base"),
    "chain": ("ValueError", "2999"),
    "stop": (None, ""),  # a RuntimeError out of a generator, by Python's own rule
}


@in_feed(RAISING)
async def test_whatever_the_jobs_code_raises_is_told_and_the_worker_works_on(recorder, process):
    for number, (kind, (name, message)) in enumerate(EXPECTED.items()):
        for epoch in (0, 1):
            recorder.ports[0].run(task(kind, epoch=epoch))
            times = 2 * number + epoch + 1
            _, cause, batches, replayed = await recorder.until_heard("failed", times)
            assert (batches, replayed) == (1 - epoch, 0)
            assert cause["exception"] == (name or ("StopIteration" if epoch else "RuntimeError"))
            assert message in cause["message"]
            assert len(cause["traceback"].splitlines()) <= 40
            assert len(json.dumps(cause)) < 50_000
            json.dumps(cause, ensure_ascii=False).encode()  # valid Unicode, for protobuf
            if kind == "value":
                assert "in fail" in cause["traceback"]
                assert "feed_worker.py" not in cause["traceback"], "the job's own code comes first"
    assert process.poll() is None
    assert len(recorder.ports) == 1, "it never lost its link"


BAD_BATCHES = """
def make_inputs(kind, epoch):
    return {
        "no dataset": 5,
        "rows": [{"x": np.zeros((2, 1)), "y": np.zeros((3, 1))}],
        "no rows": [np.float32(3)],
        "objects": [np.array([object()])],
        "no array": [{"x": iter([])}],
    }[kind]
"""


@in_feed(BAD_BATCHES)
async def test_batches_that_are_none_are_told_with_their_path(recorder, process):
    expected = {
        "no dataset": "returned a int",
        "rows": "batch['y'] has 3 rows but batch['x'] has 2",
        "no rows": "0-d",
        "objects": "holds a object",
        "no array": "batch['x'] is a",
    }
    for start in (0, 1):  # left out or not
        for kind, message in expected.items():
            if start and kind == "objects":
                continue  # its contents are looked at only where it is sent
            recorder.ports[0].run(task(kind, start=start))
            _, cause, batches, _ = await recorder.until_heard("failed", recorder.count("failed") + 1)
            assert (cause["exception"], batches) == ("InputError", 0)
            assert message in cause["message"]


@in_feed("def make_inputs(value, epoch):\n    print('from the job', flush=True)\n    return []", stdout=subprocess.PIPE)
async def test_what_the_jobs_code_prints_goes_to_the_workers_output(recorder, process):
    recorder.ports[0].run(task(0))
    await recorder.until_heard("end")
    assert process.stdout.readline() == "from the job\n"


CLOSING = """
import socket
held = []

def make_inputs(value, epoch):
    yield np.zeros((1, 1))
    if value == "close":
        os.closerange(3, 1000)
        held.extend(socket.socketpair() for _ in range(10))  # under the numbers that were the worker's
    yield np.ones((1, 1))
    for one, other in held:
        one.send(b"x")
        assert other.recv(100) == b"x"
"""


@in_feed(CLOSING)
async def test_a_worker_whose_files_the_job_closed_connects_anew(recorder, process):
    recorder.ports[0].run(task("close"))
    await recorder.until_heard("gone")
    assert sequences(recorder) == [0]
    await recorder.until_heard("worker", 2)
    recorder.ports[1].run(task("again"))
    assert await recorder.until_heard("end") == ("end", 2, 0)
    assert process.poll() is None


FORKING = """
def make_inputs(value, epoch):
    yield np.zeros((1, 1))
    child = os.fork()
    if not child:
        if value == "stays":
            time.sleep(600)
        if value == "exits":
            sys.exit(0)
    yield np.ones((1, 1))
    if child:
        open(f"/dev/fd/{1}", "w").write(f"{child}\\n")
        time.sleep(600 if value == "stays" else 0)
        if value != "stays":
            os.waitpid(child, 0)
"""


@in_feed(FORKING, stdout=subprocess.PIPE)
async def test_a_forked_process_does_not_hold_the_link_open(recorder, process):
    recorder.ports[0].run(task("stays"))
    await recorder.until_heard("batch", 2)
    child = psutil.Process(int(await asyncio.to_thread(process.stdout.readline)))
    assert child.is_running()
    process.kill()
    await recorder.until_heard("gone")
    assert child.is_running()
    child.kill()


@pytest.mark.parametrize("way", ["exits", "goes on"])
def test_a_forked_process_never_works_for_the_feed(way):
    @in_feed(FORKING)
    async def test(recorder, process):
        recorder.ports[0].run(task(way))
        assert await recorder.until_heard("end") == ("end", 2, 0)
        assert sequences(recorder) == [0, 1]
        assert recorder.count("worker") == 1
        assert not psutil.Process(process.pid).children()

    test()


@in_feed("import socket\nsocket.setdefaulttimeout(0.01)\n" + COUNTING)
async def test_default_timeouts_of_the_job_do_not_matter(recorder, process):
    await asyncio.sleep(0.1)
    recorder.ports[0].run(task(1))
    await recorder.until_heard("end")
    assert recorder.count("worker") == 1
