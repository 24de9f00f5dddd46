"""A cluster of virtual hosts on one machine, described by one file.

`HETERO_CLUSTER` names the file, `HETERO_HOST` the virtual host that a launcher is. The file has the groups as a real
cluster's description has them, and what virtual hosts need beside: addresses, CPUs, the port of the coordinator, and a
mark that tells it from another cluster on the same machine.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.clusters.sagemaker import read_json_object
from hetero.errors import SettingsError, TopologyError
from hetero.topology import Group, Topology, build_topology

CLUSTER_ENV = "HETERO_CLUSTER"
HOST_ENV = "HETERO_HOST"
LOOPBACK = "127.0.0.1"
_KIND = "hetero-local-cluster"
_MOST_CPUS = 4096
# Below the range that Linux takes the ports of outgoing connections from (32768 on), so that none is taken by chance.
_PORTS = range(16_000, 20_000)
_DATA_PORTS = range(20_000, 31_000)
_MOST_DATA_PORTS = 1_000  # that a cluster on one machine is expected to use


@dataclass(frozen=True)
class LocalCluster:
    """The file of a local cluster.

    Args:
        path: Where it lies.
        data_hosts: Names of its data hosts.
        trainer_hosts: Names of its trainer hosts.
        control_port: Port of the coordinator.
        data_port: First data port, unless the settings name one.
    """

    path: Path
    data_hosts: tuple[str, ...]
    trainer_hosts: tuple[str, ...]
    control_port: int
    data_port: int

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        data_hosts: int,
        trainer_hosts: int,
        data_cpus: tuple[int, ...] | None = None,
        trainer_cpus: tuple[int, ...] | None = None,
        control_port: int | None = None,
        data_group: str = "data_group",
        trainer_group: str = "dnn_group",
    ) -> LocalCluster:
        """Write the file: aside first, then renamed, so that a launcher never reads half of it.

        Args:
            path: Where to write it; its folder is made.
            data_hosts: Number of data hosts, named data-1 and so on; 0 is a homogeneous job.
            trainer_hosts: Number of trainer hosts, named trainer-1 and so on.
            data_cpus: CPUs that all data hosts share; None leaves them free.
            trainer_cpus: CPUs that all trainer hosts share; None leaves them free.
            control_port: Port of the coordinator; None chooses a free one.
            data_group: Name of the data hosts' group.
            trainer_group: Name of the trainer hosts' group.

        Returns:
            The cluster.

        Raises:
            SettingsError: A number is out of bounds.
        """
        problems = []
        for name, number, least in (("--data-hosts", data_hosts, 0), ("--trainer-hosts", trainer_hosts, 1)):
            if not least <= number <= 1000:
                problems.append(f"{name} is {number}; it needs a whole number from {least} to 1000.")
        if problems:
            raise SettingsError(problems)
        port = free_port() if control_port is None else control_port
        path = path.absolute()
        cluster = cls(
            path=path,
            data_hosts=tuple(f"data-{n}" for n in range(1, data_hosts + 1)),
            trainer_hosts=tuple(f"trainer-{n}" for n in range(1, trainer_hosts + 1)),
            control_port=port,
            data_port=_free_data_port(port),
        )
        groups = [
            _group_entry(data_group, cluster.data_hosts, data_cpus),
            _group_entry(trainer_group, cluster.trainer_hosts, trainer_cpus),
        ]
        content = {
            "kind": _KIND,
            "control_port": port,
            "data_port": cluster.data_port,
            "mark": uuid.uuid4().hex,
            "network_interface_name": "lo",
            "instance_groups": [group for group in groups if group["hosts"]],
        }
        try:
            _write_atomically(path, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            problem = f"cannot write {path}: {error.strerror or error}. Give a --run-dir where there is room"
            raise SettingsError([problem]) from error
        return cluster

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, data hosts first."""
        return self.data_hosts + self.trainer_hosts

    def environ(self, host: str) -> dict[str, str]:
        """Return the environment variables that make a launcher this virtual host."""
        return {CLUSTER_ENV: str(self.path), HOST_ENV: host}


def topology(environ: Mapping[str, str], data_group: str, trainer_group: str) -> Topology:
    """Read the topology of the local cluster that the environment names.

    Args:
        environ: The virtual host's environment.
        data_group: Name of the group that prepares input.
        trainer_group: Name of the group that trains.

    Returns:
        The topology, seen from the host in HETERO_HOST.

    Raises:
        TopologyError: The file is missing or broken, or HETERO_HOST names none of its hosts.
    """
    path = Path(environ[CLUSTER_ENV])
    cluster = parse(read_json_object(path), str(path), data_group, trainer_group, any_host=True)
    host = environ.get(HOST_ENV)
    if not host:
        known = ", ".join(host.name for host in cluster.hosts)
        raise TopologyError(f"{CLUSTER_ENV} is {path}, but {HOST_ENV} is not set; it needs one of {known}.")
    return cluster.seen_from(host)


def is_local_cluster(config: Mapping[str, object]) -> bool:
    """Return whether a file's content is that of a local cluster."""
    return config.get("kind") == _KIND


