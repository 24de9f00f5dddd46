"""Failures: text, files, which one came first."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import DataServiceLost
from hetero.process import Failure, first_failure, read_error, record_exception, sagemaker_text


def recorded(path: Path, exc: BaseException, **kwargs: bool) -> Failure:
    try:
        raise exc  # noqa: TRY301
    except BaseException as error:
        return record_exception(path, error, host="algo-1", process="rank-0", **kwargs)


def test_recorded_exception_is_read_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rank-0.json"
    written = recorded(path, DataServiceLost("nobody left"), secondary=True)
    read = read_error(path)
    assert read == written
    assert read is not None
    assert (read.exception, read.message, read.suggested_exit_code) == ("DataServiceLost", "nobody left", 4)
    assert read.secondary
    assert "raise exc" in str(read.traceback)
    assert [entry.name for entry in path.parent.iterdir()] == ["rank-0.json"]


def test_error_file_that_cannot_be_written_is_said_and_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded(Path("/dev/null/x.json"), ValueError("v")).message == "v"
    assert "cannot write /dev/null/x.json" in capsys.readouterr().err


def test_exception_without_a_text_is_recorded(tmp_path: Path) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert "cannot be had" in str(recorded(tmp_path / "e.json", Odd()).message)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"host": "a"}', '{"host":"a","process":"p","time_s":"x"}'])
def test_broken_error_file_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    assert read_error(path) is None


def test_no_error_file_is_none(tmp_path: Path) -> None:
    assert read_error(tmp_path / "none.json") is None
    assert read_error(None) is None


def test_first_failure_is_the_earliest_that_is_not_secondary() -> None:
    secondary = Failure("a", "rank-1", 1.0, secondary=True)
    late, early = Failure("a", "rank-2", 3.0), Failure("a", "rank-0", 2.0)
    assert first_failure([secondary, late, early]) is early
    assert first_failure([secondary]) is secondary
    with pytest.raises(ValueError, match="empty"):
        first_failure([])


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (
            Failure("algo-3", "rank-1", 0.0, exit_code=1, exception="ValueError", message="bad\nlabel 17"),
            "ValueError: bad label 17 (rank-1 on algo-3, exit code 1)",
        ),
        (Failure("h", "p", 0.0, exception="KeyError"), "KeyError (p on h)"),
        (
            Failure("h", "p", 0.0, signal="SIGKILL"),
            "p on h was killed by SIGKILL, which its launcher did not send (out of memory?)",
        ),
        (Failure("", "p", 0.0, exit_code=3), "p ended with exit code 3, without a word"),
        (Failure("h", "p", 0.0), "p on h ended with an unknown exit status, without a word"),
        (Failure("h", "p", 0.0, message="Cannot start p."), "Cannot start p. (p on h)"),
    ],
)
def test_description_names_the_cause_first(failure: Failure, text: str) -> None:
    assert failure.describe() == text


def test_sagemaker_text_fits_and_has_the_cause_first() -> None:
    failure = Failure("h", "p", 0.0, 1, None, "ValueError", "x" * 5000, "trace " * 500 + "last frame", ("line",) * 40)
    text = sagemaker_text(failure)
    assert len(text) <= 1024
    assert text.startswith("ValueError: xxx")
    assert text.endswith("last frame")
    assert sagemaker_text(Failure("h", "p", 0.0, 3, last_lines=("a", "b"))).endswith("b\na\nb")


def test_dict_round_trip_ignores_what_it_does_not_know() -> None:
    failure = Failure("h", "p", 1.5, None, "SIGKILL", last_lines=("a",))
    assert Failure.from_dict({**failure.to_dict(), "new": 1}) == failure
