"""`hetero compose-config`: short cluster files to a compose file and what each container sees. Starts nothing."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hetero.clusters import compose_folder
from hetero.clusters.compose import ContainerCluster, compose_text, config_files, container_cluster
from hetero.clusters.compose_file import read_cluster_file
from hetero.errors import SettingsError
from hetero.topology import Role

_JSON_VERSION = 1
_PIPE_WIDTH = 120


def compose_config(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Cluster files; each becomes a profile.")],
    output: Annotated[Path, typer.Option(help="Folder for compose.yaml and config/.")],
    image: Annotated[str, typer.Option(help="Image of all containers.")] = "hetero",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a compose file, and for each container the files that a host finds on SageMaker."""
    clusters = _read(files)
    if not image or image.startswith("-") or any(not "!" <= character <= "~" for character in image):
        raise SettingsError([f"--image is {image!r}; it needs the name of an image, such as hetero:latest"])
    contents = {path: text for cluster in clusters for path, text in config_files(cluster).items()}
    compose_folder.write(output, compose_text(clusters, image, output), contents)
    for warning in _warnings(clusters):
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(as_values(clusters, output, image), indent=2))
        return
    console = Console() if Console().is_terminal or "COLUMNS" in os.environ else Console(width=_PIPE_WIDTH)
    for cluster in clusters:
        console.print(_table(cluster), highlight=False)
    written = output / compose_folder.COMPOSE_FILE
    typer.echo(f"{written}: docker compose -f {written} --profile {clusters[0].file.name} up --abort-on-container-exit")


def as_values(clusters: Sequence[ContainerCluster], output: Path, image: str) -> dict[str, object]:
    """Return what was written as JSON values; keys are only ever added while `version` stays the same."""
    return {
        "version": _JSON_VERSION,
        "compose_file": str(output / compose_folder.COMPOSE_FILE),
        "image": image,
        "clusters": [
            {
                "name": cluster.file.name,
                "file": str(cluster.file.path),
                "job": cluster.file.job,
                "engine": cluster.settled.engine,
                "ranks_per_host": cluster.file.ranks,
                "factor": cluster.factor,
                "hosts": [
                    {
                        "name": host.name,
                        "service": cluster.service(host),
                        "role": host.role.value,
                        "group": host.group,
                        "instance_type": host.instance_type,
                        "real_cpus": host.real_cpus,
                        "cpus": host.cpus,
                    }
                    for host in cluster.hosts
                ],
            }
            for cluster in clusters
        ],
    }


def _read(files: Sequence[Path]) -> list[ContainerCluster]:
    """Read all files; what is wrong in any of them is said together."""
    clusters: list[ContainerCluster] = []
    problems: list[str] = []
    for path in files:
        try:
            clusters.append(container_cluster(read_cluster_file(path)))
        except SettingsError as error:
            problems += error.problems
    for name, count in Counter(cluster.file.name for cluster in clusters).items():
        if count > 1:
            paths = [str(cluster.file.path) for cluster in clusters if cluster.file.name == name]
            problems.append(f"{' and '.join(paths)} are both named {name}; give them different names (key name)")
    if problems:
        raise SettingsError(problems)
    return clusters


def _warnings(clusters: Sequence[ContainerCluster]) -> list[str]:
    """Say which hosts Docker will refuse to start on a machine like this one."""
    here = os.cpu_count() or 1
    return [
        f"{cluster.file.path}: {host.name} gets {host.cpus:g} CPUs, and this machine has {here}: Docker refuses that. "
        f"Scale the cluster down, as with cpus: {here}"
        for cluster in clusters
        for host in cluster.hosts
        if host.cpus > here
    ]


def _table(cluster: ContainerCluster) -> Table:
    file = cluster.file
    scaled = "" if file.cpus is None else f", all hosts' CPUs x {cluster.factor:.4g}"
    table = Table(title=f"{file.name}: {file.job}, engine {cluster.settled.engine}{scaled}", title_justify="left")
    for column in ("service", "role", "group", "stands for", "ranks", "real CPUs", "CPUs"):
        table.add_column(column, justify="right" if column in ("ranks", "real CPUs", "CPUs") else "left")
    for host in cluster.hosts:
        ranks = str(file.ranks) if host.role is Role.TRAINER else ""
        kind = host.instance_type or ""
        figures = (f"{host.real_cpus:g}", f"{host.cpus:g}")
        table.add_row(cluster.service(host), host.role.value, host.group, kind, ranks, *figures)
    totals = (sum(host.real_cpus for host in cluster.hosts), sum(host.cpus for host in cluster.hosts))
    table.add_section()
    table.add_row("all", "", "", "", "", *(f"{total:.4g}" for total in totals))
    return table
