"""Which hosts a job has, what each is for, and which one this is. Pure: `hetero.clusters` brings the facts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hetero.errors import TopologyError


class Role(str, Enum):
    """What a host does: prepare input, or train."""

    DATA = "data"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Group:
    """Hosts of one instance type under one name, as the cluster's description has them.

    Args:
        name: Name of the instance group.
        instance_type: For example `ml.c5.18xlarge`; None where the description does not say.
        hosts: Host names, in any order.
    """

    name: str
    instance_type: str | None
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Host:
    """One machine of the job.

    Args:
        name: Unique in the job.
        role: What it does.
        group: Name of its instance group.
        address: What its peers connect to: a host name or an IP address, without a port.
        instance_type: None where unknown.
        cpus: CPUs to pin its processes to; None leaves them free.
    """

    name: str
    role: Role
    group: str
    address: str
    instance_type: str | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Topology:
    """All hosts of a job, seen from one of them.

    Args:
        current: The host this is.
        data: Data hosts in natural order; empty in a homogeneous job.
        trainers: Trainer hosts in natural order, at least one.
        interface: Network interface that peers are reached over; None lets the system choose.
        source: Where this was read, for messages.
        container: Each host is a machine or container with a network of its own.
        control_port: Port that the cluster's description fixes for the coordinator; None leaves it to the settings.
        data_port: First data port where the settings name none; None: the usual one.
        mark: What tells this cluster from another of the same hosts, where its description has something.
    """

    current: Host
    data: tuple[Host, ...]
    trainers: tuple[Host, ...]
    interface: str | None
    source: str
    container: bool = False
    control_port: int | None = None
    data_port: int | None = None
    mark: str = ""

    @property
    def homogeneous(self) -> bool:
        """Whether every host trains and none is set apart for data."""
        return not self.data

    @property
    def chief(self) -> Host:
        """The first trainer host. It holds rank 0 and the rendezvous, unless mpirun starts the ranks."""
        return self.trainers[0]

    @property
    def coordinator_host(self) -> Host:
        """The host that the coordinator runs on: the first data host, else the chief."""
        return self.data[0] if self.data else self.chief

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Data hosts first, then trainers, each in natural order."""
        return self.data + self.trainers

    @property
    def cluster_id(self) -> str:
        """What the hosts of this cluster know themselves by: the same on all of them, another in another cluster."""
        named = [(host.name, host.role.value, host.address) for host in self.hosts]
        return hashlib.blake2b(json.dumps([named, self.mark]).encode(), digest_size=8).hexdigest()

    def host(self, name: str) -> Host:
        """Return the host called `name`.

        Raises:
            TopologyError: No host has this name.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise TopologyError(f"{self.source} has no host {name!r}; it has {known}. Give one of these.")

    def seen_from(self, name: str) -> Topology:
        """Return the same cluster as the host called `name` sees it.

        Raises:
            TopologyError: No host has this name.
        """
        return replace(self, current=self.host(name))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which algo-2 comes before algo-10; names that differ never compare equal."""
    parts = re.split(r"([0-9]+)", name)
    key = [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)]
    return (*key, (2, 0, name))


def build_topology(  # noqa: PLR0917 - the six facts of a cluster, in the order of its description
    groups: Sequence[Group],
    current_host: str | None,
    data_group: str,
    trainer_group: str,
    interface: str | None,
    source: str,
    *,
    container: bool = False,
    control_port: int | None = None,
    data_port: int | None = None,
    mark: str = "",
    addresses: Mapping[str, str] | None = None,
    cpus: Mapping[str, tuple[int, ...]] | None = None,
) -> Topology:
    """Give every host its role by the name of its group.

    One group is a homogeneous job: all its hosts train, whatever the group is called.

    Args:
        groups: The groups as described, in any order.
        current_host: Name of the host this is.
        data_group: Name of the group that prepares input.
        trainer_group: Name of the group that trains.
        interface: Network interface, None if not known.
        source: Where the groups were read, for messages.
        container: See `Topology`.
        control_port: See `Topology`.
        data_port: See `Topology`.
        mark: See `Topology`.
        addresses: Address of a host where it is not its name.
        cpus: CPUs that a host is pinned to.

    Returns:
        The topology, hosts in natural order whatever order the description had.

    Raises:
        TopologyError: The groups do not describe a job; the message has the source, the value and the next step.
    """
    _check_groups(groups, source)
    roles = _roles(groups, data_group, trainer_group, source)
    members: dict[Role, list[Host]] = {Role.DATA: [], Role.TRAINER: []}
    for group in groups:
        role = roles[group.name]
        for name in sorted(group.hosts, key=natural_key):
            address = (addresses or {}).get(name, name)
            members[role].append(Host(name, role, group.name, address, group.instance_type, (cpus or {}).get(name)))
    by_name = {host.name: host for hosts in members.values() for host in hosts}
    if not current_host:
        raise TopologyError(
            f"{source} does not say which host this is (current host: {current_host!r}). "
            f"It needs one of {', '.join(sorted(by_name, key=natural_key))}."
        )
    if current_host not in by_name:
        raise TopologyError(
            f"{source} says that this is host {current_host!r}, which is in none of its groups: {_listing(groups)}. "
            f"Put it into one group, or correct the current host."
        )
    return Topology(
        current=by_name[current_host],
        data=tuple(members[Role.DATA]),
        trainers=tuple(members[Role.TRAINER]),
        interface=interface,
        source=source,
        container=container,
        control_port=control_port,
        data_port=data_port,
        mark=mark,
    )


