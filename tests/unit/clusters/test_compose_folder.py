"""The folder of a compose file: whole or as it was, and nobody else's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hetero.clusters.compose import HEADER
from hetero.clusters.compose_folder import write
from hetero.errors import SettingsError

TEXT = HEADER + "services: {}\n"
FILES = {"mine/algo-1/resourceconfig.json": "{}\n", "mine/algo-2/resourceconfig.json": "{}\n"}


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_written_can_be_read_by_a_containers_user_and_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    write(out, TEXT, FILES)
    (out / "notes.txt").write_text("mine")
    write(out, TEXT + "# two\n", {"other/algo-1/x.json": "{}"})
    assert set(content(out)) == {"compose.yaml", "notes.txt", "config/WRITTEN-BY-HETERO", "config/other/algo-1/x.json"}
    assert content(out)["compose.yaml"].endswith("# two\n")
    for path in (out / "config").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)
    assert sorted(path.name for path in out.iterdir()) == ["compose.yaml", "config", "notes.txt"]


def test_an_empty_config_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    write(tmp_path, TEXT, FILES)
    assert "config/mine/algo-1/resourceconfig.json" in content(tmp_path)


@pytest.mark.parametrize("name", ["compose.yaml", "config/app.conf"])
def test_what_somebody_else_wrote_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("theirs\n")
    with pytest.raises(SettingsError, match=r"was not written by hetero compose-config\. Name another --output"):
        write(tmp_path, TEXT, FILES)
    assert content(tmp_path) == {name: "theirs\n"}


@pytest.mark.parametrize("name", ["compose.yaml", "config"])
def test_a_link_is_somebody_elses(tmp_path: Path, name: str) -> None:
    write(tmp_path / "theirs", TEXT, FILES)
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(tmp_path / "theirs" / name)
    with pytest.raises(SettingsError, match="was not written by hetero compose-config"):
        write(out, TEXT, {"new/x.json": "{}"})
    assert "config/mine/algo-1/resourceconfig.json" in content(tmp_path / "theirs")


@pytest.mark.parametrize("call", ["write_text", "chmod", "rename", "replace"])
def test_a_disk_that_is_full_half_way_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(tmp_path, TEXT, FILES)
    before, real, calls = content(tmp_path), getattr(Path, call), 0

    def full(path: Path, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == (1 if call == "replace" else 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, call, full)
    with pytest.raises(SettingsError, match=r"cannot write to .*No space left on device. Name an --output"):
        write(tmp_path, TEXT + "# two\n", {"new/x.json": "{}"})
    assert calls >= 1
    assert content(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compose.yaml", "config"]


def test_a_file_in_the_folders_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(SettingsError, match="cannot write to"):
        write(tmp_path / "out", TEXT, FILES)
