"""Worker processes that have no room, are told to stop, are killed, or lose their feed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from worker_ends import COUNTING, eventually, feed, fresh_name, in_feed, memory_files, run, sequences, task, worker

# --- room -------------------------------------------------------------------------------------------------------------

LARGE = """
def make_inputs(sizes, epoch):
    for number, size in enumerate(sizes):
        yield np.full((1, size), number % 251, dtype=np.uint8)
"""


@in_feed(LARGE, frees=False, capacity=64 * 1024)
async def test_a_worker_waits_for_room_and_goes_on_with_it(recorder, process):
    (port,) = recorder.ports
    port.run(task([16 * 1024] * 7))
    await recorder.until_heard("batch", 4)
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    assert len(recorder.batches) == 4, "more than the capacity"
    for number in range(3):
        port.free(recorder.batches[number].slot)
        await recorder.until_heard("batch", 5 + number)
    assert await recorder.until_heard("end") == ("end", 7, 0)
    assert [content[0] for content in recorder.contents] == list(range(7))
    assert bytes(port.payload(recorder.batches[3].slot)) == bytes([3]) * 16 * 1024


@in_feed(LARGE, frees=False, capacity=64 * 1024)
async def test_batches_larger_than_the_capacity_come_alone(recorder, process):
    (port,) = recorder.ports
    port.run(task([1000, 300_000, 200_000, 1000, 1000]))
    for number in range(3):
        await recorder.until_heard("batch", number + 1)
        await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
        assert len(recorder.batches) == number + 1, "beside a batch larger than the capacity"
        assert set(bytes(port.payload(recorder.batches[number].slot))) == {number}
        port.free(recorder.batches[number].slot)
    assert await recorder.until_heard("end") == ("end", 5, 0)
    assert [batch.slot.arena for batch in recorder.batches] == [0, 1, 1, 2, 2]
    assert memory_files() == 1
    assert memory_files(process.pid) == 1


ENDLESS = """
def make_inputs(value, epoch):
    try:
        number = 0
        while True:
            yield np.full((1, value), number % 251, dtype=np.uint8)
            number += 1
    finally:
        print("closed", flush=True)
        if epoch:
            raise SystemExit("from finally")
"""


@pytest.mark.parametrize(("frees", "epoch"), [(True, 0), (False, 0), (True, 1)])
def test_an_abandoned_task_ends_also_while_it_waits_for_room_and_is_closed(frees, epoch):
    @in_feed(ENDLESS, frees=frees, capacity=16 * 1024, stdout=subprocess.PIPE)
    async def test(recorder, process):
        (port,) = recorder.ports
        port.run(task(4096, epoch=epoch))
        await recorder.until_heard("batch", 4)
        port.abandon()
        await recorder.until_heard("abandoned")
        assert process.stdout.readline() == "closed\n"

        for batch in recorder.batches if not frees else ():
            port.free(batch.slot)
        port.run(task(1000))
        seen = len(recorder.batches)
        await recorder.until_heard("batch", seen + 10 if frees else seen + 4)
        port.abandon()
        await recorder.until_heard("abandoned", 2)
        assert recorder.count("end") + recorder.count("failed") == 0

    test()


@in_feed()
async def test_to_abandon_an_idle_worker_means_nothing(recorder, process):
    (port,) = recorder.ports
    port.abandon()
    port.run(task(2))
    assert await recorder.until_heard("end") == ("end", 2, 0)
    assert recorder.count("abandoned") == 0


@in_feed("def list_splits():\n    time.sleep(0.5)\n    return [1]\n" + COUNTING)
async def test_a_task_that_has_not_begun_can_be_abandoned(recorder, process):
    (port,) = recorder.ports
    port.list_splits()
    port.run(task(1_000))
    port.abandon()
    port.run(task(1))
    assert await recorder.until_heard("end") == ("end", 1, 0)
    assert (recorder.count("splits"), recorder.count("abandoned")) == (1, 1)


REUSING = """
def make_inputs(value, epoch):
    buffer = np.empty((1, 100), dtype=np.int64)
    for number in range(20):
        buffer[:] = number
        yield buffer
