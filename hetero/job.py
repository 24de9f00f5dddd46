"""The user's side: Job, and the two contexts that its functions are called with.

A job file is run by every rank. It is never run by a launcher: that one needs only what `Job(...)` declares, and reads
it from the source text (`read_declaration`), so the arguments of `Job(...)` are literals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hetero.channels import Channels, files_below
from hetero.errors import InputError, JobFileError
from hetero.inputs import s3

FRAMEWORKS = ("tensorflow", "torch")
Function = TypeVar("Function", bound=Callable[..., Any])


class Job:
    """What a user hands to hetero: how to make input, how to train.

    Args:
        name: Shown everywhere and part of the default run folder.
        engine: The engine that this job is made for; `--engine` overrides it.
        framework: What its ranks train with. "tensorflow": Horovod is ready when `train` is called. "torch": neither
            TensorFlow nor Horovod is loaded, and the environment is set as torchrun sets it, so that
            `torch.distributed.init_process_group("gloo")` finds the other ranks.
        **defaults: The job's own defaults of other settings (`batch_size=128`) and of its own options (`width=32`).
            They must be literals.

    Example:
        >>> job = Job("digits", engine="tf_data", batch_size=32)
        >>> @job.train
        ... def train(ctx): ...
    """

    def __init__(self, name: str, *, engine: str | None = None, framework: str = "tensorflow", **defaults: Any) -> None:
        if not isinstance(name, str) or not name.strip():
            raise JobFileError(f"A job needs a name, got {name!r}: hetero.Job('digits')")
        self.name = name
        if framework not in FRAMEWORKS:
            raise JobFileError(f"Job {name!r} has the framework {framework!r}; it needs {' or '.join(FRAMEWORKS)}.")
        self.engine = engine
        self.framework = framework
        self.defaults = defaults
        self.inputs_function: Callable[[InputContext], Any] | None = None
        self.splits_function: Callable[[InputContext], Sequence[Any]] | None = None
        self.train_function: Callable[[TrainContext], Any] | None = None

    def inputs(self, function: Function) -> Function:
        """Register the function that makes an epoch's input: a tf.data.Dataset of batches or an iterable of batches."""
        self.inputs_function = function
        return function

    def splits(self, function: Function) -> Function:
        """Register the function that lists the pieces of the input, as JSON values. Default: files of `training`."""
        self.splits_function = function
        return function

    def train(self, function: Function) -> Function:
        """Register the function that trains; called once in every rank with Horovod ready."""
        self.train_function = function
        return function

    def check(self) -> None:
        """Raise JobFileError if the job lacks a function that it cannot run without."""
        missing = [
            f"@{name}"
            for name, function in (("job.inputs", self.inputs_function), ("job.train", self.train_function))
            if function is None
        ]
        if missing:
            raise JobFileError(f"Job {self.name!r} has no {' and no '.join(missing)} function. Decorate one.")

    def list_splits(self, context: InputContext) -> list[Any]:
        """Return the pieces of the whole input.

        Raises:
            InputError: there are none, or they are not JSON values (they travel between processes).
        """
        if self.splits_function is None:
            splits: list[Any] = [str(path) for path in context.channel_files("training")]
        else:
            found = self.splits_function(context)
            if found is None or isinstance(found, (str, bytes, dict)):
                raise InputError(f"The splits function of job {self.name!r} returned {found!r}; it must return a list.")
            splits = [str(split) if isinstance(split, Path) else split for split in found]
        if not splits:
            why = f"Job {self.name!r} has no splits: its splits function returned an empty list."
            raise InputError(f"{why} {Channels.of(context.channels).why_lacking()}".strip())
        try:
            return list(json.loads(json.dumps(splits)))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The splits of job {self.name!r} must be JSON values (text, numbers, lists): {error}"
            ) from None

    def __repr__(self) -> str:
        return f"Job({self.name!r}, engine={self.engine!r})"


