"""The checkpoint of `fit`: one file with the values of all variables and how far the training has come.

The file is NumPy's `.npz`: `about`, JSON as bytes, and one array for each variable, in order; of a type that NumPy's
file format does not know (bfloat16), its bytes. It is written aside, brought to the disk, and renamed, so that a kill
at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero.errors import HeteroError, InputError

NAME = "fit.npz"
_PART = ".part"
_FORMAT = 1

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        epoch: The epoch to go on with, from 0: all before it are done.
        history: As `fit` returns it, of the epochs that are done.
    """

    epoch: int = 0
    history: Mapping[str, list[float]] = field(default_factory=dict)


class Checkpoint:
    """The file, written by rank 0 only. Its methods may be called from any thread.

    Args:
        folder: Where it lies; made if need be.
        kind: What the values belong to, such as the optimizer's name; a checkpoint of another kind is refused.
    """

    def __init__(self, folder: Path, kind: str = "") -> None:
        self.path = folder / NAME
        self._kind = kind

    def progress(self) -> Progress | None:
        """Return how far the training has come that the file is of; None if there is no file.

        Raises:
            InputError: The file cannot be read or is no whole checkpoint.
        """
        with self._reading() as members:
            return None if members is None else self._about(members)[0]

    def read(self, like: Sequence[tuple[str, Array]]) -> list[Array]:
        """Return the values.

        Args:
            like: Name and value of each variable that gets one, in order.

        Raises:
            InputError: They do not fit these variables, or as `progress`; also if the file is not there any more.
        """
        with self._reading() as members:
            if members is None:
                raise InputError(f"The checkpoint {self.path} is gone. Do not clear the folder while a job starts.")
            _, saved = self._about(members)
            self._check(saved, like)
            return [_plain(members[f"v{at}"], value) for at, (_, value) in enumerate(like)]

    def write(self, variables: Sequence[tuple[str, Array]], progress: Progress) -> None:
        """Replace the file, as a whole or not at all.

        Raises:
            HeteroError: The disk is full or the folder cannot be written.
        """
        about = {
            "format": _FORMAT,
            "kind": self._kind,
            "progress": asdict(progress),
            "variables": [[name, value.dtype.name, list(value.shape)] for name, value in variables],
        }
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        part = self.path.with_name(f".{NAME}.{os.getpid()}.{threading.get_ident()}{_PART}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                np.savez(stream, about=text, **{f"v{at}": _storable(value) for at, (_, value) in enumerate(variables)})
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(self.path)
            _sync_folder(self.path.parent)
        except OSError as error:
            why = error.strerror or str(error)
            raise HeteroError(f"Cannot write the checkpoint {self.path}: {why}. Free space there.") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def clear_parts(self) -> None:
        """Remove what writers left that were killed, also what SageMaker copied of it."""
        with contextlib.suppress(OSError):
            for part in self.path.parent.glob(f".{NAME}.*{_PART}"):
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reading(self) -> Any:
        """Give the file's members, None if there is no file; turn what they raise into one sentence."""
        try:
            with zipfile.ZipFile(self.path):  # refuses what NumPy would take for an array or a pickle
                pass
            with np.load(self.path, allow_pickle=False) as members:
                yield members
        except FileNotFoundError:
            yield None
        except OSError as error:
            why = error.strerror or str(error)
            text = f"Cannot read the checkpoint {self.path}: {why}. Give another --checkpoint-dir."
            raise InputError(text) from error
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{self.path} is no whole checkpoint ({type(error).__name__}: {error}): it was cut off, or is "
                "something else. Remove it to begin anew, or give another --checkpoint-dir."
            ) from error

    def _about(self, members: Mapping[str, Array]) -> tuple[Progress, Mapping[str, Any]]:
        about = json.loads(members["about"].tobytes())
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']}, this version reads {_FORMAT}")
        return Progress(int(about["progress"]["epoch"]), dict(about["progress"]["history"])), about

    def _check(self, about: Mapping[str, Any], like: Sequence[tuple[str, Array]]) -> None:
        saved, problem = about["variables"], ""
        if about["kind"] != self._kind:
            problem = f"it was written with {about['kind']}, and this is {self._kind}"
        elif len(saved) != len(like):
            problem = f"it has {len(saved)} variables, and these are {len(like)}"
        for (old_name, dtype, shape), (name, value) in zip(saved, like, strict=False):
            if not problem and (dtype, tuple(shape)) != (value.dtype.name, value.shape):
                old, new = f"{old_name}, {dtype} {tuple(shape)}", f"{name}, {value.dtype.name} {value.shape}"
                problem = f"it has {old}, where this has {new}"
        if problem:
            raise InputError(
                f"The checkpoint {self.path} is of another model or optimizer: {problem}. Remove it to begin anew, or "
                "give another --checkpoint-dir."
            )


