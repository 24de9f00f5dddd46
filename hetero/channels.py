"""A host's input channels: where each lies, what to do where one is missing, which splits only this host can read.

On SageMaker a channel may go to one instance group alone, and its files may be spread over the hosts (ShardedByS3Key):
then the same folder holds other files on each host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARDED = "ShardedByS3Key"


@dataclass(frozen=True)
class Place:
    """The SageMaker host that channels are looked for on.

    Args:
        host: Its name.
        group: Its instance group.
        groups: All groups of the job; a job with one needs to name none.
    """

    host: str
    group: str
    groups: tuple[str, ...]

    def __str__(self) -> str:
        return f"host {self.host}" + (f" of group {self.group!r}" if len(self.groups) > 1 else "")

    @property
    def advice(self) -> str:
        """How a channel is given to all groups, in the words of SageMaker's SDK; "" where there is one group."""
        return f"TrainingInput(..., instance_groups={list(self.groups)})" if len(self.groups) > 1 else ""

    def remedy(self, name: str) -> str:
        """Return how the job gives a channel to this host."""
        if self.advice:
            return f"Give it to that group too: {self.advice}."
        return f"Add it to the job: fit({{{name!r}: TrainingInput(...)}})."


class Channels(Mapping[str, str]):
    """The folder of each channel by name; remembers which channels were asked for.

    Args:
        folders: By name.
        sharded: Channels that are ShardedByS3Key.
        piped: Channels in Pipe mode, which have no files.
        place: The host; None outside SageMaker.
    """

    def __init__(
        self,
        folders: Mapping[str, str],
        *,
        sharded: Sequence[str] = (),
        piped: Sequence[str] = (),
        place: Place | None = None,
    ) -> None:
        self._folders, self._piped, self._place = dict(folders), frozenset(piped), place
        self._sharded = tuple(name for name in sharded if name in self._folders)
        self._roots = [(name, root) for name in self._sharded for root in _forms(self._folders[name])]
        self._asked: dict[str, None] = {}

    @classmethod
    def of(cls, folders: Mapping[str, str]) -> Channels:
        """Return the mapping itself if it is one of these, else one of these with its folders."""
        return folders if isinstance(folders, cls) else cls(folders)

    def __getitem__(self, name: str) -> str:
        self._asked[name] = None
        return self._folders[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)

    def __repr__(self) -> str:
        return f"Channels({self._folders!r}, sharded={self._sharded!r}, place={self._place!r})"

    @property
    def sharded(self) -> tuple[str, ...]:
        """Names of the channels that are ShardedByS3Key."""
        return self._sharded

    def sharded_channel(self, split: Any) -> str | None:
        """Return the ShardedByS3Key channel that a split (a JSON value) reads from, by the paths in it; None: of none.

        Such a split is local: other hosts have other files in that folder.
        """
        if isinstance(split, str):
            if not self._roots or not split.startswith(os.sep):
                return None
            path = os.path.normpath(split)
            return next((n for n, root in self._roots if path == root or path.startswith(root + os.sep)), None)
        parts = (*split, *split.values()) if isinstance(split, dict) else split if isinstance(split, list) else ()
        return next((name for part in parts if (name := self.sharded_channel(part)) is not None), None)

    def lacking(self) -> list[str]:
        """Return the channels that were asked for and of which this host has no file."""
        return [name for name in self._asked if not self.has_files(name)]

    def has_files(self, name: str) -> bool:
        """Return whether a channel has a file here; one that is read over the network counts as if it had."""
        folder = self._folders.get(name)
        return folder is not None and ("://" in folder or next(files_below(Path(folder)), None) is not None)

    # What to say.

    def missing(self, name: str) -> str:
        """Say that there is no channel of this name."""
        have = ", ".join(sorted(self._folders)) or "none"
        if self._place is None:
            return f"There is no channel {name!r} (channels: {have}). Give --channel {name}=FOLDER."
        return f"There is no channel {name!r} on {self._place} (channels: {have}). {self._place.remedy(name)}"

    def absent(self, name: str) -> str:
        """Say that a channel's folder does not exist."""
        folder = self._folders[name]
        if self._place is None or not self._is_sagemakers(name):
            return f"Channel {name!r} is {folder!r}, which does not exist. Correct --channel {name}=FOLDER."
        what = f"Channel {name!r} has no folder on {self._place}: {folder!r} does not exist."
        return f"{what} {self._place.remedy(name)}"

    def empty(self, name: str) -> str:
        """Say that a channel's folder has no files."""
        folder = self._folders[name]
        if self._place is None or not self._is_sagemakers(name):
            return f"Channel {name!r} ({folder}) has no files. Put the data there or name another folder."
        what = f"Channel {name!r} ({folder}) has no files on {self._place}."
        if name in self._sharded:
            return f"{what} It is {SHARDED}: is its S3 prefix empty, or has it fewer files than there are hosts?"
        elsewhere = f", or does it not go to that group ({self._place.advice})" if self._place.advice else ""
        return f"{what} Is its S3 prefix empty{elsewhere}?"

    def without_files(self, name: str) -> str | None:
        """Say that a channel has no files because it comes in Pipe mode; None: it does not."""
        if name not in self._piped:
            return None
        return (
            f"Channel {name!r} comes in Pipe mode: as a stream, without files. Let it come as files: "
            "TrainingInput(..., input_mode='FastFile'), or 'File'."
        )

    def why_lacking(self) -> str:
        """Say what is wrong with each channel that was asked for and has no file here; "" if there is none."""
        said = []
        for name in self.lacking():
            if name not in self._folders:
                said.append(self.missing(name))
            elif (problem := self.without_files(name)) is not None:
                said.append(problem)
            else:
                said.append(self.empty(name) if Path(self._folders[name]).exists() else self.absent(name))
        return " ".join(said)

    def hint(self, problem: str) -> str:
        """Return what may be wrong where a data host did not find a file; "" if that is no file of a channel."""
        roots = [(name, root) for name, folder in self._folders.items() for root in _forms(folder)]
        names = [name for name, root in roots if f"{root}{os.sep}" in problem]
        if self._place is None or not names:
            return ""
        groups = f", instance_groups={list(self._place.groups)}" if len(self._place.groups) > 1 else ""
        return (
            f"It was listed on {self._place}, but the data hosts read it: let channel {names[0]!r} go to them too, "
            f"whole: TrainingInput(..., distribution='FullyReplicated'{groups})."
        )

    def _is_sagemakers(self, name: str) -> bool:
        """Return whether a folder is the one that SageMaker made, rather than one given with --channel."""
        return Path(self._folders[name]).parts[-3:] == ("input", "data", name)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a channel, in any order, hidden ones left out; the folder may be a file, or may not exist."""
    if folder.is_file():
        yield folder
        return
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _forms(folder: str) -> list[str]:
    """Return the absolute paths under which a folder's files may be named."""
    if "://" in folder:
        return []
    path = Path(folder)
    return list(dict.fromkeys((os.path.normpath(path.absolute()), str(path.resolve()))))
