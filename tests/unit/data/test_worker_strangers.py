"""What strangers, broken workers and a broken listener can do to a feed: nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct

import pytest
from worker_ends import HELLO, batch, feed, fresh_name, greeted, memory_files, peer, run, still_works

from hetero.data import worker_link, worker_port
from hetero.data.arena import Arena
from hetero.data.worker_frames import pack

# --- strangers --------------------------------------------------------------------------------------------------------

GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a frame without end": struct.pack("!II", 10, (1 << 32) - 1),
    "no JSON": struct.pack("!II", 4, 0) + b"\xff\xfe{}",
    "deep JSON": struct.pack("!II", 4000, 0) + b"[" * 4000,
    "no secret": pack("hello", name="worker-0", pid=1),
    "a wrong secret": pack("hello", name="worker-0", pid=1, secret="00" * 32),
    "a secret of another type": pack("hello", name="worker-0", pid=1, secret=[1]),
    "no hello": batch((0, 0, 5)),
}


@pytest.mark.parametrize("said", GARBAGE)
def test_strangers_are_cut_off_with_a_line(said, caplog):
    async def test():
        async with feed(name) as recorder:
            with peer(name) as stranger:
                await stranger.send(GARBAGE[said])
                assert await stranger.is_cut_off()
            await still_works(name, recorder)
            assert recorder.count("gone") <= 1, "the stranger was taken for a worker"

    name = fresh_name()
    with caplog.at_level(logging.WARNING, "hetero.data.worker_link"):
        run(test())
    assert [record.getMessage() for record in caplog.records if f"(pid {os.getpid()})" in record.getMessage()]


def test_many_strangers_make_one_line(caplog):
    async def test():
        async with feed(name) as recorder:
            for _ in range(20):
                with peer(name) as stranger:
                    await stranger.send(GARBAGE["no JSON"])
                    assert await stranger.is_cut_off()
            await still_works(name, recorder)

    name = fresh_name()
    run(test())
    assert len(caplog.records) == 1


def test_who_says_nothing_is_cut_off_and_blocks_nobody(monkeypatch):
    async def test():
        async with feed(name) as recorder:
            with peer(name) as silent, peer(name) as half:
                await half.send(HELLO[:20])
                await still_works(name, recorder)
                assert await silent.is_cut_off()
                assert await half.is_cut_off()

    monkeypatch.setattr(worker_port, "_HELLO_S", 0.3)
    name = fresh_name()
    run(test())


def test_processes_of_other_users_are_cut_off(monkeypatch, caplog):
    async def test():
        async with feed(name):
            monkeypatch.setattr(worker_link, "peer_of", lambda connection: (77, os.geteuid() + 1))
            with peer(name) as stranger:
                assert await stranger.is_cut_off()

    name = fresh_name()
    run(test())
    assert f"pid 77: it runs as user {os.geteuid() + 1}" in caplog.text


def test_file_descriptors_that_nobody_asked_for_are_closed():
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as stranger:
                own = memory_files()
                for _ in range(3):
                    socket.send_fds(stranger.socket, [b"\0"], [arena.fd] * 4)
                assert await stranger.is_cut_off()
                assert memory_files() == own
            await still_works(name, recorder)

    name = fresh_name()
    run(test())


# --- workers that misbehave -------------------------------------------------------------------------------------------


WRONG = {
    "no such kind": lambda: pack("surprise"),
    "outside the memory": lambda: batch((0, 1 << 16, 1)),
    "memory that was not announced": lambda: batch((5, 0, 1)),
    "a slot that is in use": lambda: batch((0, 0, 5)) * 2,
    "fields missing": lambda: pack("end", batches=3),
    "numbers that are none": lambda: pack("end", batches=None, replayed=0),
    "a cause that is none": lambda: pack("failed", b"[1]", batches=0, replayed=0),
    "an arena without a descriptor": lambda: pack("arena", number=1, size=4096),
    "an endless frame": lambda: struct.pack("!II", 1 << 31, 0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_worker_that_makes_no_sense_is_let_go(wrong):
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                await worker.send(WRONG[wrong]())
                await recorder.until_heard("gone")
                assert await worker.is_cut_off()
            await still_works(name, recorder)

    name = fresh_name()
    run(test())


def test_a_listener_that_raises_costs_one_worker(caplog):
    async def test():
        async with feed(name) as recorder:
            with contextlib.closing(Arena(1 << 16)) as arena, peer(name) as worker:
                await greeted(recorder, worker, arena)
                recorder.on_end = lambda *_: 1 / 0
                await worker.send(pack("end", batches=3, replayed=0))
                await recorder.until_heard("gone")
            await still_works(name, recorder)

    name = fresh_name()
    run(test())
    assert "ZeroDivisionError" in caplog.text
