"""The `hetero` command from outside: what it says, where, and the exit code. Real processes, as few as needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hetero
from hetero.cli import main as main_module
from hetero.cli.main import app, main
from hetero.errors import CoordinatorUnreachable, HeteroError, SettingsError, Stopped
from hetero.options import OPTIONS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def command(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetero", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **environ},
    )


def test_python_m_hetero_is_the_command() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hetero {hetero.__version__}\n", "")


def test_all_wrong_options_come_in_one_message_without_a_traceback(tmp_path: Path) -> None:
    done = command("run", "--batch-size", "0", "--remainder=keep", "--no-dash", "x", "y", HETERO_SEED="-1")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "error: 5 wrong settings:"
    assert [line[:4] for line in lines[1:]] == ["  - "] * 5
    for part in ("--batch-size is '0'", "--remainder is 'keep'", "HETERO_SEED is '-1'", "unexpected 'y'", "--job is"):
        assert part in done.stderr


def test_debug_shows_the_traceback_and_keeps_the_exit_code() -> None:
    done = command("--debug", "status", "nowhere")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "'nowhere' is no HOST:PORT" in done.stderr.splitlines()[-1]


def test_a_job_in_a_module_is_found_in_the_current_folder(tmp_path: Path) -> None:
    """The console script's sys.path does not have that folder; that of the launchers, `python -m`, has."""
    (tmp_path / "jobs.py").write_text('import hetero\njob = hetero.Job("a", batch_size=0)\n')
    script = f"import sys; sys.path[0] = {str(ROOT)!r}; from hetero.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "--job=jobs:job"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the job file's batch_size is 0" in done.stderr


def test_without_arguments_the_commands_are_listed() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code in (0, 2)  # it depends on typer's version
    for name in ("demo", "run", "plan", "status", "--version", "--debug"):
        assert name in result.output


@pytest.mark.parametrize("name", ["run", "plan"])
def test_help_lists_every_option_of_the_run(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for option in OPTIONS:
        assert option.flag in result.output
        assert option.help in result.output


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("run", ["--data-hosts", "--trainer-hosts", "--data-cpus", "--trainer-cpus", "--json"]),
        ("plan", ["--topology", "--host", "--json"]),
        ("status", ["HOST:PORT", "--token", "--json", "--timeout-s"]),
        ("demo", ["--json", "--keep"]),
    ],
)
def test_help_lists_the_commands_own_options(name: str, flags: list[str]) -> None:
    output = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "160"}).output
    assert [flag for flag in flags if flag not in output] == []


@pytest.mark.parametrize(
    "argv", [["unknown"], ["--unknown"], ["status"], ["demo", "--unknown"], ["run", "--data-hosts"]]
)
def test_what_is_no_command_or_option_is_refused(argv: list[str]) -> None:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SettingsError(["[bold] is wrong"]), 2, "error: Wrong settings:\n  - [bold] is wrong\n"),
        (CoordinatorUnreachable("nobody there"), 3, "error: nobody there\n"),
        (Stopped(2), 130, "error: stopped by SIGINT\n"),
        (HeteroError("x" * 300), 1, f"error: {'x' * 300}\n"),
        (PermissionError(13, "Permission denied", "/runs"), 1, "error: [Errno 13] Permission denied: '/runs'\n"),
    ],
    ids=["settings", "nobody", "stopped", "long", "the system's"],
)
def test_every_error_is_one_message_with_its_exit_code(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    monkeypatch.setattr(main_module, "leave", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(ZeroDivisionError):
        main()