"""


@in_feed(REUSING, frees=False)
async def test_the_job_may_use_its_arrays_again(recorder, process):
    recorder.ports[0].run(task(None))
    await recorder.until_heard("end")
    found = [np.frombuffer(recorder.ports[0].payload(batch.slot), np.int64) for batch in recorder.batches]
    assert [int(row.min()) for row in found] == [int(row.max()) for row in found] == list(range(20))


# --- deaths -----------------------------------------------------------------------------------------------------------


@in_feed(ENDLESS, frees=False, capacity=1 << 20)
async def test_a_killed_workers_batches_stay_until_they_are_freed(recorder, process):
    (port,) = recorder.ports
    port.run(task(4096))
    await recorder.until_heard("batch", 20)
    process.kill()
    await recorder.until_heard("gone")
    assert process.wait(10) == -signal.SIGKILL
    for number, batch in enumerate(recorder.batches):
        assert bytes(port.payload(batch.slot)) == bytes([number % 251]) * 4096
        port.free(batch.slot)
    assert memory_files() == 0


def test_workers_that_are_killed_at_any_moment_leave_whole_batches():
    async def test():
        name = fresh_name()
        async with feed(name, frees=True) as recorder:
            for round_ in range(4):
                with worker(name, ENDLESS, 64 * 1024) as process:
                    await recorder.until_heard("worker", round_ + 1)
                    recorder.ports[-1].run(task(8192))
                    before = len(recorder.batches)
                    await recorder.until_heard("batch", before + 50 + 37 * round_)
                    process.kill()
                    await recorder.until_heard("gone", round_ + 1)
                contents = recorder.contents[before:]
                assert all(content == bytes([n % 251]) * 8192 for n, content in enumerate(contents))
                assert sequences(recorder)[before:] == list(range(len(contents)))
        assert memory_files() == 0

    run(test())


_FEED_PROCESS = """
import asyncio, sys
from worker_ends import Recorder, feed
from hetero.data.worker_link import Task

async def main():
    async with feed(sys.argv[1], frees=sys.argv[2] == "frees") as recorder:
        await recorder.until_heard("worker")
        recorder.ports[0].run(Task(0, 0, "4096", 1))
        await recorder.until_heard("batch", 3)
        print("serving", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("frees", ["frees", "keeps"])
def test_a_worker_whose_feed_is_killed_closes_its_task_and_works_for_the_successor(frees):
    name = fresh_name()
    arguments = [sys.executable, "-c", _FEED_PROCESS, name, frees]
    first = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)

    async def test():
        with worker(name, ENDLESS, 16 * 1024, stdout=subprocess.PIPE) as process:
            assert await asyncio.to_thread(first.stdout.readline) == "serving\n"
            first.kill()
            assert await asyncio.to_thread(process.stdout.readline) == "closed\n"
            assert first.wait(10) == -signal.SIGKILL
            async with feed(name, frees=True) as recorder:
                await recorder.until_heard("worker")
                assert recorder.ports[0].pid == process.pid
                recorder.ports[0].run(task(100))
                await recorder.until_heard("batch", 50)
                assert sequences(recorder)[:50] == list(range(50))
            assert await asyncio.to_thread(process.stdout.readline) == "closed\n"
            assert process.poll() is None
            await eventually(lambda: memory_files(process.pid) == 0, "it keeps memory that no feed knows")

    with first:
        try:
            run(test())
        finally:
            first.kill()


def test_a_worker_may_come_before_its_feed_and_says_when_it_is_ready():
    async def test():
        name = fresh_name()
        with worker(name, COUNTING) as process:
            await eventually(lambda: "python" in psutil.Process(process.pid).name())
            async with feed(name) as recorder:
                await recorder.until_heard("worker")

    run(test())


def test_a_worker_with_a_wrong_secret_is_never_taken(caplog):
    async def test():
        name = fresh_name()
        async with feed(name) as recorder:
            with worker(name, secret=b"w" * 32) as process:
                await eventually(lambda: f"(pid {process.pid}): it does not know the secret" in caplog.text)
                with worker(name):
                    await recorder.until_heard("worker")
                assert [port.pid for port in recorder.ports] != [process.pid]
                assert process.poll() is None, "it goes on trying"

    run(test())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("value", [None, "busy"])
def test_signals_end_a_worker_whatever_the_job_does(signum, value):
    source = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def make_inputs(value, epoch):
        yield np.zeros((1, 1))
        time.sleep(600)
    """

    @in_feed(source, stderr=subprocess.DEVNULL)
    async def test(recorder, process):
        if value:
            recorder.ports[0].run(task(value))
            await recorder.until_heard("batch")
        process.send_signal(signum)
        await recorder.until_heard("gone")
        assert process.wait(10) in (-signum, 130)

    test()


def test_nothing_is_left_in_the_file_system():
    def found():
        return {path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*hetero*")}

    async def test():
        async with feed(name, frees=True) as recorder:
            with worker(name) as process:
                await recorder.until_heard("worker")
                recorder.ports[0].run(task(5))
                await recorder.until_heard("end")
                assert found() == before
                process.kill()
                await recorder.until_heard("gone")

    name, before = fresh_name(), found()
    run(test())
    assert found() == before
    assert name not in Path("/proc/net/unix").read_text(encoding="utf-8")
