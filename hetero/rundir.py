"""Every path of a run, and the atomic writes that keep a reader from ever seeing half a file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from hetero.errors import SettingsError

LAUNCHER = "launcher"
"""What the launcher's own process is called among a host's files."""


def write_json_atomic(path: Path, value: object) -> None:
    """Write `value` as JSON so that `path` holds either the old text or the whole of the new one.

    JSON has no NaN and no infinity, so they become null; arrays and scalars of other libraries become numbers.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(_finite(value), stream, indent=2, sort_keys=False)
            stream.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _finite(value: object) -> object:
    """Return a value that JSON can express."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    item = getattr(value, "numpy", None)  # a tensor
    item = item() if callable(item) else value
    return _finite(item.tolist()) if hasattr(item, "tolist") else str(value)


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`, or None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


class RunDir:
    """The folder of one run, seen from one host.

    Virtual hosts of a local cluster share the folder; real hosts have one each, so whatever several hosts write carries
    the host's name.

    Args:
        path: The folder; made on first use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def summary(self) -> Path:
        """What the run came to; written by the chief at its end."""
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        """One line for each step of rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def failure(self) -> Path:
        """The first failure in time; only there if the run failed."""
        return self.path / "failure.json"

    def log(self, host: str, process: str) -> Path:
        """Everything that a process printed."""
        return self.path / "logs" / host / f"{process}.log"

    def work(self, host: str) -> Path:
        """Scratch space of a host: journals, ports, error files, results of ranks."""
        return self.path / "work" / host

    def make_work(self, host: str) -> None:
        """Make a host's scratch space; raise SettingsError if that cannot be done."""
        work = self.work(host)
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot make {work}: {error.strerror}. Give a --run-dir that can be written"
            raise SettingsError([problem]) from error

    def error(self, host: str, process: str) -> Path:
        """Where a process writes the exception that ends it."""
        return self.work(host) / f"{process}.error.json"

    def finished(self, host: str, process: str) -> Path:
        """What a rank leaves when its training is over: without it an exit code of 0 means nothing."""
        return self.work(host) / f"{process}.finished"

    def pulse(self, host: str, process: str) -> Path:
        """A file that a service touches once a second, so that its launcher sees one that is there but does nothing.

        The launcher itself (`LAUNCHER`) touches its own while the coordinator answers, for a container's health check.
        """
        return self.work(host) / f"{process}.pulse"

    def met(self, host: str) -> Path:
        """Where the coordinator has answered a process of a host; not there before."""
        return self.work(host) / "coordinator-met.json"

    def meter(self, host: str, process: str) -> Path:
        """Where a rank or a feed leaves how it goes, about once a second, for its launcher, which may start workers."""
        return self.work(host) / f"{process}.meter.json"

    def launcher(self, host: str, local_rank: int) -> Path:
        """What a launcher that mpirun started says of itself to the others on its host."""
        return self.work(host) / f"launcher-{local_rank}.json"

    def order(self, host: str, process: str) -> Path:
        """What a launcher leaves for a rank before it tells it to end: whether to write a checkpoint."""
        return self.work(host) / f"{process}.order.json"

    def checkpoint(self, host: str) -> Path:
        """What rank 0 leaves for its launcher when the job is stopped: whether it has written a checkpoint."""
        return self.work(host) / "checkpoint.json"

    def result(self, host: str, process: str) -> Path:
        """Where rank 0 leaves what all ranks measured."""
        return self.work(host) / f"{process}.result.json"

    def create(self) -> None:
        """Make the folder; raise SettingsError if that cannot be done."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot make --run-dir {self.path}: {error.strerror}. Name a folder that can be written"
            raise SettingsError([problem]) from error

    def forget_outcome(self) -> None:
        """Remove what an earlier run in this folder came to, so that nobody takes it for this one's."""
        for path in (self.summary, self.failure, self.metrics):
            with contextlib.suppress(OSError):  # a folder that cannot be written is complained of where it is written
                path.unlink()

    def refuse_if_used(self) -> None:
        """Raise SettingsError if the folder already holds a run: a second one would mix with it."""
        for name in ("summary.json", "metrics.jsonl", "failure.json", "logs"):
            if (self.path / name).exists():
                problem = f"--run-dir {self.path} already holds a run ({name}). Name another folder or remove this one"
                raise SettingsError([problem])

    def claim(self) -> None:
        """Make the folder this run's own; raise SettingsError if it holds a run, also one that begins right now."""
        self.create()
        self.refuse_if_used()
        try:
            (self.path / "logs").mkdir()
        except FileExistsError:
            self.refuse_if_used()
        except OSError as error:
            problem = (
                f"cannot write to --run-dir {self.path}: {error.strerror}. Free space there or name another folder"
            )
            raise SettingsError([problem]) from error


def default_run_dir(job_name: str, base: Path | None = None) -> Path:
    """Return `runs/<name>-<time>` below `base` (default: here), a folder that does not exist yet."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip("-") or "job"
    root = (base or Path.cwd()) / "runs"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = root / (f"{name}-{stamp}" if attempt == 0 else f"{name}-{stamp}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise SettingsError([f"cannot make {path}: {error.strerror}. Give a writable --run-dir"]) from error
        return path
    raise SettingsError([f"cannot find a free name below {root}. Give --run-dir"])
