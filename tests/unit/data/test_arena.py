"""Shared memory of a worker and its feed."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero.data.arena import ALIGNMENT, Arena, MappedArena, SlotId, Space, rounded

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena():
    with contextlib.closing(Arena(4 * PAGE)) as made:
        yield made


def mapped(arena):
    return contextlib.closing(MappedArena(os.dup(arena.fd), arena.size))


def memory_files():
    return [fd for fd in Path("/proc/self/fd").iterdir() if "hetero-arena" in _target(fd)]


def _target(fd):
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # the listing's own
        return ""


class SpaceMachine(RuleBasedStateMachine):
    """Any order of taking and giving."""

    SIZE = 64 * ALIGNMENT

    def __init__(self):
        super().__init__()
        self.space, self.taken = Space(self.SIZE), {}

    @rule(size=st.integers(0, 20 * ALIGNMENT))
    def take(self, size):
        before = self.gaps()
        offset = self.space.take(size)
        if offset is None:
            assert all(end - start < rounded(size) for start, end in before), "there was room"
            return
        assert offset % ALIGNMENT == 0
        fitting = [start for start, end in before if end - start >= rounded(size)]
        assert offset == fitting[0], "not the first that fits"
        self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data):
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.space.give(offset)
        del self.taken[offset]
        with pytest.raises(ValueError, match="nothing is in use"):
            self.space.give(offset)

    def gaps(self):
        """Free parts, by what a reader of the rules knows."""
        gaps, end = [], 0
        for offset in sorted(self.taken):
            gaps.append((end, offset))
            end = offset + rounded(self.taken[offset])
        return [*gaps, (end, self.SIZE)]

    @invariant()
    def nothing_overlaps(self):
        assert all(start <= end for start, end in self.gaps())

    @invariant()
    def everything_is_reusable_when_all_is_given(self):
        assert self.space.is_empty == (not self.taken)
        if not self.taken:
            assert self.space.take(self.SIZE) == 0
            self.space.give(0)


TestSpace = SpaceMachine.TestCase
TestSpace.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3 * PAGE), max_size=30))
def test_a_reader_sees_what_was_written(sizes):
    with contextlib.closing(Arena(8 * PAGE)) as arena, mapped(arena) as reader:
        written = {}
        for number, size in enumerate(sizes):
            content = np.full(size, number % 251, dtype=np.uint8)
            while (slot := arena.allocate(size)) is None:
                oldest = next(iter(written))
                assert bytes(reader.view(oldest.offset, oldest.size)) == written.pop(oldest)
                arena.free(oldest)
            arena.write(slot, [content[: size // 2].data, content[size // 2 :].data])
            written[slot] = content.tobytes()
        for slot, content in written.items():
            assert bytes(reader.view(slot.offset, slot.size)) == content


def test_batches_without_bytes_have_places_of_their_own(arena):
    first, second = arena.allocate(0), arena.allocate(0)

    assert first != second
    arena.free(first)
    arena.free(second)
    assert arena.is_empty


def test_a_batch_waits_while_there_is_no_room(arena):
    slots = [arena.allocate(PAGE) for _ in range(4)]

    assert arena.allocate(1) is None
    arena.free(slots[2])
    assert arena.allocate(PAGE).offset == slots[2].offset


def test_a_batch_larger_than_the_capacity_goes_alone_into_memory_of_its_own(arena):
    small = arena.allocate(PAGE)
    assert arena.allocate(9 * PAGE) is None
    assert arena.number == small.arena

    arena.free(small)
    large = arena.allocate(9 * PAGE - 5)
    assert (large.arena, large.offset, arena.size) == (small.arena + 1, 0, 9 * PAGE)
    arena.write(large, [np.full(large.size, 7, dtype=np.uint8).data])
    with mapped(arena) as reader:
        assert set(bytes(reader.view(0, large.size))) == {7}
    assert arena.allocate(1) is None, "two at a time would be more than the capacity"

    arena.free(large)
    again = arena.allocate(8 * PAGE)
    assert again.arena == large.arena, "memory that is large enough is used again"
    arena.free(again)
    assert (arena.allocate(PAGE).arena, arena.size) == (large.arena + 1, 4 * PAGE)


def test_another_capacity_holds_once_everything_was_freed(arena):
    first, second = arena.allocate(PAGE), arena.allocate(PAGE)
    arena.resize(2 * PAGE)
    assert arena.allocate(64) is None
    arena.free(first)
    assert arena.allocate(64) is None
    arena.free(second)
    slots = [arena.allocate(PAGE), arena.allocate(PAGE)]
    assert (arena.size, arena.allocate(64)) == (2 * PAGE, None)
    arena.resize(8 * PAGE)
    assert arena.allocate(64) is None
    for slot in slots:
        arena.free(slot)
    assert arena.allocate(64) is not None
    assert arena.size == 8 * PAGE


def test_memory_is_taken_only_where_batches_were_written():
    with contextlib.closing(Arena(1 << 40)) as arena:
        for _ in range(100):
            slot = arena.allocate(PAGE)
            arena.write(slot, [np.ones(PAGE, dtype=np.uint8).data])
            arena.free(slot)

        assert os.fstat(arena.fd).st_blocks * 512 == PAGE


def test_what_is_not_in_use_cannot_be_freed(arena):
    slot = arena.allocate(5)
    arena.free(slot)
    for wrong in (slot, SlotId(slot.arena, 64, 5), SlotId(slot.arena + 1, 0, 5)):
        with pytest.raises(ValueError, match="in use"):
            arena.free(wrong)


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        Arena(0)


def test_memory_can_be_read_after_its_writer_was_killed():
    source = """
