"""`hetero status` over states that a coordinator could answer; a real one answers in tests/e2e/test_commands.py."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetero._proto import splits_pb2 as pb
from hetero.cli import status_command
from hetero.cli.input_view import Rates
from hetero.cli.main import app
from hetero.control.state import HostState, JobState, Outcome, Phase, ProcessReport
from hetero.errors import CoordinatorUnreachable, SettingsError
from hetero.tls import PLAIN, Tls

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
    inputs: tuple[pb.InputState, ...] = ()  # one for each question, the last one again and again
    asked: tuple[str, str | None, float] = ("", None, 0.0)
    tls = PLAIN

    def __init__(self, address: str, token: str | None = None, *, tls: Tls = PLAIN) -> None:
        self._whom = (address, token)
        FakeClient.tls = tls

    def __enter__(self) -> FakeClient:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, timeout_s: float) -> JobState:
        FakeClient.asked = (*self._whom, timeout_s)
        return FakeClient.answer

    def input_state(self, timeout_s: float) -> pb.InputState | None:
        del timeout_s
        if len(FakeClient.inputs) > 1:
            first, *FakeClient.inputs = FakeClient.inputs
            return first
        return FakeClient.inputs[0] if FakeClient.inputs else None


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr(status_command, "ControlClient", FakeClient)
    monkeypatch.setattr(FakeClient, "answer", state())
    monkeypatch.setattr(FakeClient, "inputs", ())
    monkeypatch.setattr(status_command, "RATE_INTERVAL_S", 0.25)
    return FakeClient


def input_state(rows: int) -> pb.InputState:
    """Return the input of a job whose one worker has prepared, and one rank received, so many rows."""
    worker = pb.WorkerStats(name="worker-0", rows=rows, batches=40, splits=9, epoch=1, split=17, waiting_batches=3)
    feed = pb.FeedStats(workers=[worker], waiting_batches=3)
    return pb.InputState(
        splits=20,
        epochs=[
            pb.EpochState(epoch=0, done=20, batches=100, ended=True),
            pb.EpochState(epoch=1, done=15, held=2, batches=75),
        ],
        hosts=[pb.HostFeed(host="data-1", connected=True, stats=feed), pb.HostFeed(host="data-2")],
        ranks=[pb.RankStats(rank=0, rows=rows, batches=40, waiting_batches=5, waiting_bytes=1_500_000, epoch=1)],
        replayed_batches=14,
        skipped=[pb.SkippedSplit(epoch=1, split=3, value='"c.bin"', host="data-1", cause="ValueError: odd")],
    )


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


def test_a_grpc_job_shows_epochs_workers_and_ranks_with_rates(answered: type[FakeClient]) -> None:
    answered.inputs = (input_state(0), input_state(1_000_000_000))
    output = ask("h:1").output
    head = next(line for line in output.splitlines() if line.startswith("input:"))
    assert re.search(r"20 splits an epoch; [0-9]{9,} rows/s; 3 batches wait on data hosts; 14 batches prepared", head)
    rows = [" ".join(line.replace("│", " ").split()) for line in output.splitlines()]
    assert "0 20 of 20 0 100 ended" in rows
    assert "1 15 of 20 2 75 open" in rows
    assert any(re.match(r"data-1 here worker-0 [0-9]{9,} 1000000000 40 9 3 epoch 1, split 17", row) for row in rows)
    assert "data-2 not here" in rows
    assert any(re.match(r"0 [0-9]{9,} 1000000000 40 5 1.5 1", row) for row in rows)
    assert 'skipped: epoch 1, split 3 "c.bin" on data-1: ValueError: odd' in output


def test_json_of_a_grpc_job_has_the_input_and_its_rates(answered: type[FakeClient]) -> None:
    answered.inputs = (input_state(0), input_state(1_000_000_000))
    values = json.loads(ask("h:1", "--json").output)["input"]
    assert (values["splits"], values["replayed_batches"], values["epochs"][1]["done"]) == (20, 14, 15)
    assert values["hosts"][0]["stats"]["workers"][0]["splits"] == 9
    assert values["hosts"][0]["stats"]["workers"][0]["rows_per_s"] > 1e8
    assert values["ranks"][0]["rows_per_s"] > 1e8


def test_a_job_of_another_engine_has_no_input_to_show(answered: type[FakeClient]) -> None:
    assert "input:" not in ask("h:1").output
    assert json.loads(ask("h:1", "--json").output)["input"] is None


def test_watch_prints_a_json_object_a_refresh_until_the_job_is_over(
    answered: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([state(version=1), state(version=2), state(version=3, phase=Phase.ENDED)])
    monkeypatch.setattr(FakeClient, "status", lambda _self, _timeout_s: next(states))
    lines = ask("h:1", "--watch", "--every-s", "0.1", "--json").output.splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2, 3]


def test_watch_shows_the_last_state_and_ends_with_the_job(
    answered: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([state(), state(phase=Phase.ENDED, outcome=Outcome.SUCCEEDED)])
    monkeypatch.setattr(FakeClient, "status", lambda _self, _timeout_s: next(states))
    result = ask("h:1", "--watch", "--every-s", "0.1")
    assert result.exit_code == 0
    assert "run r1: ended, succeeded" in result.output


def test_ctrl_c_ends_watching_without_an_error(answered: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status_command.time, "sleep", interrupt)
    assert ask("h:1", "--watch").exit_code == 0
    assert ask("h:1", "--watch", "--json").exit_code == 0


def test_rates_are_those_of_the_time_between_the_figures() -> None:
    rates = Rates()
    rates.look(input_state(100), 10.0)
    assert rates.of("worker", "data-1/worker-0") is None
    rates.look(input_state(300), 12.0)
    assert rates.of("worker", "data-1/worker-0") == pytest.approx(100.0)
    rates.look(input_state(300), 12.1)  # asked too soon: the feed has told nothing new
    assert rates.of("worker", "data-1/worker-0") == pytest.approx(100.0)
    rates.look(input_state(10), 14.0)  # a new process counts from 0
    assert rates.of("worker", "data-1/worker-0") is None
    assert rates.total("rank") is None


def test_the_ca_is_handed_on(answered: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    ask("h:1", "--tls-ca", "ca.pem")
    assert answered.tls == Tls(ca=Path("ca.pem"))
    monkeypatch.setenv("HETERO_TLS_CA", "other.pem")
    ask("h:1")
    assert answered.tls == Tls(ca=Path("other.pem"))


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
