from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from control_running import DEADLINE_S, free_port, wait_until

from hetero.control import channel
from hetero.control.client import ControlClient
from hetero.control.state import HostReport, Outcome, Phase
from hetero.errors import (
    CoordinatorUnreachable,
    HeteroError,
    PeerNeverCame,
    SettingsError,
    TopologyError,
    Unauthorised,
)

WORKING = HostReport(workers_alive=1)
RANKS = HostReport(ranks=1)


def come(make_client, address: str, *names: str, token: str | None = None) -> dict[str, ControlClient]:
    clients = {name: make_client(address, name, token) for name in names}
    for name, client in clients.items():
        client.register(WORKING if name.startswith("d") else RANKS, DEADLINE_S)
    if "d1" in clients:
        clients["d1"].publish("dispatcher", "d1:6000")
    return clients


def test_hosts_find_each_other_and_hear_of_the_end(start_coordinator, make_client):
    server = start_coordinator()
    clients = come(make_client, server.address, "d1", "d2", "t1", "t2")
    states = [c.wait_for(lambda s: s.phase is Phase.TRAINING, DEADLINE_S, "training") for c in clients.values()]
    assert all(state.endpoints["dispatcher"] == "d1:6000" for state in states)
    assert clients["t1"].lease_s == 10.0
    assert states[0].host("d1").address == "d1"

    final = clients["t1"].end_training(Outcome.SUCCEEDED)
    assert final.outcome is Outcome.SUCCEEDED
    for client in clients.values():
        assert client.wait_for(lambda s: False, DEADLINE_S, "the end").outcome is Outcome.SUCCEEDED
        assert client.leave(report=HostReport(cpu_s=3.0)) is not None
    status = make_client(server.address).status()
    assert [(h.left, h.lost, h.cpu_s) for h in status.hosts] == [(True, False, 3.0)] * 4


def test_the_end_reaches_five_watchers_before_any_heartbeat(start_coordinator, make_client):
    server = start_coordinator()
    chief = come(make_client, server.address, "d1", "t2", "t1")["t1"]
    ended = threading.Semaphore(0)
    watchers = [make_client(server.address, host) for host in ("d1", "d2", "t1", "t2", "")]
    for watcher in watchers:
        watcher.watch(lambda state: ended.release() if state.ended else None)
    for watcher in watchers:
        watcher.wait_for(lambda s: s.phase is Phase.TRAINING, DEADLINE_S, "training")
    chief.end_training(Outcome.FAILED, {"message": "boom"})
    for _ in watchers:
        assert ended.acquire(timeout=DEADLINE_S)
    assert [w.state.cause for w in watchers] == [{"message": "boom"}] * 5


def test_register_waits_for_the_coordinator_to_come_up(spawn_coordinator, make_client):
    port = free_port()
    client = make_client(f"127.0.0.1:{port}", "t1")
    tries, result = threading.Semaphore(0), []
    thread = threading.Thread(target=lambda: result.append(client.register(RANKS, 60.0, check=tries.release)))
    thread.start()
    assert tries.acquire(timeout=DEADLINE_S)
    assert tries.acquire(timeout=DEADLINE_S)  # refused twice: nobody was there
    spawn_coordinator(port=port).wait_ready()
    thread.join(DEADLINE_S)
    assert result[0].host("t1").registered


def test_register_gives_up_in_time_and_says_what_to_do(make_client):
    client = make_client(f"127.0.0.1:{free_port()}", "t1")
    with pytest.raises(PeerNeverCame, match=r"did not answer within 0.3 s \(.*--start-timeout-s"):
        client.register(RANKS, 0.3)


def test_register_can_be_interrupted(make_client):
    def check():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_client(f"127.0.0.1:{free_port()}", "t1").register(RANKS, 60.0, check=check)


def test_a_port_that_swallows_everything_is_no_coordinator(make_client):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = make_client(f"127.0.0.1:{mute.getsockname()[1]}", "t1")
        with pytest.raises(PeerNeverCame):
            client.register(RANKS, 0.5)


