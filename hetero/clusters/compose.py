"""A cluster of containers: CPUs of its hosts, what each of them sees, and its part of the compose file. Pure.

The compose file names no version, so that docker-compose 1.29 and Compose v2 both take it for the Compose
specification, in which `cpus`, `init` and `profiles` stand side by side.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from hetero.clusters import LEAVE_AFTER_CHIEF_ENV, sagemaker
from hetero.clusters.compose_file import LEAST_CPUS, ClusterFile, Folder, HostGroup
from hetero.clusters.compose_options import Settled, hyperparameters, settled
from hetero.errors import SettingsError
from hetero.rundir import LAUNCHER, RunDir
from hetero.topology import Role

HEADER = "# Written by `hetero compose-config`; change the cluster files and run it again.\n"
SOURCE_DIR = "/opt/ml/source"
"""Where a container sees the cluster's source folder; without one it works in the image's own."""
_CODE_DIR = "/opt/ml/code"
_COMMAND = ("python", f"{_CODE_DIR}/launcher.py")
_STOP_MARGIN_S = 10
_CHECK_INTERVAL_S = 10
_LEAST_FRESH_S = 5
_DIGITS = 4


@dataclass(frozen=True)
class ContainerHost:
    """One host of the cluster.

    Args:
        name: algo-1 and so on, as on SageMaker; also its address.
        role: Whether it trains or prepares input.
        group: Name of its instance group.
        instance_type: What it stands for; None where the cluster file gives CPUs.
        real_cpus: CPUs before scaling.
        cpus: CPUs that its container may use.
    """

    name: str
    role: Role
    group: str
    instance_type: str | None
    real_cpus: float
    cpus: float


@dataclass(frozen=True)
class ContainerCluster:
    """A cluster of containers, ready to be written.

    Args:
        file: What it was made from.
        hosts: All hosts; the chief is the first.
        factor: What real CPUs were multiplied by.
        settled: Settings and engine that its launchers will settle on.
    """

    file: ClusterFile
    hosts: tuple[ContainerHost, ...]
    factor: float
    settled: Settled

    def service(self, host: ContainerHost) -> str:
        """Return the name of a host's service."""
        return f"{self.file.name}-{host.name}"


def container_cluster(file: ClusterFile) -> ContainerCluster:
    """Work out the hosts of a cluster and check its options.

    Raises:
        SettingsError: A host would get too few CPUs, or options are wrong; all of it is in the one message.
    """
    factor = scale(file)
    hosts: list[ContainerHost] = []
    for role, group in zip((Role.TRAINER, Role.DATA), file.groups, strict=False):
        for _ in range(group.hosts):
            name, cpus = f"algo-{len(hosts) + 1}", round(group.real_cpus * factor, _DIGITS)
            hosts.append(ContainerHost(name, role, group.group, group.instance_type, group.real_cpus, cpus))
    problems = _too_small(file, factor)
    try:
        result = settled(file, resource_config(hosts, hosts[0]))
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return ContainerCluster(file, tuple(hosts), factor, result)


def scale(file: ClusterFile) -> float:
    """Return the one factor by which the CPUs of all hosts come to `cpus` of the file; 1 where it says nothing."""
    return 1.0 if file.cpus is None else file.cpus / _real_cpus(file)


def _real_cpus(file: ClusterFile) -> float:
    return sum(group.hosts * group.real_cpus for group in file.groups)


def _too_small(file: ClusterFile, factor: float) -> list[str]:
    """Return a sentence on the smallest hosts if they cannot start."""
    smallest: HostGroup = min(file.groups, key=lambda group: group.real_cpus)
    cpus = smallest.real_cpus * factor
    if cpus >= LEAST_CPUS or file.cpus is None:
        return []
    least = math.ceil(1000 * LEAST_CPUS * _real_cpus(file) / smallest.real_cpus) / 1000
    what = (
        f"{smallest.instance_type or 'host'} of group {smallest.group} gets {cpus:.3g} CPU of the {file.cpus:g} of all"
    )
    advice = f"Give cpus: {least:g} or more, fewer hosts, or hosts that differ less"
    return [f"{file.path}: cpus: a {what}; a container needs {LEAST_CPUS:g} to start. {advice}"]


def resource_config(hosts: Sequence[ContainerHost], current: ContainerHost) -> dict[str, object]:
    """Return the content of a host's resourceconfig.json, as SageMaker writes it."""
    groups: dict[str, list[ContainerHost]] = {}
    for host in hosts:
        groups.setdefault(host.group, []).append(host)

    def kind(host: ContainerHost, key: str) -> dict[str, str]:
        return {} if host.instance_type is None else {key: host.instance_type}

    return {
        "current_host": current.name,
        **kind(current, "current_instance_type"),
        "current_group_name": current.group,
        "hosts": [host.name for host in hosts],
        "instance_groups": [
            {
                "instance_group_name": name,
                **kind(members[0], "instance_type"),
                "hosts": [host.name for host in members],
            }
            for name, members in groups.items()
        ],
        "network_interface_name": "eth0",
    }


