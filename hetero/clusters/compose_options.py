"""The options of a cluster file, checked on the machine of its author as every launcher will check them."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import hetero
from hetero.clusters import sagemaker
from hetero.clusters.compose_file import ClusterFile
from hetero.clusters.hyperparameters import as_flags, is_toolkits_own
from hetero.errors import HeteroError, SettingsError
from hetero.job_file import read_declaration, settle
from hetero.options import likely_misspelt
from hetero.settings import Settings, resolve_engine

_DECIDED = {
    "job": "the key job says it",
    "channel": "the key channels has them",
    "ranks_per_host": "write it as trainer.ranks",
    "data_group": "write it as data.group",
    "trainer_group": "write it as trainer.group",
    "run_dir": f"a container leaves its run in {sagemaker.default_run_dir({})}",
    "model_dir": f"a container leaves its model in {sagemaker.model_dir({})}",
    "token": "set HETERO_TOKEN where compose is started: a file is no place for a secret",
}


@dataclass(frozen=True)
class Settled:
    """What the launchers of a cluster will settle on.

    Args:
        settings: Of the run.
        engine: How input reaches the ranks.
    """

    settings: Settings
    engine: str


def hyperparameters(cluster: ClusterFile) -> dict[str, str]:
    """Return the content of hyperparameters.json: each value as a JSON text, as SageMaker has them."""
    chosen = {name: value for name, value in cluster.options.items() if name.replace("-", "_") not in _DECIDED}
    values = {"job": cluster.job, **chosen, "ranks-per-host": cluster.ranks}
    if cluster.data is not None:
        values |= {"data-group": cluster.data.group, "trainer-group": cluster.trainer.group}
    return {name: json.dumps(value) for name, value in values.items()}


def settled(cluster: ClusterFile, resources: Mapping[str, object]) -> Settled:
    """Settle the options as a launcher does.

    Args:
        cluster: The cluster.
        resources: The content of a host's resourceconfig.json.

    Raises:
        SettingsError: Something is wrong; all of it is in the one message.
    """
    problems = [f"options: {problem}" for problem in _not_for_options(cluster)]
    result = None
    try:
        source = _source_folder(cluster)
        with _importable_from(source):
            declaration, settings = settle(_argv(cluster, source, problems), {})
        topology = sagemaker.parse(resources, str(cluster.path), settings.data_group, settings.trainer_group)
        result = Settled(settings, resolve_engine(settings, topology, declaration.engine))
    except SettingsError as error:
        problems += error.problems
    except HeteroError as error:
        problems.append(str(error))
    if problems or result is None:
        raise SettingsError([f"{cluster.path}: {problem}" for problem in problems])
    return result


def _argv(cluster: ClusterFile, source: Path, problems: list[str]) -> list[str]:
    """Return a launcher's command line, with the job where it is on this machine; note what looks misspelt."""
    where, _, name = cluster.job.rpartition(":")
    job = f"{source / where}:{name}" if where.endswith(".py") or "/" in where else cluster.job
    with contextlib.suppress(HeteroError):  # `settle` says what is wrong with the job
        defaults = {plain.replace("-", "_") for plain in read_declaration(job).defaults}
        given = [name.replace("-", "_") for name in cluster.options]
        misspelt = likely_misspelt([name for name in given if name not in defaults and name not in _DECIDED])
        advice = "If it is the job's own, give it a default in hetero.Job(...)"
        problems += [f"options: {text} {advice}" for text in misspelt]
    return as_flags({**hyperparameters(cluster), "job": json.dumps(job)})


def _not_for_options(cluster: ClusterFile) -> Iterator[str]:
    for name in cluster.options:
        if (why := _DECIDED.get(name.replace("-", "_"))) is not None:
            yield f"{name} is not for this place; {why}"
        elif is_toolkits_own(name):
            yield f"{name} is a name of SageMaker's toolkit and would not reach the job; take another"


def _source_folder(cluster: ClusterFile) -> Path:
    """Return where the job lies on this machine: the source folder, else the checkout that this package is part of."""
    if cluster.source is not None:
        return cluster.source.path
    checkout = Path(hetero.__file__).resolve().parents[1]
    if not (checkout / "launcher.py").is_file():
        needs = "the key source is missing; it needs the folder with the job's file, as this hetero is no checkout"
        raise SettingsError([needs])
    return checkout


@contextlib.contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Have modules of a folder found, as they are on a host whose PYTHONPATH names it; nothing is imported."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
