"""A SageMaker training job: topology and places, from the files below its base directory (/opt/ml).

Why the files are read here and not through `sagemaker_training.environment`: importing it takes 0.5 s on a fast machine
(boto3) and creates directories, and its `Environment()` starts nvidia-smi, neuron-ls and `which`, all before a launcher
starts its first child; and a broken file comes out of it as a KeyError without the file's name. So the launcher reads
the same files under the toolkit's rules (base directory, keys, "heterogeneous" = more than one group), and
`toolkit_differences` asks the toolkit for its own reading; a contract test keeps the two alike. This module is the only
one that imports the toolkit.

The current host is read from resourceconfig.json: under multi-host MPI every rank sees the master's SM_CURRENT_HOST.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hetero.channels import SHARDED
from hetero.errors import TopologyError
from hetero.topology import Group, Topology, build_topology

BASE_DIR_ENV = "SAGEMAKER_BASE_DIR"
_BASE_DIR = "/opt/ml"
MPI_DONE = "/tmp/done"  # noqa: S108  as sagemaker_training.mpi.MPI_FINISHED_STATUS_FILE
_ONE_GROUP = "homogeneousCluster"  # what SageMaker calls the group of a job without groups


def base_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory that SageMaker mounts everything below."""
    return Path(environ.get(BASE_DIR_ENV) or _BASE_DIR)


def resource_config_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file that describes the cluster."""
    return base_dir(environ) / "input" / "config" / "resourceconfig.json"


def hyperparameters_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file that has the job's hyperparameters, each value a JSON text."""
    return base_dir(environ) / "input" / "config" / "hyperparameters.json"


def is_sagemaker(environ: Mapping[str, str]) -> bool:
    """Return whether this is a host of a SageMaker training job."""
    return resource_config_file(environ).exists()


def topology(environ: Mapping[str, str], data_group: str, trainer_group: str) -> Topology:
    """Read the job's topology.

    Args:
        environ: The host's environment; only the base directory is taken from it.
        data_group: Name of the instance group that prepares input.
        trainer_group: Name of the instance group that trains.

    Returns:
        The topology, seen from the host that resourceconfig.json names.

    Raises:
        TopologyError: The file is missing, broken, or does not describe one or two groups of hosts.
    """
    path = resource_config_file(environ)
    return parse(read_json_object(path), str(path), data_group, trainer_group)


def parse(
    config: Mapping[str, object], source: str, data_group: str, trainer_group: str, *, any_host: bool = False
) -> Topology:
    """Return the topology in the content of a resourceconfig.json.

    Args:
        config: The file's content.
        source: The file's path, for messages.
        data_group: Name of the instance group that prepares input.
        trainer_group: Name of the instance group that trains.
        any_host: Whether the file may leave the current host out, as when somebody looks at it from elsewhere.

    Returns:
        The topology.

    Raises:
        TopologyError: As `topology`.
    """
    hosts = _names(config.get("hosts"), "hosts", source) if config.get("hosts") is not None else ()
    instance_type = _text(config, "current_instance_type", source)
    groups = _groups(config, hosts, instance_type, source)
    grouped = {host for group in groups for host in group.hosts}
    left_out = [host for host in hosts if host not in grouped]
    if left_out:
        raise TopologyError(
            f"{source} lists host {left_out[0]!r} under hosts but in none of its instance_groups; "
            f"every host needs a group to have a role."
        )
    current = _text(config, "current_host", source)
    if not current and any_host and grouped:
        current = next(iter(groups[0].hosts), None)
    return build_topology(
        groups,
        current,
        data_group,
        trainer_group,
        _text(config, "network_interface_name", source),
        source,
        container=True,
    )


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """Return where a run's files go: SageMaker uploads everything below output/data."""
    return base_dir(environ) / "output" / "data" / "hetero"


def checkpoint_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder that SageMaker copies to S3 while the job runs, and back where an interrupted job restarts."""
    return base_dir(environ) / "checkpoints"


def model_dir(environ: Mapping[str, str]) -> Path:
    """Return where SageMaker takes the model from."""
    return Path(environ.get("SM_MODEL_DIR") or base_dir(environ) / "model")


def failure_file(environ: Mapping[str, str]) -> Path:
    """Return the file whose first 1,024 characters become the job's FailureReason."""
    return base_dir(environ) / "output" / "failure"


def mpi_done_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that the toolkit's MPI runner waits for on a host where mpirun itself does not run; else None.

    Such a host's runner has nothing to do once its processes have ended, but waits for this file, which mpirun's host
    writes by ssh, and only after success. Without it the runner looks for it for two minutes before it goes on.

    Raises:
        TopologyError: resourceconfig.json is broken.
    """
    path = resource_config_file(environ)
    config = read_json_object(path)
    current, hosts = config.get("current_host"), config.get("hosts")
    groups = _groups(config, _names(hosts, "hosts", str(path)) if hosts is not None else (), None, str(path))
    masters = [group.hosts[0] for group in groups if current in group.hosts]  # the first that is listed runs mpirun
    return Path(f"{MPI_DONE}.{masters[0]}") if masters and masters[0] != current else None


def channels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the directory of each input channel.

    Names come from inputdataconfig.json, which has them as the user wrote them; SM_CHANNEL_<NAME> gives the directory
    where it is set, and adds channels (in lower case) that the file does not have. In Pipe mode the directory may not
    exist.

    Raises:
        TopologyError: inputdataconfig.json is broken.
    """
    names = list(_input_data_config(environ))
    prefix = "SM_CHANNEL_"
    said = {key[len(prefix) :]: value for key, value in environ.items() if key.startswith(prefix) and value}
    found = {name: said.pop(name.upper(), str(base_dir(environ) / "input" / "data" / name)) for name in names}
    return found | {name.lower(): value for name, value in sorted(said.items())}


