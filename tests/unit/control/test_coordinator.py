from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest
from control_running import DEADLINE_S, free_port

from hetero._proto import control_pb2 as pb
from hetero._proto import control_pb2_grpc
from hetero.control.client import ControlClient
from hetero.control.config import CoordinatorConfig
from hetero.control.coordinator import MAX_REQUEST_BYTES, Coordinator
from hetero.control.state import HostReport
from hetero.errors import HeteroError, PortInUse, SettingsError, TopologyError
from hetero.tls import Tls


def call(address: str, method: str, request, token: str | None = None):
    """Call without the client's manners; return the status code."""
    metadata = () if token is None else (("x-hetero-token", token),)
    with grpc.insecure_channel(address) as channel:
        try:
            getattr(control_pb2_grpc.ControlStub(channel), method)(request, metadata=metadata, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_a_configuration_survives_as_json(make_config):
    tls = Tls(Path("/etc/cert.pem"), None, Path("ca.pem"))
    config = make_config(token="secret", splits=True, deterministic=True, bad_split="skip", tls=tls)
    assert CoordinatorConfig.from_json(config.to_json()) == config
    assert CoordinatorConfig.from_json(make_config().to_json()) == make_config()
    assert "secret" not in repr(config)


def test_a_configuration_without_sense_is_refused(make_config):
    with pytest.raises(TopologyError, match="at least one trainer"):
        make_config(trainers=())
    with pytest.raises(SettingsError, match="--bad-split is 'ignore'"):
        make_config(bad_split="ignore")
    with pytest.raises(SettingsError, match="--lease-s is 0"):
        make_config(lease_s=0)


def test_a_taken_port_is_an_error_that_names_its_owner(start_coordinator, make_config):
    port = start_coordinator().port
    with pytest.raises(PortInUse, match=rf"127.0.0.1:{port}: port in use by pid {os.getpid()}.*--control-port"):
        asyncio.run(Coordinator(make_config(port=port)).start())


def test_an_address_of_another_machine_cannot_be_bound(make_config):
    with pytest.raises(HeteroError, match="Cannot assign requested address"):
        asyncio.run(Coordinator(make_config(bind="192.0.2.1", port=free_port())).start())


def test_requests_are_bounded(start_coordinator):
    server = start_coordinator()
    before = server.coordinator.ledger.version
    request = pb.ReportFailureRequest(host="t1", cause_json="x" * (MAX_REQUEST_BYTES + 1))
    assert call(server.address, "ReportFailure", request) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.coordinator.ledger.version == before


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ReportFailure", pb.ReportFailureRequest(host="t1")),
        ("ReportFailure", pb.ReportFailureRequest(host="t1", cause_json="[1]")),
        ("EndTraining", pb.EndTrainingRequest(host="t1", outcome=2, cause_json="{")),
        ("EndTraining", pb.EndTrainingRequest(host="t1", outcome=77)),
    ],
)
def test_requests_without_sense_change_nothing(start_coordinator, method, request_):
    server = start_coordinator()
    before = server.coordinator.ledger.version
    assert call(server.address, method, request_) is grpc.StatusCode.INVALID_ARGUMENT
    assert server.coordinator.ledger.version == before


def test_bytes_that_are_no_request_change_nothing(start_coordinator):
    server = start_coordinator(token="secret")
    for token, code in (("secret", grpc.StatusCode.INVALID_ARGUMENT), (None, grpc.StatusCode.UNAUTHENTICATED)):
        for method in ("Register", "EndTraining"):
            with grpc.insecure_channel(server.address) as channel:
                metadata = () if token is None else (("x-hetero-token", token),)
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(f"/hetero.v1.Control/{method}")(b"\xff\xff\xff", metadata=metadata, timeout=10)
                assert caught.value.code() is code
    assert not any(host.registered for host in server.coordinator.ledger.state().hosts)


def test_sigterm_before_the_end_ends_it_at_once_and_well(spawn_coordinator):
    process = spawn_coordinator()
    port = process.wait_ready()
    with ControlClient(f"127.0.0.1:{port}", None, "t1", "trainer") as client:
        client.register(HostReport(ranks=1), DEADLINE_S)
        client.watch()
        process.end(signal.SIGTERM)
    assert process.exit_code == 0


def test_the_port_is_free_at_once_after_a_kill(spawn_coordinator):
    port = free_port()
    for _ in range(2):
        process = spawn_coordinator(port=port)
        assert process.wait_ready() == port
        with ControlClient(f"127.0.0.1:{port}") as client:
            client.status()
            process.end(signal.SIGKILL)
