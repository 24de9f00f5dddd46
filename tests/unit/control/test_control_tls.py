"""The coordinator and its clients with TLS."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from certificates import CertificateAuthority
from control_running import wait_until

from hetero.control.client import ControlClient
from hetero.control.state import HostReport
from hetero.errors import PeerNeverCame, SettingsError, Unauthorised
from hetero.tls import PLAIN, Tls


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return CertificateAuthority(tmp_path_factory.mktemp("ca")).host()


def test_a_host_with_the_right_ca_registers_and_watches(start_coordinator, host: Tls) -> None:
    running = start_coordinator(tls=host, token="secret")
    with ControlClient(running.address, "secret", "d1", "data", tls=host) as client:
        assert client.register(HostReport(), 10.0).hosts
        client.watch()
        wait_until(lambda: client.state is not None, "the first state")
        client.publish("dispatcher", "127.0.0.1:1")
        wait_until(lambda: client.state is not None and "dispatcher" in client.state.endpoints, "the endpoint")


def test_the_coordinator_of_this_very_host_is_called_by_loopback_and_known_by_its_name(
    start_coordinator, tmp_path: Path, monkeypatch
) -> None:
    named = CertificateAuthority(tmp_path).host(names="DNS:cut-off.invalid")
    port = start_coordinator(tls=named).address.rpartition(":")[2]
    monkeypatch.setattr(socket, "gethostname", lambda: "cut-off.invalid")
    with ControlClient(f"cut-off.invalid:{port}", None, "d1", "data", tls=named) as client:
        assert client.register(HostReport(), 10.0).hosts


def test_the_token_is_needed_all_the_same(start_coordinator, host: Tls) -> None:
    running = start_coordinator(tls=host, token="secret")
    with ControlClient(running.address, "wrong", "d1", "data", tls=host) as client, pytest.raises(Unauthorised):
        client.register(HostReport(), 10.0)


def test_a_host_with_another_ca_says_what_is_wrong(start_coordinator, host: Tls, tmp_path: Path, caplog) -> None:
    running = start_coordinator(tls=host)
    other = Tls(ca=CertificateAuthority(tmp_path, "other").ca)
    with ControlClient(running.address, None, "d1", "data", tls=other) as client:
        with pytest.raises(PeerNeverCame, match=r"not signed by --tls-ca .*other\.pem"):
            client.register(HostReport(), 1.5)
        with pytest.raises(PeerNeverCame, match=r"not signed by --tls-ca .*other\.pem"):
            client.wait_for(lambda _: True, 1.0, "the dispatcher")
    said = [record.message for record in caplog.records if "trying on" in record.message]
    assert len(said) == 1, "one line, however many tries"
    assert all(not known.registered for known in running.coordinator.ledger.state().hosts)


def test_a_host_without_tls_is_refused_and_told_so(start_coordinator, host: Tls) -> None:
    running = start_coordinator(tls=host)
    client = ControlClient(running.address, None, "d1", "data", tls=PLAIN)
    with client, pytest.raises(PeerNeverCame, match=r"give --tls-ca here too"):
        client.register(HostReport(), 1.0)
    assert all(not known.registered for known in running.coordinator.ledger.state().hosts)


def test_a_host_with_tls_says_that_the_coordinator_has_none(start_coordinator, host: Tls) -> None:
    running = start_coordinator()
    client = ControlClient(running.address, None, "d1", "data", tls=host)
    with client, pytest.raises(PeerNeverCame, match=r"does not speak TLS; give it --tls-cert and --tls-key"):
        client.register(HostReport(), 1.0)


def test_a_coordinator_with_files_that_cannot_be_used_does_not_start(start_coordinator, host: Tls) -> None:
    with pytest.raises(SettingsError, match=r"needs --tls-cert and --tls-key"):
        start_coordinator(tls=Tls(ca=host.ca))


def test_a_running_connection_outlives_its_files(start_coordinator, tmp_path: Path, caplog) -> None:
    files = CertificateAuthority(tmp_path).host()
    running = start_coordinator(tls=files)
    with ControlClient(running.address, None, "d1", "data", tls=files) as client:
        client.register(HostReport(), 10.0)
        assert files.ca is not None
        files.ca.unlink()
        client._channel._renew()
        assert client.status().hosts
    assert "no new connection to the coordinator" in caplog.text