def sharded_channels(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the channels whose files are spread over the hosts (S3DistributionType is ShardedByS3Key).

    A channel that does not say it, or says anything else, is taken to be whole on each host. Whether the file lists
    channels of other instance groups is not documented: such a one may have no folder here.

    Raises:
        TopologyError: inputdataconfig.json is broken.
    """
    return _channels_with(environ, "S3DistributionType", SHARDED)


def piped_channels(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the channels in Pipe mode (TrainingInputMode; FastFile shows as File there).

    Raises:
        TopologyError: inputdataconfig.json is broken.
    """
    return _channels_with(environ, "TrainingInputMode", "Pipe")


def _channels_with(environ: Mapping[str, str], key: str, value: str) -> tuple[str, ...]:
    entries = _input_data_config(environ).items()
    return tuple(name for name, entry in entries if isinstance(entry, dict) and entry.get(key) == value)


def _input_data_config(environ: Mapping[str, str]) -> dict[str, object]:
    path = base_dir(environ) / "input" / "config" / "inputdataconfig.json"
    return read_json_object(path) if path.exists() else {}


def toolkit_differences(topology: Topology, environ: Mapping[str, str]) -> list[str]:
    """Compare a topology with what SageMaker's own toolkit reads from the same files.

    The toolkit takes its base directory from the process's environment when it is first imported, so this belongs into
    a process whose environment is `environ`.

    Args:
        topology: What `topology` returned.
        environ: The environment it was read under.

    Returns:
        One sentence for each fact on which they disagree.

    Raises:
        TopologyError: The toolkit was imported under another base directory, or cannot read the files.
    """
    from sagemaker_training import environment as toolkit

    if Path(toolkit.base_dir) != base_dir(environ):
        raise TopologyError(
            f"sagemaker_training was imported with base directory {toolkit.base_dir}, not {base_dir(environ)}; "
            f"set {BASE_DIR_ENV} before it is imported."
        )
    try:
        theirs = toolkit.Environment()
    except (KeyError, ValueError, OSError, TypeError) as error:
        raise TopologyError(f"sagemaker_training cannot read {base_dir(environ)}: {error!r}.") from error
    groups = theirs.instance_groups_dict or {_ONE_GROUP: {"hosts": theirs.hosts}}
    group = topology.current.group
    pairs = {
        "the current host": (topology.current.name, theirs.current_host),
        "the current group": (group, theirs.current_instance_group),
        "the current group's hosts": (
            {host.name for host in topology.hosts if host.group == group},
            set(theirs.current_instance_group_hosts or theirs.hosts),
        ),
        "the groups": ({host.group for host in topology.hosts}, set(groups)),
        "heterogeneous": (not topology.homogeneous, theirs.is_hetero),
        "all hosts": ({host.name for host in topology.hosts}, set(theirs.hosts)),
        "the network interface": (topology.interface or "eth0", theirs.network_interface_name),
        "the channels": (channels(environ), dict(theirs.channel_input_dirs)),
        "the model directory": (str(model_dir(environ)), theirs.model_dir),
        "the output directory": (str(default_run_dir(environ).parent), theirs.output_data_dir),
    }
    return [f"{what}: {mine!r} here, {other!r} there" for what, (mine, other) in pairs.items() if mine != other]


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON file that holds one object.

    Raises:
        TopologyError: It cannot be read, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"Cannot read {path}: {error.strerror or error}. Check the path and its rights.") from error
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"{path} is not JSON: {error}. It needs one JSON object.") from error
    if not isinstance(value, dict):
        raise TopologyError(f"{path} holds {_shown(value)}; it needs one JSON object.")
    return value


def _groups(
    config: Mapping[str, object], hosts: tuple[str, ...], instance_type: str | None, source: str
) -> tuple[Group, ...]:
    """Return the instance groups; older jobs have none and are one group of all hosts."""
    entries = config.get("instance_groups")
    if entries is None or entries == []:
        if not hosts:
            raise TopologyError(f"{source} has neither instance_groups nor hosts; it needs at least one host.")
        return (Group(_ONE_GROUP, instance_type, hosts),)
    if not isinstance(entries, list):
        raise TopologyError(f"{source}: instance_groups is {_shown(entries)}; it needs a list of groups.")
    groups = []
    for index, entry in enumerate(entries):
        where = f"instance_groups[{index}]"
        if not isinstance(entry, dict):
            raise TopologyError(f"{source}: {where} is {_shown(entry)}; it needs an object with a name and hosts.")
        name = _text(entry, "instance_group_name", source, where)
        if not name:
            raise TopologyError(f"{source}: {where} has no instance_group_name; every group needs a name.")
        members = _names(entry.get("hosts"), f"hosts of group {name!r}", source)
        groups.append(Group(name, _text(entry, "instance_type", source, where), members))
    return tuple(groups)


def _names(value: object, what: str, source: str) -> tuple[str, ...]:
    """Return a list of host names."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise TopologyError(f'{source}: {what} is {_shown(value)}; it needs a list of host names such as ["algo-1"].')
    return tuple(value)


def _text(config: Mapping[str, object], key: str, source: str, where: str = "") -> str | None:
    """Return a text that may be absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise TopologyError(f"{source}: {where}{'.' if where else ''}{key} is {_shown(value)}; it needs a text.")
    return value or None


def _shown(value: object) -> str:
    """Return a JSON value as it would stand in the file, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