@pytest.mark.parametrize("token", [None, "wrong", "secret2", "s"])
def test_without_the_token_nothing_is_told_and_nothing_changes(start_coordinator, make_client, token, caplog):
    server = start_coordinator(token="secret")
    before = server.coordinator.ledger.version
    stranger = make_client(server.address, "t1", token)
    for ask in (
        lambda: stranger.register(RANKS, 60.0),
        lambda: stranger.publish("dispatcher", "t1:1"),
        lambda: stranger.end_training(Outcome.SUCCEEDED),
        lambda: stranger.report_failure({"message": "boom"}),
        lambda: stranger.wait_for(lambda s: True, 60.0, "anything"),
        stranger.status,
    ):
        with pytest.raises(Unauthorised, match="token"):
            ask()
    assert stranger.leave("bye") is None
    assert stranger.state is None
    assert server.coordinator.ledger.version == before
    refusals = [r.getMessage() for r in caplog.records if "refused a call from" in r.getMessage()]
    assert len(refusals) == 1  # one line, not one a call
    assert "127.0.0.1" in refusals[0]
    assert make_client(server.address, "t1", "secret").register(RANKS, DEADLINE_S).host("t1").registered


def test_a_token_that_cannot_be_sent_is_refused_at_once():
    for token in ("", "a b", "café", "a\n"):
        with pytest.raises(SettingsError, match="--token"):
            ControlClient("127.0.0.1:1", token)


def test_hosts_that_the_job_does_not_expect_are_told_so(start_coordinator, make_client):
    server = start_coordinator()
    with pytest.raises(TopologyError, match="'d9' is not part of this job"):
        make_client(server.address, "d9").register(WORKING, 60.0)
    with pytest.raises(TopologyError, match="registers as data, this job expects it as trainer"):
        ControlClient(server.address, None, "t1", "data").register(WORKING, 60.0)
    with pytest.raises(HeteroError, match="only the chief, 't1'"):
        make_client(server.address, "t2").end_training(Outcome.SUCCEEDED)


def test_a_silent_trainer_ends_the_job(start_coordinator, make_client):
    server = start_coordinator(lease_s=0.5)
    clients = come(make_client, server.address, "d1", "t1", "t2")
    for name in ("d1", "t1"):
        clients[name].start_lease(lambda: RANKS, lambda _: None)
    state = clients["d1"].wait_for(lambda s: s.ended, DEADLINE_S, "the end")
    assert state.outcome is Outcome.TRAINER_LOST
    assert "t2" in state.cause["message"]


def test_living_leases_last(start_coordinator, make_client):
    server = start_coordinator(lease_s=0.6, data=(), trainers=("t1",))
    beats = threading.Semaphore(0)

    def report():
        beats.release()
        return RANKS

    come(make_client, server.address, "t1")["t1"].start_lease(report, lambda _: None)
    for _ in range(40):  # four leases
        assert beats.acquire(timeout=DEADLINE_S)
    assert make_client(server.address).status().phase is Phase.TRAINING


def test_report_now_does_not_wait_for_the_next_heartbeat(start_coordinator, make_client):
    server = start_coordinator(lease_s=3600.0, data=("d1",), trainers=("t1",))
    come(make_client, server.address, "t1")
    data = make_client(server.address, "d1")
    data.register(HostReport(), DEADLINE_S)
    data.publish("dispatcher", "d1:6000")
    reports = [HostReport()]
    data.start_lease(lambda: reports[-1], lambda _: None, interval_s=3600.0)
    data.wait_for(lambda s: s.host("d1").registered, DEADLINE_S, "d1")
    reports.append(WORKING)
    data.report_now()
    assert data.wait_for(lambda s: s.phase is Phase.TRAINING, DEADLINE_S, "training").workers_alive == 1


def test_a_report_that_fails_does_not_end_the_lease(start_coordinator, make_client):
    server = start_coordinator(data=(), trainers=("t1",))
    client = come(make_client, server.address, "t1")["t1"]
    asked = threading.Semaphore(0)

    def report():
        asked.release()
        raise RuntimeError("cannot count")

    client.start_lease(report, lambda _: None, interval_s=0.02)
    for _ in range(3):
        assert asked.acquire(timeout=DEADLINE_S)