import socket, sys, time
import numpy as np
from hetero.data.arena import Arena
arena = Arena(1 << 16)
slot = arena.allocate(1000)
arena.write(slot, [np.full(1000, 9, dtype=np.uint8).data])
end = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(end, [b"x"], [arena.fd])
time.sleep(60)
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [sys.executable, "-c", source, str(theirs.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        ours.settimeout(30)
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    reader = MappedArena(fd, 1 << 16)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL

    with contextlib.closing(reader):
        assert bytes(reader.view(0, 1000)) == bytes([9]) * 1000


def test_nothing_stays_open(arena):
    before = memory_files()
    with contextlib.closing(Arena(PAGE)) as other, mapped(other):
        other.allocate(5 * PAGE)
        assert len(memory_files()) > len(before)
    other.close()
    assert memory_files() == before


def test_a_view_that_is_still_there_keeps_the_memory_until_it_goes(arena):
    slot = arena.allocate(3)
    arena.write(slot, [memoryview(b"abc")])
    before = len(memory_files())
    reader = MappedArena(os.dup(arena.fd), arena.size)
    view = reader.view(slot.offset, slot.size)
    reader.close()

    assert bytes(view) == b"abc"
    assert view.readonly
    del view, reader
    assert len(memory_files()) == before


def test_views_outside_the_memory_are_refused(arena):
    with mapped(arena) as reader:
        for offset, size in ((-64, 64), (0, -1), (arena.size - 64, 65), (arena.size, 1), (1 << 70, 1)):
            with pytest.raises(ValueError, match="within"):
                reader.view(offset, size)


def test_neither_end_can_change_the_size(arena):
    for size in (0, 100 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_files_that_could_shrink_under_the_reader_are_refused(tmp_path):
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, PAGE)
    with pytest.raises(ValueError, match="cannot be one of"):
        MappedArena(plain, PAGE)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(plain)  # closed although refused

    sealed = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, PAGE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="cannot be one of"):
        MappedArena(sealed, 2 * PAGE)

    (tmp_path / "file").write_bytes(bytes(PAGE))
    with pytest.raises(OSError, match="Invalid"):
        MappedArena(os.open(tmp_path / "file", os.O_RDWR), PAGE)


def test_children_do_not_inherit_the_memory(arena):
    assert not os.get_inheritable(arena.fd)