class Trainer(Protocol):
    """What is needed of a job's TrainContext."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def checkpoint_dir(self) -> Path:
        """Where the file lies; only asked for on rank 0."""

    def epochs(self) -> Sequence[int]:
        """Return the epochs to train."""

    def log(self, **values: Any) -> None:
        """Keep numbers of the job."""


class FitCheckpoint:
    """What `fit` makes of it: all ranks go on from where rank 0's file is. Rank 0 prints what it found.

    Args:
        ctx: The job's TrainContext.
        kind: See `Checkpoint`.
        wanted: Whether there is to be one; else all this does nothing, and training begins at the beginning.
        total: `allreduce_sum` of the ranks; None for a single one.

    Attributes:
        wanted: As given.
        epoch: The epoch to go on with, from 0; equal on all ranks.

    Raises:
        InputError: Rank 0's file is no whole checkpoint.
    """

    def __init__(
        self, ctx: Trainer, kind: str, *, wanted: bool, total: Callable[[Any, str], Any] | None = None
    ) -> None:
        self.wanted = wanted
        self._file = Checkpoint(ctx.checkpoint_dir, kind) if wanted and ctx.rank == 0 else None
        self._lock = threading.Lock()
        self._variables: Sequence[Any] = ()
        self._changed = False
        found = None
        if self._file is not None:
            self._file.clear_parts()
            found = self._file.progress()
        self._progress, self._resumed = _agreed(found, total) if wanted else (Progress(), False)
        if self._file is not None and self._resumed:
            self._tell(ctx, len(ctx.epochs()))

    @property
    def epoch(self) -> int:
        """The epoch to go on with, from 0; all before it are done."""
        return self._progress.epoch

    def history(self) -> dict[str, list[float]]:
        """Return the history of the epochs that are done."""
        return {name: list(values) for name, values in self._progress.history.items()}

    def attach(self, variables: Sequence[Any]) -> None:
        """Take over the model's and the optimizer's variables; on rank 0 they get the file's values, if there is one.

        Args:
            variables: `tf.Variable`s, in an order that is the same in every run.

        Raises:
            InputError: The file is not of this model.
        """
        if self._file is not None and self._resumed:
            for variable, value in zip(variables, self._file.read(_named(variables)), strict=True):
                variable.assign(value)
        self._variables = variables

    def step(self) -> None:
        """Note that the variables are about to change."""
        self._changed = True

    def epoch_done(self, epoch: int, history: Mapping[str, list[float]]) -> None:
        """Note that an epoch is over, and write it."""
        self._progress = Progress(epoch + 1, {name: list(values) for name, values in history.items()})
        self._changed = True
        self.save()

    def save(self) -> None:
        """Write what there is now, on rank 0; nothing if the file has it already. From any thread.

        Raises:
            HeteroError: It cannot be written.
        """
        with self._lock:
            if self._file is not None and self._variables and self._changed:
                self._file.write(_named(self._variables), self._progress)
                self._changed = False

    def _tell(self, ctx: Trainer, wanted: int) -> None:
        path, done = self._file and self._file.path, self.epoch
        if done < wanted:
            print(f"going on from {path}: {done} of {wanted} epochs are done", flush=True)
            return
        text = f"training was complete already: {path} has {done} epochs, and --epochs is {wanted}."
        print(f"{text} Nothing is trained; to train on, give more --epochs.", flush=True)
        ctx.log(**{name: values[-1] for name, values in self._progress.history.items()})


def _named(variables: Sequence[Any]) -> list[tuple[str, Array]]:
    return [(str(variable.name), np.asarray(variable.numpy())) for variable in variables]


def _agreed(found: Progress | None, total: Callable[[Any, str], Any] | None) -> tuple[Progress, bool]:
    """Return rank 0's progress on all ranks, and whether there was one."""
    if total is None:
        return found or Progress(), found is not None
    # Each byte of rank 0's text as a number, to which the others add zeros: it needs no other way between the ranks.
    text = b"" if found is None else json.dumps(asdict(found)).encode()
    size = int(total(np.array([float(len(text))]), "checkpoint_size")[0])
    if not size:
        return Progress(), False
    own = np.frombuffer(text, np.uint8) if text else np.zeros(size)
    values = json.loads(np.asarray(total(own.astype(np.float64), "checkpoint")).astype(np.uint8).tobytes())
    return Progress(values["epoch"], values["history"]), True


def _storable(value: Array) -> Array:
    """Return an array that NumPy's file format keeps: itself, or its bytes."""
    if value.dtype.isbuiltin == 1 and value.dtype.kind in "biufc":
        return value
    return np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)


def _plain(stored: Array, like: Array) -> Array:
    """Return a stored array as one of the type and shape of `like`."""
    if stored.dtype == like.dtype:
        return stored.reshape(like.shape)
    return np.frombuffer(stored.tobytes(), like.dtype).reshape(like.shape)


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk, where the file system can do that for a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