def parse(
    config: Mapping[str, object], source: str, data_group: str, trainer_group: str, *, any_host: bool = False
) -> Topology:
    """Return the topology in the content of a local cluster's file.

    Args:
        config: The file's content.
        source: The file's path, for messages.
        data_group: Name of the group that prepares input.
        trainer_group: Name of the group that trains.
        any_host: Whether a host may be taken as current that nobody named; the file itself never names one.

    Returns:
        The topology.

    Raises:
        TopologyError: The content is not that of a local cluster, or its groups cannot be used.
    """
    if not is_local_cluster(config):
        raise TopologyError(f"{source} has kind {config.get('kind')!r}; the file of a local cluster has {_KIND!r}.")
    port = _port(config, "control_port", source)
    data_port = _port(config, "data_port", source) if config.get("data_port") is not None else None
    interface = config.get("network_interface_name")
    if interface is not None and not isinstance(interface, str):
        raise TopologyError(f"{source}: network_interface_name is {interface!r}; it needs a text.")
    entries = config.get("instance_groups")
    if not isinstance(entries, list):
        raise TopologyError(f"{source}: instance_groups is {entries!r}; it needs a list of groups.")
    groups: list[Group] = []
    addresses: dict[str, str] = {}
    cpus: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("hosts"), list):
            raise TopologyError(f"{source}: group {entry!r} needs an object with instance_group_name and hosts.")
        name = entry.get("instance_group_name")
        if not isinstance(name, str) or not name:
            raise TopologyError(f"{source}: a group has instance_group_name {name!r}; it needs a name.")
        hosts = [_host_entry(host, source) for host in entry["hosts"]]
        groups.append(Group(name, "local", tuple(host for host, _, _ in hosts)))
        addresses |= {host: address for host, address, _ in hosts}
        cpus |= {host: pinned for host, _, pinned in hosts if pinned is not None}
    first = next((host for group in groups for host in group.hosts), None) if any_host else None
    built = build_topology(
        groups,
        first,
        data_group,
        trainer_group,
        interface or None,
        source,
        control_port=port,
        data_port=data_port,
        mark=str(config.get("mark", "")),
        addresses=addresses,
        cpus=cpus,
    )
    return built.seen_from(built.coordinator_host.name)


def parse_cpus(text: str, option: str = "--cpus") -> tuple[int, ...]:
    """Return the CPUs in a list such as `0,2-3`, sorted, each once.

    Args:
        text: Numbers and ranges, separated by commas.
        option: The option it came from, for the message.

    Returns:
        CPU numbers.

    Raises:
        SettingsError: It is not such a list.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= _MOST_CPUS:
            raise SettingsError([f"{option} is {text!r}; it needs CPU numbers and ranges such as 0,2-3."])
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def pin(cpus: tuple[int, ...] | None) -> str | None:
    """Keep this process and the children it starts from now on to some CPUs, where the system allows.

    Args:
        cpus: CPU numbers; None changes nothing.

    Returns:
        None if that is done, else the sentence that says why not.
    """
    if cpus is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        return f"Cannot pin to CPUs {list(cpus)}: this system has no CPU affinity; going on unpinned."
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        allowed = sorted(os.sched_getaffinity(0))
        return f"Cannot pin to CPUs {list(cpus)} ({error}); CPUs allowed here: {allowed}. Going on unpinned."
    return None


def free_port(address: str = LOOPBACK, ports: Sequence[int] = _PORTS) -> int:
    """Return a port on which nobody listens now, one of `ports`.

    Raises:
        TopologyError: None was found.
    """
    for port in random.sample(ports, min(200, len(ports))):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise TopologyError(f"No free port on {address} among 200 tried from {ports[0]} to {ports[-1]}; free some.")


def _free_data_port(control_port: int) -> int:
    """Return where the data ports of a cluster begin: somewhere else than those of other clusters of this machine.

    tf.data service knows no jobs: whoever asks at a worker's port is served, and the numbers by which elements are
    asked for are the same in every job. If all clusters began at one port, a cluster that has just lost a worker would
    take its elements from the worker that another one has started on the same port meanwhile.
    """
    return free_port(ports=[port for port in _DATA_PORTS if not port <= control_port < port + _MOST_DATA_PORTS])


def _port(config: Mapping[str, object], key: str, source: str) -> int:
    port = config.get(key)
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise TopologyError(f"{source}: {key} is {port!r}; it needs a port from 1 to 65535.")
    return port


def _group_entry(name: str, hosts: tuple[str, ...], cpus: tuple[int, ...] | None) -> dict[str, object]:
    """Return a group as it stands in the file."""
    pinned = {"cpus": list(cpus)} if cpus is not None else {}
    entries = [{"name": host, "address": LOOPBACK, **pinned} for host in hosts]
    return {"instance_group_name": name, "hosts": entries}


def _host_entry(entry: object, source: str) -> tuple[str, str, tuple[int, ...] | None]:
    """Return name, address and CPUs of a host in the file."""
    if isinstance(entry, dict):
        name, address, cpus = entry.get("name"), entry.get("address"), entry.get("cpus")
        numbers = cpus is None or (
            isinstance(cpus, list) and cpus and all(type(cpu) is int and cpu >= 0 for cpu in cpus)
        )
        if isinstance(name, str) and name and isinstance(address, str) and address and numbers:
            return name, address, tuple(cpus) if cpus is not None else None
    raise TopologyError(f"{source}: host {entry!r} needs a name, an address and, if pinned, cpus as a list of numbers.")


def _write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
