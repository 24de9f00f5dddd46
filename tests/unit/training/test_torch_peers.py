"""Which errors of torch.distributed follow from another rank's end, by their real texts; no PyTorch needed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hetero.errors import HeteroError
from hetero.training import torch_peers
from hetero.training.torch_peers import free_port, is_peer_failure

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
NETWORK = type("DistNetworkError", (RuntimeError,), {"__module__": "torch.distributed"})
STORE = type("DistStoreError", (RuntimeError,), {"__module__": "torch.distributed"})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{PAIR}Read error [127.0.0.1]:52411: Connection reset by peer. This is typically caused by"),
        RuntimeError(f"{PAIR}Connection closed by peer [127.0.0.1]:29913"),
        RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"),
        RuntimeError(
            f"Rank 1 reached monitoredBarrier\n Original exception: \n{PAIR}Read error: Connection reset by peer"
        ),
        NETWORK("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
        NETWORK("The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, 39269)."),
        STORE("Timed out after 6 seconds waiting for clients. 1/2 clients joined."),
    ],
)
def test_what_follows_from_another_ranks_end_is_a_peer_failure(error: BaseException) -> None:
    assert is_peer_failure(error)
    wrapped = ValueError("step 3 failed")
    wrapped.__cause__ = error
    assert is_peer_failure(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"{PAIR}Connection closed by peer"),
        RuntimeError("Connection reset by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x10 and 9x10)"),
        RuntimeError(f"{PAIR}enforce fail: op.preamble.length <= op.nbytes. 80 vs 40"),
        NETWORK("The server socket has failed to listen on any local network address. port: 1, name: EADDRINUSE"),
        KeyboardInterrupt(),
    ],
)
def test_what_has_its_cause_here_is_none(error: BaseException) -> None:
    assert not is_peer_failure(error)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_free_port_can_be_listened_on(address: str) -> None:
    port = free_port(address)
    with socket.create_server((address, port)):
        pass


def test_a_free_port_is_none_that_outgoing_connections_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "range"
    limits.write_text("20005 60999\n")
    monkeypatch.setattr(torch_peers, "_RANGE", limits)
    assert {free_port("127.0.0.1") for _ in range(20)} <= set(range(20_000, 20_005))
    limits.write_text("1024 60999\n")  # nothing left outside it
    assert free_port("127.0.0.1") > 1023
    monkeypatch.setattr(torch_peers, "_RANGE", tmp_path / "absent")
    assert free_port("127.0.0.1") < 32_768


@pytest.mark.parametrize("address", ["192.0.2.1", "no such name"])
def test_an_address_of_another_host_is_refused(address: str) -> None:
    with pytest.raises(HeteroError, match=f"Cannot open a port on {address}: .*Name an address of this host"):
        free_port(address)
