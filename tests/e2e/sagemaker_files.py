"""What SageMaker puts below a host's /opt/ml before it starts the container: configuration, channels, source code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_job import REPOSITORY

INSTANCE_TYPES = {"data": "ml.c5.xlarge", "trainer": "ml.c5.2xlarge"}
SUBMIT_DIRECTORY = "/opt/ml/input/source"


@dataclass(frozen=True)
class Channel:
    """An input channel.

    Attributes:
        files: Path below the channel's folder -> content; or a folder to copy.
        on: The hosts that have it: "all", "data" or "trainer". Others neither have the folder nor see its name.
        distribution: "FullyReplicated", or "ShardedByS3Key": each host has every n-th file.
        mode: "File" or "FastFile"; both show as "File" in inputdataconfig.json.
    """

    files: Mapping[str, bytes] | Path
    on: str = "all"
    distribution: str = "FullyReplicated"
    mode: str = "File"

    def contents(self) -> dict[str, bytes]:
        """Return every file and its content, sorted by path."""
        if isinstance(self.files, Path):
            paths = sorted(path for path in self.files.rglob("*") if path.is_file())
            return {str(path.relative_to(self.files)): path.read_bytes() for path in paths}
        return dict(sorted(self.files.items()))

    def as_listed(self) -> dict[str, str]:
        """Return its entry in inputdataconfig.json."""
        return {
            "ContentType": "application/octet-stream",
            "TrainingInputMode": "File",
            "S3DistributionType": self.distribution,
            "RecordWrapperType": "None",
        }


@dataclass(frozen=True)
class JobFiles:
    """The files of a training job.

    Attributes:
        roles: Host -> "data" or "trainer", in the order in which resourceconfig.json lists the hosts.
        groups: Role -> name of its instance group.
        hyperparameters: Name -> value before it is JSON-encoded.
        channels: Input channels by name.
        job: The job file; it comes to jobs/ in the source directory.
        sources: Further files of the source directory: path -> text.
    """

    roles: Mapping[str, str]
    groups: Mapping[str, str]
    hyperparameters: Mapping[str, Any]
    channels: Mapping[str, Channel]
    job: Path
    sources: Mapping[str, str]

    def write(self, base: Path, host: str) -> None:
        """Write all of a host's files below `base`, which is its /opt/ml."""
        for name in ("input/config", "input/data", "model", "output/data"):
            (base / name).mkdir(parents=True)
        self._write_sources(base / Path(SUBMIT_DIRECTORY).relative_to("/opt/ml"))
        channels = {name: channel for name, channel in self.channels.items() if host in self._having(channel)}
        for name, channel in channels.items():
            self._fill(base / "input" / "data" / name, channel, host)
        files = {
            "resourceconfig": self._resource_config(host),
            "hyperparameters": {name: json.dumps(value) for name, value in self.hyperparameters.items()},
            "inputdataconfig": {name: channel.as_listed() for name, channel in channels.items()},
        }
        for name, content in files.items():
            (base / "input" / "config" / f"{name}.json").write_text(json.dumps(content))

    def _write_sources(self, source: Path) -> None:
        (source / "jobs").mkdir(parents=True)  # a job called numbers.py beside launcher.py would hide Python's own
        shutil.copy(REPOSITORY / "launcher.py", source)
        shutil.copy(self.job, source / "jobs")
        for name, text in self.sources.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text)

    def _having(self, channel: Channel) -> list[str]:
        return [name for name, role in self.roles.items() if channel.on in ("all", role)]

    def _fill(self, folder: Path, channel: Channel, host: str) -> None:
        folder.mkdir(parents=True)
        having = self._having(channel)
        for index, (path, content) in enumerate(channel.contents().items()):
            if channel.distribution == "FullyReplicated" or having[index % len(having)] == host:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)

    def _resource_config(self, host: str) -> dict[str, Any]:
        roles = [role for role in ("data", "trainer") if role in self.roles.values()]
        groups = self.groups if len(roles) > 1 else dict.fromkeys(roles, "homogeneousCluster")
        return {
            "current_host": host,
            "current_instance_type": INSTANCE_TYPES[self.roles[host]],
            "current_group_name": groups[self.roles[host]],
            "hosts": list(self.roles),
            "instance_groups": [
                {
                    "instance_group_name": groups[role],
                    "instance_type": INSTANCE_TYPES[role],
                    "hosts": [name for name in self.roles if self.roles[name] == role],
                }
                for role in roles
            ],
            "network_interface_name": "eth0",
        }
