"""Why a launcher ended is written though the disk is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.process.last_words import LastWords

TEXT = "ValueError: the loss is not a number"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB, with two folders."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs to be root, to mount a small disk")
    (folder / "run").mkdir()
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 512):
            pass
    with pytest.raises(OSError, match="No space left"):
        (folder / "another").write_text("x")


def test_the_text_is_written_though_the_disk_is_full_and_so_is_the_next(disk: Path) -> None:
    words = LastWords(disk / "failure", disk / "run" / ".reserve")
    assert not words.said
    fill(disk)
    words.write(TEXT)
    assert words.said
    assert (disk / "failure").read_text() == TEXT
    words.write("ü" * 1024)
    assert (disk / "failure").read_text() == "ü" * 1024
    words.write(TEXT)
    assert (disk / "failure").read_text() == TEXT
    words.close()
    assert not list((disk / "run").iterdir())


def test_what_another_launcher_has_left_empty_is_filled_in(disk: Path) -> None:
    words = LastWords(disk / "failure", disk / "run" / ".reserve")
    fill(disk)
    (disk / "failure").touch()
    words.write(TEXT)
    assert (disk / "failure").read_text() == TEXT


def test_no_empty_file_is_left_where_there_was_no_room_from_the_start(disk: Path) -> None:
    fill(disk)
    words = LastWords(disk / "failure", disk / "run" / ".reserve")
    with pytest.raises(OSError, match="No space left"):
        words.write(TEXT)
    assert not words.said
    words.close()


def test_without_a_folder_to_keep_room_in_the_text_is_written_all_the_same(tmp_path: Path) -> None:
    words = LastWords(tmp_path / "failure", tmp_path / "none" / ".reserve")
    words.write(TEXT)
    assert (tmp_path / "failure").read_text() == TEXT
    words.close()


def test_the_room_is_given_back_where_nothing_was_to_be_said(tmp_path: Path) -> None:
    words = LastWords(tmp_path / "failure", tmp_path / ".reserve")
    assert (tmp_path / ".reserve").stat().st_size >= 4096
    words.close()
    words.close()
    assert not list(tmp_path.iterdir())
