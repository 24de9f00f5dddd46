"""Where a topology comes from, and what each kind of cluster says about the places of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hetero.clusters import local, sagemaker
from hetero.errors import TopologyError
from hetero.settings import Settings
from hetero.topology import Topology

__all__ = ["complete", "detect", "failure_file", "from_file", "model_dir"]


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


def model_dir(settings: Settings, environ: Mapping[str, str], run_dir: Path) -> str:
    """Return where the model is to be written.

    On SageMaker that is SM_MODEL_DIR, else `model` in its base directory, whatever `--model-dir` says: SageMaker takes
    the model from there, and the `--model_dir s3://...` that its TensorFlow estimator adds is no place to write to.
    Elsewhere it is `--model-dir`, else `model` in the run directory.
    """
    if _on_sagemaker(environ):
        return str(sagemaker.model_dir(environ))
    return settings.model_dir or str(run_dir / "model")


def failure_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file whose text SageMaker shows as the reason of a failure; None elsewhere."""
    return sagemaker.failure_file(environ) if _on_sagemaker(environ) else None


def _on_sagemaker(environ: Mapping[str, str]) -> bool:
    """Return whether `detect` would choose SageMaker."""
    return not environ.get(local.CLUSTER_ENV) and sagemaker.is_sagemaker(environ)
