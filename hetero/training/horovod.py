"""Horovod's one door: the rendezvous in the chief's launcher, and everything a rank does with its peers.

The rendezvous is a small HTTP key-value server. It runs in the launcher of the first trainer host and needs no
TensorFlow; every host starts its own ranks, so neither ssh nor mpirun is needed. A rank is started before the
rendezvous is known, imports TensorFlow, and then calls `init_rank` with the environment of its slot. Where mpirun
started the launchers all the same, and Horovod was built for MPI, ranks meet through that.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hetero.errors import HeteroError, PeerNeverCame
from hetero.training import by_mpi

Slots = Sequence[tuple[str, int]]

_PEER_GONE = (
    "horovod has been shut down",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting for",
    "gloo/transport",
)
"""What Horovod and Gloo say when a peer is gone, in lower case [tests/contract/test_horovod.py]."""


class RendezvousHandle:
    """A running rendezvous.

    Attributes:
        slots: `(host, ranks)` in rank order.
        address: What the ranks connect to, a name or an IP.
        port: The port it listens on.
    """

    def __init__(self, slots: Slots, address: str, interface: str | None, timeout_s: float, server: Any) -> None:
        self.slots, self.address = tuple(slots), address
        self.port = int(server.server_address[1])
        self._interface, self._timeout_s = interface, timeout_s
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, args=(0.1,), name="horovod-rendezvous", daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """`address:port`, as it is published to the other hosts."""
        return f"{self.address}:{self.port}"

    def slot_env(self, host: str, local_rank: int) -> dict[str, str]:
        """Return the environment of one rank; see the function of the same name."""
        return slot_env(
            self.slots, host, local_rank, self.endpoint, interface=self._interface, timeout_s=self._timeout_s
        )

    def stop(self) -> None:
        """Stop serving and free the port. May be repeated; ranks that are connected to each other go on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def start_rendezvous(
    slots: Slots, address: str, *, interface: str | None = None, port: int = 0, timeout_s: float = 120.0
) -> RendezvousHandle:
    """Start the rendezvous in this process; the caller stops it when all ranks have ended.

    Args:
        slots: `(host, ranks)` for each trainer host, the chief first. Host names are labels and need not resolve.
        address: Name or IP by which every rank reaches this host.
        interface: Network interface on which ranks talk to each other, such as "eth0" or "lo"; None: the one with the
            route to `address`, found by each rank.
        port: Port to listen on; 0 takes a free one.
        timeout_s: How long a rank waits for another one, both to appear and within one collective operation. A peer
            that died is noticed at once; this bounds the wait for one that came late, or whose machine vanished without
            a word.

    Returns:
        The handle, listening.

    Raises:
        HeteroError: Horovod is not installed.
        OSError: The port is taken.
    """
    try:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise _missing(error) from error

    class Handler(RendezvousHandler):  # type: ignore[misc]
        """Answers what is not from a rank with 400, where Horovod's own handler prints a traceback."""

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            if self.path.count("/") == 2 and (
                self.command != "PUT" or self.headers.get("Content-Length", "").isdigit()
            ):
                return True
            self.send_error(400)
            return False

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing about peers that break off; a rank whose connection fails says so itself."""

    total = _total(slots)
    server = Server(("", port), Handler, 0)
    server.init(get_host_assignments([HostInfo(host, ranks) for host, ranks in slots], total))
    return RendezvousHandle(slots, address, interface, timeout_s, server)


def slot_env(
    slots: Slots,
    host: str,
    local_rank: int,
    rendezvous: str,
    *,
    interface: str | None = None,
    timeout_s: float = 120.0,
) -> dict[str, str]:
    """Return the environment that makes a process one rank; pure, so every host can work out its own.

    Args:
        slots: As given to `start_rendezvous`.
        host: Which of those hosts.
        local_rank: Which rank of that host, from 0.
        rendezvous: `address:port` of the running rendezvous.
        interface: As in `start_rendezvous`.
        timeout_s: As in `start_rendezvous`.

    Returns:
        Variables for `init_rank`.

    Raises:
        ValueError: The slots have no such rank, or `rendezvous` has no port.
    """
    size = _total(slots)
    ranks = dict(slots)
    if not 0 <= local_rank < ranks.get(host, 0):
        raise ValueError(f"no rank {local_rank} on host {host!r}: the trainer hosts are {list(slots)}")
    address, _, port = rendezvous.rpartition(":")
    if not address or not port.isdigit():
        raise ValueError(f"the rendezvous is {rendezvous!r}; it must be address:port")
    before = 0
    for name, count in slots:
        if name == host:
            break
        before += count
    peers = [name for name, count in slots if count > local_rank]  # the hosts that have a rank with this local rank
    env = {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": before + local_rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": ranks[host],
        "HOROVOD_CROSS_RANK": peers.index(host),
        "HOROVOD_CROSS_SIZE": len(peers),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address.strip("[]"),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": max(1, round(timeout_s)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if interface is not None:
        env |= {"HOROVOD_GLOO_IFACE": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: str(value) for name, value in env.items()}


def init_rank(env: Mapping[str, str], *, under_mpirun: bool = False) -> tuple[int, int, int]:
    """Join the other ranks: to be called in the rank's process once TensorFlow is imported.

    Args:
        env: From `slot_env`. A size of 1 joins too.
        under_mpirun: Whether mpirun started the rank's launcher: then a Horovod that was built for MPI uses that, and
            one that was not meets the others at the rendezvous as everywhere else.

    Returns:
        `(rank, size, local_rank)`.

    Raises:
        PeerNeverCame: Another rank did not come within the slot's `timeout_s`.
        HeteroError: Horovod is not installed, does not fit TensorFlow, or was built for another way to meet.
    """
    hvd = _horovod()
    uses_mpi = under_mpirun and bool(hvd.mpi_built())
    if not uses_mpi and not hvd.gloo_built():
        raise HeteroError(
            "Horovod was built for MPI alone, but mpirun did not start this rank. Build it with HOROVOD_WITH_GLOO=1, "
            "or have mpirun start the launchers (on SageMaker: `mpi` in the job's `distribution`)."
        )
    os.environ.update(by_mpi.rank_env(env) if uses_mpi else env)
    if not uses_mpi and "HOROVOD_GLOO_IFACE" not in os.environ:
        interface = interface_to(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
        os.environ.update(HOROVOD_GLOO_IFACE=interface, NCCL_SOCKET_IFNAME=interface)
    # Ranks that wait for each other for ever (unequal steps in a hand-written loop) would be billed for ever.
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1800")
    if not _has_gpu():
        # Ranks agree on what to do next once a cycle, by default every 1 ms, even while waiting for input. Two waiting
        # ranks took about 0.7 of a shared CPU so, and about half of that at 5 ms, which an allreduce may wait longer.
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
    try:
        if uses_mpi:
            by_mpi.call_within(float(env["HOROVOD_GLOO_TIMEOUT_SECONDS"]), hvd.init)
        else:
            hvd.init()
    except Exception as error:
        where = f"{env.get('HOROVOD_GLOO_RENDEZVOUS_ADDR')}:{env.get('HOROVOD_GLOO_RENDEZVOUS_PORT')}"
        through = "MPI" if uses_mpi else f"the rendezvous {where} on interface {os.environ['HOROVOD_GLOO_IFACE']}"
        raise PeerNeverCame(
            f"rank {env.get('HOROVOD_RANK')} of {env.get('HOROVOD_SIZE')} could not join the others through {through}: "
            f"{error}. Look at the logs of the other ranks, and check that trainer hosts reach each other on all ports."
        ) from error
    if uses_mpi and int(hvd.size()) != int(env["HOROVOD_SIZE"]):
        raise HeteroError(
            f"MPI knows {hvd.size()} ranks, mpirun started {env['HOROVOD_SIZE']}: this Horovod was built with another "
            "MPI. Build it with the mpicxx that belongs to mpirun (which -a mpirun mpicxx)."
        )
    return int(hvd.rank()), int(hvd.size()), int(hvd.local_rank())


def interface_to(address: str, port: int) -> str:
    """Return the network interface whose address this host would use to reach `address`.

    Raises:
        HeteroError: There is no route, or no interface has that address.
    """
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # a datagram socket only looks up the route: nothing is sent
            own = probe.getsockname()[0]
    except OSError as error:
        raise HeteroError(f"there is no route to the rendezvous at {address}: {error}") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return str(name)
    raise HeteroError(f"no network interface has the address {own}, by which this host reaches {address}")


def pin_accelerator(local_rank: int) -> str | None:
    """Let this process see one GPU only, the one of its local rank, and take its memory as needed.

    Args:
        local_rank: Rank within the host, from 0; ranks beyond the number of GPUs share them in turn.

    Returns:
        The device's name, or None on a host without GPUs.
    """
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return None
    own = devices[local_rank % len(devices)]
    tf.config.set_visible_devices(own, "GPU")
    tf.config.experimental.set_memory_growth(own, True)
    return str(own.name)


def distributed_tape(tape: Any, variables: Sequence[Any]) -> Any:
    """Return a gradient tape whose `gradient` averages over all ranks.

    Args:
        tape: A tf.GradientTape.
        variables: The `tf.Variable`s that gradients will be taken of. If they have one type, their gradients travel as
            one
            group: that is one conditional in the graph instead of one a variable, and saves seconds of tracing.
    """
    one_type = len({variable.dtype for variable in variables}) == 1
    return _horovod().DistributedGradientTape(tape, groups=1 if one_type else None)


def broadcast_variables(variables: Sequence[Any]) -> None:
    """Give the `tf.Variable`s of all ranks the values of rank 0."""
    hvd = _horovod()
    names = [f"hetero.variable.{number}" for number in range(len(variables))]  # Keras 3 gives two variables one name
    for variable, value in [(v, hvd.broadcast(v, 0, name=name)) for v, name in zip(variables, names, strict=True)]:
        variable.assign(value)


def allreduce_sum(values: Any, name: str) -> Any:
    """Return the sum over all ranks.

    Args:
        values: float64 array of one shape on all ranks.
        name: The same on all ranks, so that they agree on what they add.

    Returns:
        float64 array of that shape.
    """
    hvd = _horovod()
    import tensorflow as tf

    tensor = tf.constant(np.asarray(values, np.float64))
    return np.asarray(hvd.allreduce(tensor, op=hvd.Sum, name=f"hetero.{name}"))


def barrier() -> None:
    """Wait until every rank is here."""
    allreduce_sum(np.zeros(1), "barrier")


def shutdown() -> None:
    """Leave the other ranks; harmless when Horovod was not started."""
    hvd = _horovod()
    if hvd.is_initialized():
        hvd.shutdown()


def is_peer_failure(error: BaseException) -> bool:
    """Say whether an error only follows from another rank's end.

    Args:
        error: What a collective operation raised: Horovod's own error, or a TensorFlow error that carries its text.

    Returns:
        True if the cause is to be looked for in another rank. Ranks that disagree (shapes, types) are no peer failure.
    """
    return any(_is_peer_failure(link) for link in _chain(error))


def _is_peer_failure(error: BaseException) -> bool:
    text = str(error).lower()
    if "mismatched" in text:
        return False
    kind = type(error)
    if kind.__name__ == "HorovodInternalError" and kind.__module__.startswith("horovod."):
        return True
    if not kind.__module__.startswith("tensorflow."):
        return False
    return "horovod" in text and any(mark in text for mark in _PEER_GONE)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(16):
        if link is None:
            return
        yield link
        link = link.__cause__


def _has_gpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _total(slots: Slots) -> int:
    names = [host for host, _ in slots]
    if not slots or len(set(names)) != len(names) or any(ranks < 1 for _, ranks in slots):
        raise ValueError(f"slots are {list(slots)}; each trainer host must be named once and have at least one rank")
    return sum(ranks for _, ranks in slots)


def _horovod() -> Any:
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise _missing(error) from error
    return hvd


def _missing(error: ImportError) -> HeteroError:
    return HeteroError(
        f"Horovod cannot be used: {error}. A rank needs Horovod built against the installed TensorFlow: "
        "HOROVOD_WITH_TENSORFLOW=1 pip install --no-build-isolation horovod==0.28.1 (README, Your own TensorFlow)."
    )