def test_a_killed_coordinator_resumes_and_everybody_finds_it_again(spawn_coordinator, make_client):
    port = free_port()
    first = spawn_coordinator(port=port, lease_s=5.0)
    first.wait_ready()
    clients = come(make_client, f"127.0.0.1:{port}", "d1", "t1", "t2")
    silences: dict[str, list[float]] = {name: [] for name in clients}
    for name, client in clients.items():
        client.start_lease(lambda name=name: WORKING if name == "d1" else RANKS, silences[name].append, 0.1)
        client.wait_for(lambda s: s.phase is Phase.TRAINING, DEADLINE_S, "training")

    first.end(signal.SIGKILL)
    assert first.exit_code == -signal.SIGKILL  # the fault was there
    wait_until(lambda: all(silences.values()), "everybody has noticed")
    second = spawn_coordinator(port=port, lease_s=5.0)
    second.wait_ready()

    for client in clients.values():
        state = client.wait_for(lambda s: s.restarts == 1, DEADLINE_S, "the resumed coordinator")
        assert (state.phase, state.endpoints) == (Phase.TRAINING, {"dispatcher": "d1:6000"})
    assert clients["t1"].end_training(Outcome.SUCCEEDED).outcome is Outcome.SUCCEEDED
    for client in clients.values():
        assert client.wait_for(lambda s: s.ended, DEADLINE_S, "the end").outcome is Outcome.SUCCEEDED


def test_a_coordinator_without_memory_gets_to_know_everybody_again(spawn_coordinator, make_client, tmp_path):
    port = free_port()
    first = spawn_coordinator(port=port, data=(), trainers=("t1",))
    first.wait_ready()
    client = come(make_client, f"127.0.0.1:{port}", "t1")["t1"]
    client.start_lease(lambda: RANKS, lambda _: None, 0.1)
    first.end(signal.SIGKILL)
    second = spawn_coordinator(port=port, data=(), trainers=("t1",), journal=tmp_path / "another.json", run_id="run-2")
    second.wait_ready()
    state = client.wait_for(lambda s: s.run_id == "run-2" and s.phase is Phase.TRAINING, DEADLINE_S, "training")
    assert state.host("t1").registered


def test_silence_is_told_while_the_coordinator_is_gone_but_not_after_the_end(spawn_coordinator, make_client):
    process = spawn_coordinator(data=(), trainers=("t1", "t2"))
    clients = come(make_client, f"127.0.0.1:{process.wait_ready()}", "t1", "t2")
    silences: dict[str, list[float]] = {"t1": [], "t2": []}
    clients["t1"].end_training(Outcome.SUCCEEDED)
    clients["t1"].wait_for(lambda s: s.ended, DEADLINE_S, "the end")  # t2 does not watch: it does not know
    for name, client in clients.items():
        client.start_lease(lambda: RANKS, silences[name].append, 0.02)
    process.end(signal.SIGKILL)
    wait_until(lambda: len(silences["t2"]) >= 5, "t2 has noticed")
    assert silences["t2"] == sorted(silences["t2"])
    assert silences["t1"] == []


def test_the_coordinator_goes_only_when_everybody_there_has_heard_of_the_end(spawn_coordinator, make_client):
    process = spawn_coordinator(data=(), trainers=("t1", "t2"))
    clients = come(make_client, f"127.0.0.1:{process.wait_ready()}", "t1", "t2")
    for client in clients.values():
        client.wait_for(lambda s: s.phase is Phase.TRAINING, DEADLINE_S, "training")
    clients["t1"].end_training(Outcome.SUCCEEDED)
    process.end(signal.SIGTERM)
    assert process.exit_code == 0
    for client in clients.values():
        assert client.wait_for(lambda s: s.ended, DEADLINE_S, "the end").outcome is Outcome.SUCCEEDED


def test_end_training_answers_with_the_primary_cause_of_another_host(start_coordinator, make_client):
    server = start_coordinator(data=(), trainers=("t1", "t2"))
    clients = come(make_client, server.address, "t1", "t2")
    final = []

    def end():
        cause = {"message": "peer gone", "secondary": True}
        final.append(clients["t1"].end_training(Outcome.FAILED, cause, wait_for_primary_s=30.0))

    thread = threading.Thread(target=end)
    thread.start()
    wait_until(lambda: server.coordinator.ledger._failures, "the secondary failure has arrived")
    assert not final
    clients["t2"].report_failure({"message": "killed by SIGKILL"}, age_s=0.1)
    thread.join(DEADLINE_S)
    assert final[0].cause == {"message": "killed by SIGKILL"}


def test_a_huge_cause_still_arrives(start_coordinator, make_client):
    server = start_coordinator(data=(), trainers=("t1",))
    client = come(make_client, server.address, "t1")["t1"]
    state = client.report_failure({"message": "m" * 3_000_000, "last_lines": ["l" * 65_536] * 40})
    assert state.outcome is Outcome.FAILED
    assert "characters left out" in state.cause["message"]


