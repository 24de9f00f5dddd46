"""Ranks that talk through torch.distributed: whose failure an error is, and where rank 0's store can listen.

The job calls `torch.distributed.init_process_group("gloo")` itself; nothing here imports PyTorch.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from hetero.errors import HeteroError

_PEER_GONE = (
    "closed by peer",
    "reset by peer",
    "closed by remote peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "connectfullmesh failed",
    "ncclremoteerror",
)
"""What Gloo and NCCL say when a peer is gone, in lower case [tests/contract/test_torch_ranks.py for Gloo]."""

_OWN_FAULT = ("failed to listen", "eaddrinuse", "invalid")
"""What rank 0's store says when it cannot be opened at all, or was given a wrong address."""

_FIRST_PORT = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_peer_failure(error: BaseException) -> bool:
    """Say whether an error only follows from another rank's end.

    Args:
        error: What a collective operation, `init_process_group` or a backward pass of DistributedDataParallel raised.

    Returns:
        True if the cause is to be looked for in another rank, one that does not answer in time included.
    """
    return any(_is_peer_failure(link) for link in _chain(error))


def free_port(address: str) -> int:
    """Return a TCP port that nobody listens on now, for the MASTER_PORT of rank 0's store.

    The store opens it a while later, so it is none of those that the system gives to outgoing connections.

    Args:
        address: Name or IP of this host, under which the other ranks reach it.

    Raises:
        HeteroError: This host does not have that address.
    """
    ports = range(_FIRST_PORT, _first_outgoing_port())
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        for port in random.sample(ports, min(100, len(ports))):
            with suppress(OSError):
                return _bound(family, str(where[0]), port)
        return _bound(family, str(where[0]), 0)
    except OSError as error:
        raise HeteroError(
            f"Cannot open a port on {address}: {error.strerror}. Name an address of this host."
        ) from error


def _bound(family: socket.AddressFamily, host: str, port: int) -> int:
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def _is_peer_failure(error: BaseException) -> bool:
    kind, text = type(error), str(error).lower()
    if kind.__module__.startswith("torch.distributed") and kind.__name__ in ("DistNetworkError", "DistStoreError"):
        return not any(mark in text for mark in _OWN_FAULT)
    if not isinstance(error, RuntimeError):
        return False
    return ("gloo" in text or "nccl" in text) and any(mark in text for mark in _PEER_GONE)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(16):
        if link is None:
            return
        yield link
        link = link.__cause__