def _seed(*parts: object) -> int:
    """Return 31 bits that depend on all parts and on nothing else, on any machine."""
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


@dataclass(frozen=True)
class InputContext:
    """What `inputs` and `splits` are called with.

    Attributes:
        splits: The pieces that this call covers: all of them under tf_data, this rank's share under local.
        epoch: Counts from 0.
        batch_size: Rows that a rank takes in one step.
        params: The job's own options.
        channels: Name of each input channel and its folder, or its address (`s3://bucket/prefix`).
        run_seed: `--seed`; use `seed` and `seed_for`.
    """

    splits: tuple[Any, ...] = ()
    epoch: int = 0
    batch_size: int = 64
    params: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    run_seed: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The splits, where they are files."""
        wrong = next((split for split in self.splits if not isinstance(split, str)), None)
        if wrong is not None:
            raise InputError(f"ctx.files needs splits that are paths, but one is {wrong!r}. Use ctx.splits.")
        return self.splits

    @property
    def seed(self) -> int:
        """Depends on the run's seed and the epoch, not on the worker. 31 bits."""
        return _seed(self.run_seed, self.epoch)

    def seed_for(self, split: Any) -> int:
        """Like `seed`, and depends on the split too: a split is augmented the same way wherever it runs."""
        return _seed(self.run_seed, self.epoch, split)

    def channel(self, name: str) -> str:
        """Return the folder of an input channel, or its address (`s3://bucket/prefix`).

        Raises:
            InputError: there is no such channel here; the message lists those that are.
        """
        try:
            return self.channels[name]
        except KeyError:
            raise InputError(Channels.of(self.channels).missing(name)) from None

    def channel_files(self, name: str) -> list[Path] | list[str]:
        """Return the files of a channel, hidden ones left out, sorted by path.

        Those of a channel in S3 are addresses, as text: a Path would make `s3:/` of `s3://`.

        Raises:
            InputError: there is no such channel here, or it has no files here; the message says what to do.
        """
        if s3.is_address(address := self.channel(name)):
            try:
                return s3.files(address)
            except InputError as error:
                raise InputError(f"Channel {name!r}: {error}") from error
        folder, channels = Path(address), Channels.of(self.channels)
        if (problem := channels.without_files(name)) is not None:
            raise InputError(problem)
        if not folder.exists():
            raise InputError(channels.absent(name))
        if folder.is_file():
            return [folder]
        files = sorted(files_below(folder))
        if not files:
            raise InputError(channels.empty(name))
        return files


class Feed(Protocol):
    """Where a TrainContext gets its batches from; the rank injects the real one."""

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield objects with `data`, `mask` and `rows`."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep values that the job measured."""


