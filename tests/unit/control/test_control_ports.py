"""A coordinator whose port is taken is found on the next one, and no other job's is taken for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from hetero._proto import control_pb2 as pb
from hetero.clusters.local import free_port
from hetero.control.channel import Channel
from hetero.control.config import CONTROL_PORTS
from hetero.control.state import HostReport
from hetero.errors import PortInUse, Unauthorised


def occupy(port: int) -> socket.socket:
    """Listen on a port and never say a word."""
    return socket.create_server(("127.0.0.1", port))


@pytest.fixture
def ports() -> Iterator[tuple[int, Callable[[int], None]]]:
    """A port that is free, as are the next ones, and a function that occupies one by its distance from it."""
    with ExitStack() as held:
        while True:
            first = free_port()
            try:
                with ExitStack() as tried:
                    for number in range(CONTROL_PORTS):
                        tried.enter_context(occupy(first + number))
                break
            except OSError:
                continue
        yield first, lambda number: held.enter_context(occupy(first + number)) and None


@pytest.mark.parametrize("taken", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_coordinator_takes_the_next_free_port_and_is_found_there(start_coordinator, make_client, ports, taken):
    first, take = ports
    for number in range(taken):
        take(number)
    coordinator = start_coordinator(port=first, cluster="ours")
    assert coordinator.address == f"127.0.0.1:{first + taken}"
    client = make_client(f"127.0.0.1:{first}", "t1", cluster="ours")
    client.register(HostReport(), 30.0)
    assert client.address == coordinator.address


def test_the_other_ports_do_not_make_a_coordinator_found_later(start_coordinator, make_client, ports):
    """Between the ports of one round nobody pauses: the right one is asked as often as if it were the only one."""
    first, _ = ports
    client = make_client(f"127.0.0.1:{first}", "t1", cluster="ours")
    asked: list[str] = []
    pauses: list[float] = []
    channel = client._channel

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        if sum(map(bool, pauses)) == 10:
            start_coordinator(port=first, cluster="ours")
        return False

    def call_once(*args):
        asked.append(channel.address)
        return Channel.call_once(channel, *args)

    channel._closed.wait = pause
    channel.call_once = call_once
    client.register(HostReport(), 30.0)
    assert asked[: 4 * 10] == [f"127.0.0.1:{first + number}" for number in range(CONTROL_PORTS)] * 10
    assert [bool(seconds) for seconds in pauses[: 4 * 10]] == [False, False, False, True] * 10


def test_who_knows_of_another_process_where_it_is_asks_there_next(start_coordinator, make_client, ports):
    """Though the first port hangs: its owner never says a word."""
    first, take = ports
    take(0)
    start_coordinator(port=first, cluster="ours")
    found: list[str] = []
    client = make_client(f"127.0.0.1:{first}", "t1", cluster="ours", on_found=found.append)
    client.look_at("127.0.0.1:1")  # no port of this job's
    assert client.address == f"127.0.0.1:{first}"
    client.look_at(f"127.0.0.1:{first + 1}")
    client._channel.call_once("GetStatus", pb.GetStatusRequest(), 5.0)
    assert found == [f"127.0.0.1:{first + 1}"]
    client.look_at(f"127.0.0.1:{first}")  # it was found: others know no better
    client._channel.call_once("GetStatus", pb.GetStatusRequest(), 5.0)
    assert found == [client.address] == [f"127.0.0.1:{first + 1}"]


def test_with_all_of_them_taken_the_error_names_port_owner_and_option(start_coordinator, ports):
    first, take = ports
    for number in range(CONTROL_PORTS):
        take(number)
    with pytest.raises(PortInUse, match=f":{first}: port in use by pid .*--control-port.* up to {first + 3}"):
        start_coordinator(port=first, cluster="ours")


def test_another_jobs_coordinator_is_passed_by_whatever_its_token(start_coordinator, make_client, ports):
    first, _ = ports
    other = start_coordinator(port=first, cluster="theirs", token="another")
    ours = start_coordinator(port=first, cluster="ours", token="right")
    client = make_client(f"127.0.0.1:{first}", "t1", token="right", cluster="ours")
    state = client.register(HostReport(), 30.0)
    assert state.host("t1").registered
    assert client.address == ours.address != other.address
    assert not other.coordinator.ledger.state().host("t1").registered
    stranger = make_client(f"127.0.0.1:{first}", "t1", token="wrong", cluster="ours")
    with pytest.raises(Unauthorised, match="wrong token"):
        stranger.register(HostReport(), 30.0)


def test_who_is_in_no_job_asks_just_the_address_that_it_was_given(start_coordinator, make_client, ports):
    first, _ = ports
    start_coordinator(port=first, cluster="theirs")
    ours = start_coordinator(port=first, cluster="ours")
    assert make_client(ours.address).status().run_id == "run-1"
    assert make_client(f"127.0.0.1:{first}").address == f"127.0.0.1:{first}"


def test_a_coordinator_that_comes_again_on_another_port_is_followed(start_coordinator, make_client, ports, make_config):
    first, take = ports
    coordinator = start_coordinator(port=first, cluster="ours")
    client = make_client(f"127.0.0.1:{first}", "t1", cluster="ours")
    client.register(HostReport(), 30.0)
    seen, moved = [], threading.Event()

    def see(state):
        seen.append(state.restarts)
        if state.restarts:
            moved.set()

    client.watch(see)
    coordinator.stop()
    take(0)
    again = start_coordinator(port=first, cluster="ours")
    assert again.address == f"127.0.0.1:{first + 1}"
    assert moved.wait(30.0)
    assert client.address == again.address
    client.publish("here", "we:1")
    assert again.coordinator.ledger.state().endpoints == {"here": "we:1"}


def test_the_coordinator_of_this_very_host_is_found_without_its_name(start_coordinator, make_client, monkeypatch):
    """As in a container that was taken off its network: its own name is gone with it, and nobody can resolve it."""
    coordinator = start_coordinator()
    monkeypatch.setattr(socket, "gethostname", lambda: "cut-off.invalid")
    port = coordinator.address.rpartition(":")[2]
    client = make_client(f"cut-off.invalid:{port}", "t1")
    client.register(HostReport(), 30.0)
    assert client.address == f"cut-off.invalid:{port}"