def _check_groups(groups: Sequence[Group], source: str) -> None:
    """Raise TopologyError unless one or two well-formed groups share out the hosts."""
    if not groups:
        raise TopologyError(f"{source} has no instance group and no hosts; it needs at least one host that trains.")
    twice = [name for name, count in Counter(group.name for group in groups).items() if count > 1]
    if twice:
        raise TopologyError(f"{source} has more than one group called {twice[0]!r}; every group needs its own name.")
    if len(groups) > 2:
        raise TopologyError(
            f"{source} has {len(groups)} instance groups: {_listing(groups)}. A job has at most two, one for data "
            f"and one that trains; start it again with its hosts in two groups."
        )
    owner: dict[str, str] = {}
    for group in groups:
        if not group.hosts:
            raise TopologyError(
                f"{source}: group {group.name!r} has no hosts; it needs at least one. "
                f"Give it an instance count of 1 or more, or leave the group out."
            )
        for host in group.hosts:
            if host in owner:
                where = f"groups {owner[host]!r} and {group.name!r}" if owner[host] != group.name else group.name
                raise TopologyError(f"{source} lists host {host!r} twice, in {where}; every host is in one group once.")
            owner[host] = group.name


def _roles(groups: Sequence[Group], data_group: str, trainer_group: str, source: str) -> dict[str, Role]:
    """Return the role of each group by its name."""
    if len(groups) == 1:
        return {groups[0].name: Role.TRAINER}
    wanted = {"--data-group": data_group, "--trainer-group": trainer_group}
    if data_group == trainer_group:
        raise TopologyError(
            f"--data-group and --trainer-group are both {data_group!r}; {source} has {_listing(groups)}. "
            f"Give two different names."
        )
    names = [group.name for group in groups]
    missing = {flag: name for flag, name in wanted.items() if name not in names}
    if missing:
        absent = " and ".join(f"no group {name!r} ({flag})" for flag, name in missing.items())
        raise TopologyError(f"{source} has {absent}; it has {_listing(groups)}. {_next_step(groups, wanted, missing)}")
    return {data_group: Role.DATA, trainer_group: Role.TRAINER}


def _next_step(groups: Sequence[Group], wanted: Mapping[str, str], missing: Mapping[str, str]) -> str:
    """Say which group flags to give, as far as names and instance types tell."""
    if len(missing) == 1:
        (flag,) = missing
        free = [group.name for group in groups if group.name not in wanted.values()]
        return f"Give {flag} {free[0]}."
    accelerated = [group for group in groups if _has_accelerator(group.instance_type)]
    if len(accelerated) == 1:
        data = next(group for group in groups if group is not accelerated[0])
        return f"Give --data-group {data.name} --trainer-group {accelerated[0].name}, going by the instance types."
    return f"Give --data-group and --trainer-group, one of {groups[0].name} and {groups[1].name} each."


def _has_accelerator(instance_type: str | None) -> bool:
    """Return whether an instance type's family is one with GPUs or training chips (p, g, trn), as its name says."""
    return bool(instance_type and re.match(r"ml\.(p\d|g\d|trn\d)", instance_type))


def _listing(groups: Sequence[Group]) -> str:
    """Return the groups with type and hosts, for a message."""

    def one(group: Group) -> str:
        hosts = sorted(group.hosts, key=natural_key)
        shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        return f"{group.name} ({group.instance_type or 'type unknown'}: {shown or 'no hosts'})"

    return "; ".join(one(group) for group in groups)