@dataclass(frozen=True)
class TrainContext:
    """What `train` is called with, once in every rank.

    Attributes:
        rank, size: This rank and how many there are over all hosts.
        local_rank, local_size: The same within this host; the accelerator is pinned by local_rank.
        batch_size: Rows that this rank takes in one step.
        number_of_epochs: `--epochs`; loop over `epochs()`.
        params: The job's own options.
        channels: Name of each input channel and its folder.
        seed: The run's seed; the same on every rank.
        model_dir: Where rank 0 saves the model.
        run_dir: The folder of the run.
        host: Name of this host.
        checkpoint_folder: See `checkpoint_dir`.
        register_save: What `on_stop` hands its function to; None where nobody will stop this rank.
    """

    feed: Feed
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    batch_size: int = 64
    number_of_epochs: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    model_dir: Path | None = None
    run_dir: Path | None = None
    host: str = ""
    checkpoint_folder: Path | None = None
    register_save: Callable[[Callable[[], Any]], None] | None = None

    @property
    def is_chief(self) -> bool:
        """True on rank 0, the one that saves and reports."""
        return self.rank == 0

    def epochs(self) -> range:
        """Return the epochs to train, counted from 0."""
        return range(self.number_of_epochs)

    def batches(self, epoch: int, *, with_mask: bool = False) -> Iterator[Any]:
        """Yield this rank's batches of an epoch as nested numpy arrays.

        Every rank gets the same number of batches. An epoch can be read once.

        Args:
            epoch: Counts from 0; epochs are read in order.
            with_mask: Yield `(batch, mask)`; mask: bool (batch_size,), False for rows that `--remainder pad` repeated.

        Raises:
            DataServiceLost: no worker is left that could prepare input.
            InputError: the job's input breaks the contract of a batch.
        """
        for batch in self.feed.batches(epoch):
            yield (batch.data, batch.mask) if with_mask else batch.data

    def dataset(self, epoch: int, *, with_mask: bool = False) -> Any:
        """Return the same stream as a tf.data.Dataset; it can be iterated once."""
        return _as_dataset(self.batches(epoch, with_mask=with_mask), epoch)

    def log(self, **values: Any) -> None:
        """Keep numbers of the job: they go to metrics.jsonl with the next step and to `results` in summary.json."""
        self.feed.log(values)

    def on_stop(self, save: Callable[[], Any]) -> None:
        """Have rank 0 call `save` when the job is stopped before its end, so that it can leave a checkpoint.

        All ranks register it, in the thread that `train` was called in; another one replaces it. It is called once,
        between two steps where one ends in time, and has what is left of `--grace-s`. The other ranks are on their way
        out: no collective operations in it. What it raises is reported.

        Args:
            save: Function without arguments.

        Raises:
            InputError: It cannot be called, or this is another thread.
        """
        if not callable(save):
            raise InputError(f"ctx.on_stop got {save!r}; it needs a function without arguments.")
        if self.register_save is not None:
            self.register_save(save)

    @property
    def checkpoint_dir(self) -> Path:
        """The folder for checkpoints, made if need be; a later run with the same `--checkpoint-dir` finds them there.

        On SageMaker /opt/ml/checkpoints, which SageMaker copies to S3 and restores where an interrupted job restarts;
        elsewhere `checkpoints` in the run folder, unless `--checkpoint-dir` says otherwise.

        Raises:
            InputError: There is none, or it cannot be made.
        """
        folder = self.checkpoint_folder
        if folder is None:
            raise InputError("This context has no folder for checkpoints; a job's own has one.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"Cannot make the checkpoint folder {folder}: {error.strerror}."
            raise InputError(f"{why} Give a --checkpoint-dir that can be made.") from error
        return folder

    def channel(self, name: str) -> str:
        """Return the folder of an input channel, or its address; InputError if there is none of that name."""
        return InputContext(channels=self.channels).channel(name)


def _as_dataset(batches: Iterator[Any], epoch: int) -> Any:
    import tensorflow as tf

    def tuples(structure: Any) -> Any:  # tf.data reads a list as one tensor, so lists become tuples
        if isinstance(structure, dict):
            return {key: tuples(value) for key, value in structure.items()}
        if isinstance(structure, tuple) and hasattr(structure, "_fields"):
            return type(structure)(*(tuples(value) for value in structure))
        if isinstance(structure, (list, tuple)):
            return tuple(tuples(value) for value in structure)
        return structure

    def spec(array: Any) -> Any:
        dtype = tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)
        return tf.TensorSpec((None, *array.shape[1:]), dtype)

    first = next(batches, None)
    if first is None:
        raise InputError(
            f"Epoch {epoch} gave this rank no batch, so its dataset has no element to take the types from."
        )
    read = False

    def generate() -> Iterator[Any]:
        nonlocal read
        if read:
            raise InputError(
                f"The stream of epoch {epoch} was read before; an epoch can be read once. Use ctx.dataset(next)"
            )
        read = True
        yield tuples(first)
        yield from map(tuples, batches)

    return tf.data.Dataset.from_generator(generate, output_signature=tf.nest.map_structure(spec, tuples(first)))
