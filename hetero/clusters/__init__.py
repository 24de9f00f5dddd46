"""Where a topology comes from, and what each kind of cluster says about the places of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetero.clusters import local, sagemaker
from hetero.clusters.hyperparameters import as_flags, as_written
from hetero.errors import SettingsError, TopologyError
from hetero.settings import Settings
from hetero.topology import Topology

__all__ = [
    "LEAVE_AFTER_CHIEF_ENV",
    "arguments",
    "checkpoint_dir",
    "complete",
    "detect",
    "end_mpi_wait",
    "ends_with_parent",
    "failure_file",
    "from_file",
    "leaves_after_chief",
    "model_dir",
    "piped_channels",
    "sharded_channels",
]

LEAVE_AFTER_CHIEF_ENV = "HETERO_LEAVE_AFTER_CHIEF"
"""`1` in a cluster of containers that ends with the exit code of the container that ends first."""


def arguments(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a launcher's command line; on SageMaker with the hyperparameters as they were written.

    Without any arguments they are the hyperparameters: so it is in a container that runs the launcher itself.

    Raises:
        TopologyError: hyperparameters.json is broken.
    """
    path = sagemaker.hyperparameters_file(environ)
    if not _on_sagemaker(environ) or not path.exists():
        return list(argv)
    hyperparameters = sagemaker.read_json_object(path)
    return as_written(argv, hyperparameters) if argv else as_flags(hyperparameters)


def detect(environ: Mapping[str, str], settings: Settings) -> Topology:
    """Find out which cluster this host belongs to.

    A local cluster (`HETERO_CLUSTER`) is looked for first, then SageMaker's resourceconfig.json.

    Args:
        environ: The host's environment.
        settings: Settings; only the names of the groups are read.

    Returns:
        The topology, seen from this host.

    Raises:
        TopologyError: There is no description of a cluster, or it cannot be used.
    """
    if environ.get(local.CLUSTER_ENV):
        return local.topology(environ, settings.data_group, settings.trainer_group)
    if sagemaker.is_sagemaker(environ):
        return sagemaker.topology(environ, settings.data_group, settings.trainer_group)
    raise TopologyError(
        f"This host is in no cluster: {local.CLUSTER_ENV} is not set (a local cluster), and "
        f"{sagemaker.resource_config_file(environ)} does not exist (SageMaker; {sagemaker.BASE_DIR_ENV} moves it). "
        f"Start a local cluster with `hetero run --job ...`, or run this as the entry point of a SageMaker job."
    )


def from_file(path: Path, settings: Settings, host: str | None = None) -> Topology:
    """Read the topology of any cluster from its file, without being on one of its hosts.

    Args:
        path: A resourceconfig.json or the file of a local cluster.
        settings: Settings; only the names of the groups are read.
        host: The host to see it from; None takes the one that the file names, else the coordinator's.

    Returns:
        The topology.

    Raises:
        TopologyError: The file cannot be used, or has no such host.
    """
    value = sagemaker.read_json_object(path)
    read = local.parse if local.is_local_cluster(value) else sagemaker.parse
    topology = read(value, str(path), settings.data_group, settings.trainer_group, any_host=True)
    return topology.seen_from(host) if host is not None else topology


def complete(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Fill in what SageMaker settles: its channels, and the run directory where none was given.

    Args:
        settings: The settings as resolved.
        environ: The host's environment.

    Returns:
        On SageMaker, settings with `run_dir` set and its channels beside those given, which win; elsewhere the same.

    Raises:
        TopologyError: SageMaker's description of the channels is broken.
    """
    if not _on_sagemaker(environ):
        return settings
    run_dir = settings.run_dir or sagemaker.default_run_dir(environ)
    return replace(settings, run_dir=run_dir, channels={**sagemaker.channels(environ), **settings.channels})


def sharded_channels(settings: Settings, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the channels of which each host has other files; one given with --channel is not SageMaker's.

    Args:
        settings: As `complete` returned them.
        environ: The host's environment.

    Raises:
        TopologyError: SageMaker's description of the channels is broken.
    """
    return _sagemakers_own(sagemaker.sharded_channels, settings, environ)


def piped_channels(settings: Settings, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the channels that come as streams, without files; arguments and errors as of `sharded_channels`."""
    return _sagemakers_own(sagemaker.piped_channels, settings, environ)


def _sagemakers_own(
    names: Callable[[Mapping[str, str]], tuple[str, ...]], settings: Settings, environ: Mapping[str, str]
) -> tuple[str, ...]:
    if not _on_sagemaker(environ):
        return ()
    folders = sagemaker.channels(environ)
    return tuple(name for name in names(environ) if settings.channels.get(name) == folders[name])


def model_dir(settings: Settings, environ: Mapping[str, str], run_dir: Path) -> str:
    """Return where the model is to be written.

    On SageMaker that is SM_MODEL_DIR, else `model` in its base directory, whatever `--model-dir` says: SageMaker takes
    the model from there, and the `--model_dir s3://...` that its TensorFlow estimator adds is no place to write to.
    Elsewhere it is `--model-dir`, else `model` in the run directory.
    """
    if _on_sagemaker(environ):
        return str(sagemaker.model_dir(environ))
    return settings.model_dir or str(run_dir / "model")


def checkpoint_dir(settings: Settings, environ: Mapping[str, str], run_dir: Path) -> str:
    """Return the folder for checkpoints: `--checkpoint-dir`, else SageMaker's, else one in the run directory.

    Raises:
        SettingsError: It is an address and no folder.
    """
    given = settings.checkpoint_dir
    if given is not None and "://" in given:
        problem = (
            f"--checkpoint-dir is {given!r}; it needs a folder of this host. On SageMaker leave it out and give the "
            f"address to the estimator (checkpoint_s3_uri): SageMaker copies {sagemaker.checkpoint_dir(environ)} there"
        )
        raise SettingsError([problem])
    if given is None and _on_sagemaker(environ):
        return str(sagemaker.checkpoint_dir(environ))
    return str((Path(given) if given else run_dir / "checkpoints").absolute())


def ends_with_parent(environ: Mapping[str, str]) -> bool:
    """Return whether the process that started this launcher may end without a word and leave it behind.

    SageMaker's toolkit does not pass on the signal that stops a job; where it dies of it, its launcher is an orphan.
    """
    return _on_sagemaker(environ)


def leaves_after_chief(environ: Mapping[str, str]) -> bool:
    """Return whether the chief's launcher is to be the first one to end, so that its exit code is the cluster's."""
    return environ.get(LEAVE_AFTER_CHIEF_ENV) == "1"


def end_mpi_wait(environ: Mapping[str, str]) -> None:
    """Let a host of a failed MPI job go: SageMaker's runner waits for a word that comes only after success."""
    if _on_sagemaker(environ):
        with contextlib.suppress(OSError, TopologyError):
            path = sagemaker.mpi_done_file(environ)
            if path is not None:
                path.touch()


def failure_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file whose text SageMaker shows as the reason of a failure; None elsewhere."""
    return sagemaker.failure_file(environ) if _on_sagemaker(environ) else None


def _on_sagemaker(environ: Mapping[str, str]) -> bool:
    """Return whether `detect` would choose SageMaker."""
    return not environ.get(local.CLUSTER_ENV) and sagemaker.is_sagemaker(environ)