def config_files(cluster: ContainerCluster) -> dict[str, str]:
    """Return the files below config/: path -> text."""
    channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    files: dict[str, str] = {}
    for host in cluster.hosts:
        contents = {
            "resourceconfig": resource_config(cluster.hosts, host),
            "hyperparameters": hyperparameters(cluster.file),
            "inputdataconfig": dict.fromkeys(cluster.file.channels, channel),
        }
        for name, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            files[f"{cluster.file.name}/{host.name}/{name}.json"] = text
    return files


def compose_text(clusters: Sequence[ContainerCluster], image: str, folder: Path) -> str:
    """Return the compose file.

    Args:
        clusters: Each becomes a profile of its name.
        image: The image of all hosts.
        folder: Where the file will lie; paths that are relative in a cluster file become relative to it.
    """
    services: dict[str, Any] = {}
    for cluster in clusters:
        services |= {cluster.service(host): _service(cluster, host, image, folder) for host in cluster.hosts}
    content = {
        "services": services,
        "networks": {cluster.file.name: {} for cluster in clusters},
        "volumes": {_volume(cluster, name): {} for cluster in clusters for name in ("output", "model")},
    }
    text = yaml.dump(_escaped(content), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"{HEADER}{text}"


def _service(cluster: ContainerCluster, host: ContainerHost, image: str, folder: Path) -> dict[str, Any]:
    file, settings = cluster.file, cluster.settled.settings
    environment = ["HETERO_TOKEN", f"{LEAVE_AFTER_CHIEF_ENV}=1"]  # the token: whatever it is where compose is started
    if file.source is not None:
        environment.append(f"PYTHONPATH={SOURCE_DIR}")
    return {
        "image": image,
        "pull_policy": "never",  # it is built here; a registry's image of this name is somebody else's
        "profiles": [file.name],
        "hostname": host.name,
        "labels": {"hetero.cluster": file.name, "hetero.role": host.role.value, "hetero.host": host.name},
        "command": list(_COMMAND),
        "working_dir": _CODE_DIR if file.source is None else SOURCE_DIR,
        "environment": environment,
        "cpus": host.cpus,
        "networks": {file.name: {"aliases": [host.name]}},
        "volumes": _mounts(cluster, host, folder),
        "healthcheck": _health_check(cluster, host),
        "init": False,  # the launcher is process 1 and reaps what it starts
        "restart": "no",
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{math.ceil(settings.grace_s + settings.lease_s) + _STOP_MARGIN_S}s",
    }


def _mounts(cluster: ContainerCluster, host: ContainerHost, folder: Path) -> list[dict[str, Any]]:
    file, base = cluster.file, str(sagemaker.base_dir({}))
    mounts = [_bind(f"./config/{file.name}/{host.name}", f"{base}/input/config")]
    if file.source is not None:
        mounts.append(_bind(_seen_from(folder, file.source), SOURCE_DIR))
    channels = file.channels.items()
    mounts += [_bind(_seen_from(folder, channel), f"{base}/input/data/{name}") for name, channel in channels]
    if host == cluster.hosts[0]:  # the chief's, for after the end
        for name in ("output", "model"):
            mounts.append({"type": "volume", "source": _volume(cluster, name), "target": f"{base}/{name}"})
    return mounts


def _bind(source: str, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target, "read_only": True}


def _volume(cluster: ContainerCluster, name: str) -> str:
    return f"{cluster.file.name}-{name}"


def _seen_from(folder: Path, named: Folder) -> str:
    """Return the path of a folder as the compose file has it."""
    if PurePosixPath(named.written).is_absolute():
        return named.written
    relative = os.path.relpath(named.path, folder.resolve())
    return str(relative) if relative.startswith(".") else f"./{relative}"


def _health_check(cluster: ContainerCluster, host: ContainerHost) -> dict[str, Any]:
    """Return a check that costs a few milliseconds: whether the coordinator has answered this host within a lease."""
    settings = cluster.settled.settings
    pulse = RunDir(sagemaker.default_run_dir({})).pulse(host.name, LAUNCHER)
    fresh_s = max(_LEAST_FRESH_S, math.ceil(settings.lease_s))
    return {
        "test": ["CMD-SHELL", f"[ -n \"$(find {pulse} -newermt '-{fresh_s} seconds' 2>/dev/null)\" ]"],
        "interval": f"{_CHECK_INTERVAL_S}s",
        "timeout": f"{_CHECK_INTERVAL_S}s",
        "retries": 3,
        "start_period": f"{math.ceil(settings.start_timeout_s)}s",
    }


def _escaped(value: Any) -> Any:
    """Return a value in which compose finds nothing to interpolate."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes every value out, also one that is there twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that no value is ever an alias of another."""
        del data
        return True
