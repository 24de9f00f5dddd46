"""`hetero status` over states that a coordinator could answer; a real one answers in tests/e2e/test_commands.py."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetero.cli import status_command
from hetero.cli.main import app
from hetero.control.state import HostState, JobState, Outcome, Phase, ProcessReport
from hetero.errors import CoordinatorUnreachable, SettingsError

HOSTS = (
    HostState(
        "data-1", "data", "10.0.0.1", registered=True, cpu_s=12.34, age_s=0.4,
        processes=(ProcessReport("worker-0", 4711, "running", 6001), ProcessReport("dispatcher", 4710, "running")),
    ),
    HostState("data-2", "data"),
    HostState("data-3", "data", registered=True, lost=True),
    HostState("trainer-1", "trainer", registered=True, left=True, leave_reason="stopped by SIGTERM"),
    HostState("trainer-2", "trainer", registered=True, left=True),
)  # fmt: skip


def state(**fields: Any) -> JobState:
    return JobState(
        **{
            "version": 1,
            "restarts": 2,
            "run_id": "r1",
            "uptime_s": 61.4,
            "phase": Phase.TRAINING,
            "hosts": HOSTS,
            **fields,
        }
    )


def ask(*argv: str) -> Result:
    return CliRunner().invoke(app, ["status", *argv], env={"COLUMNS": "200"})


class FakeClient:
    """Answers with one state and remembers how it was asked."""

    answer = state()
    asked: tuple[str, str | None, float] = ("", None, 0.0)

    def __init__(self, address: str, token: str | None = None) -> None:
        self._whom = (address, token)

    def __enter__(self) -> FakeClient:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, timeout_s: float) -> JobState:
        FakeClient.asked = (*self._whom, timeout_s)
        return FakeClient.answer


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr(status_command, "ControlClient", FakeClient)
    monkeypatch.setattr(FakeClient, "answer", state())
    return FakeClient


def test_the_table_has_every_host_with_its_fate_and_every_process_with_pid_and_port(answered: type[FakeClient]) -> None:
    result = ask("data-1:16000")
    assert result.exit_code == 0
    assert result.output.startswith("run r1: training; up 61 s, coordinator restarted 2 times\n")
    rows = {line.split()[1]: line for line in result.output.splitlines() if line.count("│") > 5}
    assert all(part in rows["data-1"] for part in ("10.0.0.1", "here", "0.4 s", "12.3 s", "worker-0", "4711", "6001"))
    assert "not here yet" in rows["data-2"]
    assert "lost" in rows["data-3"]
    assert "left: stopped by SIGTERM" in rows["trainer-1"]
    assert "done" in rows["trainer-2"]
    assert "dispatcher" in result.output


def test_an_ended_job_is_told_with_its_outcome_and_cause(answered: type[FakeClient]) -> None:
    cause: dict[str, object] = {
        "host": "trainer-1",
        "process": "rank-0",
        "exception": "ValueError",
        "message": "no loss",
    }
    answered.answer = state(phase=Phase.ENDED, outcome=Outcome.FAILED, cause=cause)
    assert "run r1: ended, failed: ValueError: no loss (rank-0 on trainer-1)" in ask("h:1").output
    answered.answer = state(phase=Phase.ENDED, outcome=Outcome.SUCCEEDED)
    assert "run r1: ended, succeeded; up" in ask("h:1").output


def test_json_is_the_whole_state_and_nothing_else(answered: type[FakeClient]) -> None:
    values = json.loads(ask("h:1", "--json").output)
    assert (values["phase"], values["outcome"], values["run_id"]) == ("training", "none", "r1")
    assert [host["name"] for host in values["hosts"]] == [host.name for host in HOSTS]
    assert values["hosts"][0]["processes"][0] == {"name": "worker-0", "pid": 4711, "state": "running", "port": 6001}


def test_token_and_patience_are_handed_on(answered: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    ask("[::1]:16000", "--token", "hush", "--timeout-s=0.5")
    assert answered.asked == ("[::1]:16000", "hush", 0.5)
    monkeypatch.setenv("HETERO_TOKEN", "whisper")
    ask("h:1")
    assert answered.asked == ("h:1", "whisper", 5.0)
    monkeypatch.setenv("HETERO_TOKEN", "")
    ask("h:1")
    assert answered.asked == ("h:1", None, 5.0)


@pytest.mark.parametrize(
    "address", ["algo-1", "algo-1:", ":16000", "a:0", "a:65536", "a:b", "a b:1", "::1:1", "http://a:1"]
)
def test_what_is_no_address_is_a_wrong_setting(address: str) -> None:
    result = ask(address)
    assert isinstance(result.exception, SettingsError)
    assert repr(address) in str(result.exception)


def test_a_token_that_cannot_be_sent_is_a_wrong_setting() -> None:
    assert isinstance(ask("127.0.0.1:1", "--token", "two words").exception, SettingsError)


def test_where_nobody_is_the_answer_comes_in_the_time_allowed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started_s = time.monotonic()
    error = ask(f"127.0.0.1:{port}", "--timeout-s=0.3").exception
    assert isinstance(error, CoordinatorUnreachable)
    assert error.exit_code == 3
    assert f"127.0.0.1:{port}" in str(error)
    assert time.monotonic() - started_s < 3
