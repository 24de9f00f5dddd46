"""The cluster file of `hetero compose-config`: a cluster of containers in a few lines, read and checked.

What is wrong is collected, so that all of it is said together: file, key, value, what is needed.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hetero.clusters.strict_yaml import read_mapping, shown
from hetero.cost import instances
from hetero.errors import SettingsError
from hetero.settings import Settings

MOST_HOSTS = 100
MOST_RANKS = 64
MOST_CPUS = 10_000.0
LEAST_CPUS = 0.05
"""Below this a container is throttled so much that Python alone takes minutes to start."""
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])")
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEYS = ("name", "job", "source", "options", "channels", "cpus", "trainer", "data")
_HOST_KEYS = ("hosts", "instance_type", "cpus", "group")


@dataclass(frozen=True)
class Folder:
    """A folder that the file names.

    Args:
        written: As it stands in the file.
        path: Where it is, whole.
    """

    written: str
    path: Path


@dataclass(frozen=True)
class HostGroup:
    """The hosts of one role.

    Args:
        hosts: How many, at least 1.
        group: Name of their instance group.
        instance_type: What each one stands for; None where the file gives CPUs.
        real_cpus: CPUs of each one before they are scaled: vCPUs of the type, or the figure in the file.
    """

    hosts: int
    group: str
    instance_type: str | None
    real_cpus: float


@dataclass(frozen=True)
class ClusterFile:
    """A cluster as its file describes it.

    Args:
        path: The file.
        name: Of the cluster and its profile.
        job: `path/to/job.py:name` or `package.module:name`, looked for in the source folder.
        source: Folder with the job; None for the examples that the image has.
        options: Options of the run and of the job.
        channels: Folder of each input channel.
        cpus: What all hosts together are scaled to; None leaves them as they are.
        trainer: The hosts that train.
        ranks: Training processes on each of them.
        data: The hosts that prepare input; None in a homogeneous job.
    """

    path: Path
    name: str
    job: str
    source: Folder | None
    options: Mapping[str, Any]
    channels: Mapping[str, Folder]
    cpus: float | None
    trainer: HostGroup
    ranks: int
    data: HostGroup | None

    @property
    def groups(self) -> tuple[HostGroup, ...]:
        """The instance groups, the one that trains first."""
        return (self.trainer,) if self.data is None else (self.trainer, self.data)


def read_cluster_file(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises:
        SettingsError: Something is wrong; all of it is in the one message.
    """
    values = read_mapping(path)
    check = _Check(path)
    check.unknown(values, _KEYS, "")
    trainer, data = check.hosts(values, "trainer"), check.hosts(values, "data")
    ranks = check.whole(_mapping(values.get("trainer")), "trainer.ranks", 1, MOST_RANKS, default=1)
    found = ClusterFile(
        path=path,
        name=check.name(values.get("name", path.stem), given="name" in values),
        job=check.job(values.get("job"), has_source=values.get("source") is not None),
        source=check.folder("source", values["source"]) if values.get("source") is not None else None,
        options=check.options(values.get("options")),
        channels=check.channels(values.get("channels")),
        cpus=check.cpus("cpus", values["cpus"]) if values.get("cpus") is not None else None,
        trainer=trainer or HostGroup(1, "", None, 1.0),
        ranks=ranks,
        data=data,
    )
    check.together(values, found)
    if check.problems:
        raise SettingsError(check.problems)
    return found


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass
class _Check:
    """Values as the file has them to values that can be used; notes what is wrong and goes on."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def wrong(self, key: str, value: object, needs: str) -> None:
        self.problems.append(f"{self.path}: {key} is {shown(value)}; it needs {needs}")

    def unknown(self, values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
                hint = f"did you mean {where}{close[0]}?" if close else f"known are {', '.join(known)}"
                self.problems.append(f"{self.path}: {where}{shown(key)[1:-1]} is no key of a cluster file; {hint}")

    def whole(self, values: Mapping[str, Any], key: str, low: int, high: int, default: int) -> int:
        value = values.get(key.rpartition(".")[2])
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.wrong(key, value, f"a whole number from {low} to {high}")
            return default
        return value

    def name(self, value: object, *, given: bool) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            needs = "2 to 40 lower-case letters, digits and dashes, no dash first or last"
            self.wrong("name" if given else "the file's name, as there is no key name,", value, needs)
            return "unnamed"
        return value

    def job(self, value: object, *, has_source: bool) -> str:
        text = value if isinstance(value, str) else ""
        where, separator, name = text.rpartition(":")
        if not separator or not where or not name.isidentifier():
            self.wrong("job", value, "path/to/job.py:name or package.module:name")
        elif PurePosixPath(where).is_absolute() or ".." in PurePosixPath(where).parts:
            self.wrong("job", value, "a path below the source folder: a container sees nothing else")
        elif not has_source and not where.startswith("examples/"):
            self.wrong(
                "job", value, "one of the image's own examples/, or the key source: the folder with the job's file"
            )
        return text

    def folder(self, key: str, value: object) -> Folder:
        if not isinstance(value, str) or not value or "\0" in value:
            self.wrong(key, value, "a folder of this machine")
            return Folder("", self.path.parent)
        if "://" in value:
            self.wrong(key, value, "a folder of this machine; a container mounts no addresses")
        path, there = self.path.parent / value, False
        # A name that is too long, links in a circle, or a folder nobody may look into.
        with contextlib.suppress(OSError, RuntimeError):
            path = path.resolve()
            there = path.is_dir()
        if not there and "://" not in value:
            self.wrong(key, value, f"a folder that is there; {path} is none")
        return Folder(value, path)

    def options(self, value: object) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.wrong("options", value, "lines such as `epochs: 3`")
            return {}
        found: dict[str, str] = {}
        for name in value:
            plain = name.replace("-", "_")
            if not re.fullmatch(r"[^\W\d_][\w.-]{0,127}", name):
                self.wrong("options", name, "names of letters, digits and dashes, such as batch-size")
            elif plain in found:
                self.problems.append(f"{self.path}: options has both {found[plain]} and {name}; leave one out")
            found[plain] = name
        return value

    def channels(self, value: object) -> dict[str, Folder]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not value:
            self.wrong("channels", value, "lines such as `training: ../data`")
            return {}
        for name in value:
            if not _CHANNEL.fullmatch(name) or name in (".", ".."):
                self.wrong("channels", name, "names of letters, digits, dots, dashes and underscores, such as training")
        return {name: self.folder(f"channels.{name}", folder) for name, folder in value.items()}

    def cpus(self, key: str, value: object) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not LEAST_CPUS <= value <= MOST_CPUS:  # type: ignore[operator]
            self.wrong(key, value, f"a number of CPUs from {LEAST_CPUS} to {MOST_CPUS:.0f}")
            return 1.0
        return float(value)  # type: ignore[arg-type]

    def hosts(self, values: Mapping[str, Any], role: str) -> HostGroup | None:
        """Return the hosts of a role; None where there are none."""
        value = values.get(role)
        if value is None and role == "data":
            return None
        if not isinstance(value, dict):
            self.wrong(role, value, "{hosts: 1, cpus: 0.6} or {hosts: 1, instance_type: ml.c5.xlarge}")
            return None
        self.unknown(value, (*_HOST_KEYS, *(("ranks",) if role == "trainer" else ())), f"{role}.")
        hosts = self.whole(value, f"{role}.hosts", int(role == "trainer"), MOST_HOSTS, default=1)
        instance_type, real_cpus = self._size(value, role, needed=hosts > 0)
        default = Settings.trainer_group if role == "trainer" else Settings.data_group
        group = value.get("group", default)
        if not isinstance(group, str) or not _GROUP.fullmatch(group):
            self.wrong(f"{role}.group", group, "letters, digits, dots, dashes and underscores, 64 at most")
            group = default
        return HostGroup(hosts, group, instance_type, real_cpus) if hosts else None

    def _size(self, value: Mapping[str, Any], role: str, *, needed: bool) -> tuple[str | None, float]:
        kind, cpus = value.get("instance_type"), value.get("cpus")
        if kind is not None and cpus is not None:
            self.problems.append(f"{self.path}: {role} has both instance_type and cpus; it needs one of them")
        elif kind is not None:
            if isinstance(kind, str) and kind in instances.instances():
                return kind, float(instances.vcpus(kind))
            self.wrong(f"{role}.instance_type", kind, instances.near(str(kind)))
        elif cpus is not None:
            return None, self.cpus(f"{role}.cpus", cpus)
        elif needed:
            self.problems.append(f"{self.path}: {role} has neither instance_type nor cpus; it needs one of them")
        return None, 1.0

    def together(self, values: Mapping[str, Any], found: ClusterFile) -> None:
        """Check what only shows once the values stand together."""
        if found.data is None:
            return
        if sum(group.hosts for group in found.groups) > MOST_HOSTS:
            self.wrong("the number of all hosts", sum(group.hosts for group in found.groups), f"{MOST_HOSTS} at most")
        if found.data.group == found.trainer.group:
            self.wrong("the group of both trainer and data", found.data.group, "two different names")
        trainer, data = (_mapping(values.get(role)).keys() & {"instance_type", "cpus"} for role in ("trainer", "data"))
        if len(trainer) == len(data) == 1 and trainer != data:
            text = "trainer and data give instance_type on one side and cpus on the other, which have no common measure"
            self.problems.append(f"{self.path}: {text}; give both an instance_type, or both cpus")
