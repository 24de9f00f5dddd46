"""Every path of a run, and writes that no reader ever sees half of."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from hetero import rundir
from hetero.errors import SettingsError
from hetero.rundir import RunDir, default_run_dir, read_json, write_json_atomic


def test_what_was_written_is_read_back_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "summary.json"
    write_json_atomic(path, {"b": 1, "a": [None, True, "é"]})
    assert read_json(path) == {"b": 1, "a": [None, True, "é"]}
    assert list(read_json(path)) == ["b", "a"]
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_missing_file_is_none_and_a_broken_one_an_error(tmp_path: Path) -> None:
    assert read_json(tmp_path / "absent.json") is None
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="line 1"):
        read_json(tmp_path / "broken.json")


def test_numbers_of_other_libraries_stay_numbers_and_no_nan_gets_into_a_file(tmp_path: Path) -> None:
    values = {
        "float32": np.float32(0.5),
        "int64": np.int64(3),
        "array": np.arange(2),
        "nan": float("nan"),
        "inf": [np.float32("inf")],
        "path": Path("/a"),
        3: (1, 2),
    }
    write_json_atomic(tmp_path / "a.json", values)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse) == {
        "float32": 0.5, "int64": 3, "array": [0, 1], "nan": None, "inf": [None], "path": "/a", "3": [1, 2],
    }  # fmt: skip


def test_a_write_that_fails_leaves_the_old_text_and_no_scraps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, "old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir.json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        write_json_atomic(path, "new")
    assert path.read_text() == '"old"\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, [0] * 20_000)
    seen: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(len(read_json(path)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20):
            write_json_atomic(path, [number] * 20_000)
    finally:
        done.set()
        reader.join()
    assert seen == {20_000}


def test_what_several_hosts_write_carries_the_hosts_name() -> None:
    run = RunDir(Path("/runs/a"))
    for one, other in (
        (run.log("algo-1", "rank-0"), run.log("algo-2", "rank-0")),
        (run.work("algo-1"), run.work("algo-2")),
        (run.error("algo-1", "rank-0"), run.error("algo-2", "rank-0")),
        (run.result("algo-1", "ranks"), run.result("algo-2", "ranks")),
    ):
        assert one != other
        assert one.is_relative_to(run.path)
    assert run.log("algo-1", "rank-0") == Path("/runs/a/logs/algo-1/rank-0.log")
    assert {path.name for path in (run.summary, run.metrics, run.failure)} == {
        "summary.json", "metrics.jsonl", "failure.json",
    }  # fmt: skip


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("a"))
    monkeypatch.chdir("/")
    assert run.path == tmp_path / "a"


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "failure.json", "logs"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    run.refuse_if_used()
    (tmp_path / name).mkdir()
    with pytest.raises(SettingsError, match=rf"{tmp_path} already holds a run \({name}\)"):
        run.refuse_if_used()


def test_the_outcome_of_an_earlier_run_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.forget_outcome()  # there is none
    for path in (run.summary, run.failure, run.metrics, run.log("a", "rank-0")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    run.forget_outcome()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["logs"]


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    RunDir(tmp_path / "a" / "b").create()
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SettingsError, match=rf"cannot make --run-dir {path}: "):
            RunDir(path).create()


def test_default_folders_are_new_made_at_once_and_named_after_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir.time, "strftime", lambda _format: "20240101-000000")
    paths = [default_run_dir("my job/é", tmp_path) for _ in range(3)]
    assert [path.name for path in paths] == [f"my-job-20240101-000000{suffix}" for suffix in ("", "-1", "-2")]
    assert all(path.is_dir() and path.parent == tmp_path / "runs" for path in paths)
    assert default_run_dir("///", tmp_path).name.startswith("job-")


def test_a_default_folder_is_made_below_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_run_dir("a").parent == tmp_path / "runs"


def test_where_no_default_folder_can_be_made_the_option_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(SettingsError, match=r"cannot make .*/runs/a-.*--run-dir"):
        default_run_dir("a", tmp_path)