def test_waiting_in_vain_names_what_was_waited_for(start_coordinator, make_client):
    client = make_client(start_coordinator().address)
    with pytest.raises(PeerNeverCame, match=r"the dispatcher did not come within 0.4 s; the job is waiting"):
        client.wait_for(lambda s: "dispatcher" in s.endpoints, 0.2, "the dispatcher")


def test_as_long_as_hosts_are_missing_the_coordinator_is_the_one_who_gives_up(start_coordinator, make_client):
    client = make_client(start_coordinator(start_timeout_s=1.0).address)
    state = client.wait_for(lambda s: "rendezvous" in s.endpoints, 0.7, "rendezvous")
    assert state.outcome is Outcome.NEVER_STARTED
    assert "training did not start within 1 s" in state.cause["message"]


def test_a_broken_callback_does_not_end_the_watch(start_coordinator, make_client):
    server = start_coordinator()
    watcher, seen = make_client(server.address), []

    def broken(state):
        seen.append(state.version)
        raise ValueError("a mistake")

    watcher.watch(broken)
    come(make_client, server.address, "t1")
    watcher.wait_for(lambda s: s.host("t1").registered, DEADLINE_S, "t1")
    assert len(seen) >= 1


def test_close_is_fast_may_be_repeated_and_leaves_no_thread(start_coordinator, make_client):
    server = start_coordinator()
    before = set(threading.enumerate())
    clients = come(make_client, server.address, "d1", "t1")
    for client in clients.values():
        client.watch(lambda _: None)
        client.start_lease(lambda: RANKS, lambda _: None)
        client.wait_for(lambda s: s.host("t1").registered, DEADLINE_S, "t1")
    lost = make_client(f"127.0.0.1:{free_port()}", "t2")
    lost.watch()
    lost.start_lease(lambda: RANKS, lambda _: None, 0.02)
    started_s = time.monotonic()
    for client in (*clients.values(), lost):
        client.close()
        client.close()
    assert time.monotonic() - started_s < 2.0
    wait_until(lambda: not (set(threading.enumerate()) - before), "all threads have ended")
    with pytest.raises(CoordinatorUnreachable):
        lost.status()
    assert lost.leave() is None


def test_what_a_coordinator_without_a_journal_has_forgotten_is_announced_again(
    spawn_coordinator, make_client, make_config
):
    port = free_port()
    first = spawn_coordinator(port=port)
    first.wait_ready()
    client = make_client(f"127.0.0.1:{port}", "d1")
    client.publish("dispatcher", "d1:6000")
    client.watch()
    wait_until(lambda: client.state is not None, "the first state")
    first.end(signal.SIGKILL)
    make_config().journal.unlink()
    spawn_coordinator(port=port).wait_ready()
    stranger = make_client(f"127.0.0.1:{port}")
    state = stranger.wait_for(lambda state: "dispatcher" in state.endpoints, DEADLINE_S, "the endpoint")
    assert (state.restarts, state.endpoints) == (0, {"dispatcher": "d1:6000"})


def test_close_from_a_callback_does_not_wait_for_itself(start_coordinator, make_client):
    client, closed = make_client(start_coordinator().address), threading.Event()

    def close(_):
        client.close()
        closed.set()

    client.watch(close)
    assert closed.wait(DEADLINE_S)


def test_a_proxy_in_the_environment_is_ignored(spawn_coordinator, monkeypatch):
    port = spawn_coordinator(data=(), trainers=("t1",)).wait_ready()
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    code = (
        "import sys; from hetero.control.client import ControlClient;"
        f"print(ControlClient('127.0.0.1:{port}').status(10.0).phase.value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "waiting", done.stderr


def test_a_host_says_early_why_it_may_not_find_the_coordinator(make_client, monkeypatch, caplog):
    monkeypatch.setattr(channel, "TELL_AFTER_S", 0.2)
    with pytest.raises(PeerNeverCame):
        make_client("no-such-host.invalid:16000").register(RANKS, 1.5)
    (said,) = [record.getMessage() for record in caplog.records if "yet" in record.getMessage()]
    assert said.startswith("no coordinator answers at no-such-host.invalid:16000 yet (the name no-such-host.invalid ")
    assert "put it into DNS or /etc/hosts" in said


def test_names_and_addresses_that_can_be_resolved_are_no_problem():
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        assert channel.unresolved(address) == ""
