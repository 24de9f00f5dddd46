"""What a worker and its feed say to each other, with the worker's end played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import select
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_ends import (
    HELLO,
    SECRET,
    Peer,
    Recorder,
    batch,
    eventually,
    feed,
    fresh_name,
    greeted,
    memory_files,
    peer,
    run,
    still_works,
)

from hetero.data import worker_link
from hetero.data.arena import Arena, SlotId
from hetero.data.worker_frames import FrameReader, ProtocolError, Task, address_of, pack, pack_task, read_task
from hetero.data.worker_link import WorkerServer
from hetero.errors import PortInUse

# --- frames -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.binary(max_size=200))), st.data())
def test_frames_come_whole_however_they_are_cut(contents, data):
    stream = b"".join(pack(kind, body, number=3) for kind, body in contents)
    reader, found = FrameReader(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        reader.add(stream[:cut])
        found.extend(reader.frames())
        stream = stream[cut:]

    assert [(frame.kind, frame.body) for frame in found] == contents
    assert all(frame.head["number"] == 3 for frame in found)


@given(st.binary(max_size=300))
def test_garbage_is_told_apart_from_frames(garbage):
    reader = FrameReader(limit=100)
    reader.add(garbage)
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(frame.head, dict) for frame in reader.frames())


def test_tasks_travel_unchanged():
    task = Task(epoch=3, split=7, value_json='{"file": "ä\\u0000"}', attempt=9, skip=b"\x00\xff", start=4)
    reader = FrameReader()
    reader.add(pack_task(task))

    assert [read_task(frame) for frame in reader.frames()] == [task]


def test_names_become_addresses_without_files():
    assert address_of("\0hetero-x") == address_of("hetero-x") == "\0hetero-x"
    long = [address_of(f"run-{'é' * 100}-{host}") for host in "ab"]
    assert long[0] != long[1]
    for address in (*long, address_of("x" * 107)):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)


# --- what a worker and a feed say to each other -----------------------------------------------------------------------


def test_batches_can_be_read_until_they_are_freed_and_slots_go_back():
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                slot = arena.allocate(5)
                arena.write(slot, [memoryview(b"abcde")])
                await worker.send(batch(slot, sequence=4))
                await recorder.until_heard("batch")
                (port,), (found,) = recorder.ports, recorder.batches
                assert (found.sequence, found.rows, found.layout, found.slot) == (4, 2, b"layout", slot)
                assert bytes(port.payload(found.slot)) == b"abcde"

                port.free(found.slot)
                assert (await worker.frame()).head["slots"] == [list(slot)]
                for wrong in (found.slot, SlotId(9, 0, 5)):
                    with pytest.raises(KeyError):
                        port.free(wrong)
                    with pytest.raises(KeyError):
                        port.payload(wrong)

    name = fresh_name()
    run(test())


def test_slots_that_are_freed_together_go_in_one_frame_before_what_follows():
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                slots = [arena.allocate(5) for _ in range(10)]
                await worker.send(b"".join(batch(slot, number) for number, slot in enumerate(slots)))
                await recorder.until_heard("batch", 10)
                for slot in slots:
                    recorder.ports[0].free(slot)
                recorder.ports[0].abandon()

                frames = [await worker.frame(), await worker.frame()]
                assert [frame.kind for frame in frames] == ["free", "abandon"]
                assert frames[0].head["slots"] == [list(slot) for slot in slots]

    name = fresh_name()
    run(test())


def test_a_worker_that_does_not_read_blocks_nobody_and_gets_everything_in_the_end():
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                tasks = [Task(0, number, json.dumps("x" * 50_000), 1) for number in range(200)]
                for task in tasks:
                    recorder.ports[0].run(task)
                await still_works(name, recorder)
                assert [read_task(await worker.frame()) for _ in tasks] == tasks

    name = fresh_name()
    run(test())


def test_a_dead_workers_batches_are_heard_and_read_and_its_memory_goes_with_the_last(caplog):
    async def test():
        async with feed(name) as recorder:
            before = memory_files()
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                slots = [arena.allocate(5) for _ in range(2)]
                for slot, content in zip(slots, (b"first", b"other"), strict=True):
                    arena.write(slot, [memoryview(content)])
                recorder.ports[0].list_splits()
                await eventually(lambda: select.select([worker.socket], [], [], 0)[0])  # unread: its end is a "reset"
                await worker.send(batch(slots[0], 0) + batch(slots[1], 1) + batch(slots[1], 2)[:7])
            await recorder.until_heard("gone")
            assert recorder.heard[-3:] == [("batch", 0), ("batch", 1), ("gone", "worker-0")]

            port = recorder.ports[0]
            assert port.is_gone
            port.run(Task(0, 0, "null", 1))  # to nobody
            assert bytes(port.payload(slots[0])) == b"first"
            port.free(slots[0])
            assert bytes(port.payload(slots[1])) == b"other"
            port.free(slots[1])
            assert memory_files() == before

    name = fresh_name()
    run(test())
    assert not caplog.records, "an end is nothing to warn of here: the launcher says how a process ended"


def test_memory_that_was_replaced_goes_with_its_last_slot():
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                held = memory_files()
                await worker.send(batch((0, 0, 5)))
                worker.send_arena(arena, number=1)
                await worker.send(batch((1, 0, 5)))
                await recorder.until_heard("batch", 2)
                assert memory_files() == held + 1
                recorder.ports[0].free(SlotId(1, 0, 5))
                assert memory_files() == held + 1, "the newest stays: more batches will come"
                recorder.ports[0].free(SlotId(0, 0, 5))
                assert memory_files() == held

    name = fresh_name()
    run(test())


def test_a_feed_that_closes_cuts_its_workers_off_and_tells_nobody():
    async def test():
        before = memory_files()
        async with feed(name) as recorder:
            arena, worker = Arena(1 << 16), Peer(name)
            await greeted(recorder, worker, arena)
        assert await worker.is_cut_off()
        assert recorder.count("gone") == 0
        worker.socket.close()
        arena.close()
        assert memory_files() == before
        async with feed(name) as successor:  # the name is free
            await still_works(name, successor)

    name = fresh_name()
    run(test())


def test_a_feed_waits_for_its_predecessor_to_die():
    async def test():
        with socket.socket(socket.AF_UNIX) as older:
            older.bind(address_of(name))
            older.listen()
            server = WorkerServer(name, SECRET, Recorder())
            starting = asyncio.create_task(server.start())
            await asyncio.sleep(0.05)
            assert not starting.done()
        await starting
        server.close()
        server.close()

    name = fresh_name()
    run(test())


def test_a_name_that_stays_taken_is_an_error(monkeypatch):
    async def test():
        with socket.socket(socket.AF_UNIX) as older:
            older.bind(address_of(name))
            with pytest.raises(PortInUse, match=f"{name}.*older feed"):
                await WorkerServer(name, SECRET, Recorder()).start()

    monkeypatch.setattr(worker_link, "_NAME_IN_USE_S", 0.2)
    name = fresh_name()
    run(test())


def test_a_feed_without_file_descriptors_goes_on_when_it_has_some(caplog):
    async def test():
        async with feed(name) as recorder:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            with peer(name) as worker:
                await worker.send(HELLO)
                resource.setrlimit(resource.RLIMIT_NOFILE, (worker.socket.fileno(), limits[1]))
                try:
                    await eventually(lambda: "cannot accept" in caplog.text)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                await recorder.until_heard("worker")

    name = fresh_name()
    run(test())
