"""Every option of a run, in one table: flags, environment names, checks and help derive from it.

Precedence: flag, then `HETERO_<NAME>` in the environment, then the job file's own default, then the default here.
Flags are accepted with dashes and with underscores. A flag that is not in the table is the job's: it goes to `params`,
as a JSON value if it parses, else as text. `epochs` is in both, since a job's own loop wants it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from hetero.errors import EngineError, SettingsError
from hetero.options import ENGINES, MIB, OPTIONS, Option, WrongAddress, json_or_text, parse_flags

_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Settings:
    """All options of a run, resolved and checked.

    Args:
        job: Reference to the job, `path/to/job.py:name` or `package.module:name`; empty only where none is needed.
        engine: As asked for; `resolve_engine` settles `auto`.
        channels: Where each channel lies, as given with `--channel`; SageMaker's own are added by `hetero.clusters`.
        model_dir: As given. On SageMaker the model is written to SM_MODEL_DIR whatever this says: the TensorFlow
            estimator passes an s3:// address here, which SageMaker itself fills from SM_MODEL_DIR.
        params: The job's own options.

    The other fields are the options of `OPTIONS` of the same name.

    Raises:
        SettingsError: Any field is out of its bounds; all of them are named.
    """

    job: str
    engine: str = "auto"
    data_group: str = "data_group"
    trainer_group: str = "dnn_group"
    batch_size: int = 64
    epochs: int = 1
    ranks_per_host: int | None = None
    workers_per_host: int | str = "auto"
    local_workers: int | str = 0
    local_workers_cpus: float | None = None
    control_port: int = 16000
    data_port: int | None = None
    start_timeout_s: float = 600.0
    lease_s: float = 30.0
    grace_s: float = 10.0
    token: str | None = field(default=None, repr=False)
    run_dir: Path | None = None
    seed: int = 0
    deterministic: bool = False
    remainder: str = "drop"
    bad_split: str = "fail"
    prefetch_bytes: int = 256 * MIB
    buffer_bytes: int = 512 * MIB
    device_step_ms: float = 0.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    channels: Mapping[str, str] = field(default_factory=dict)
    model_dir: str | None = None
    checkpoint_dir: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field against the table."""
        problems = []
        for option in OPTIONS:
            value = getattr(self, option.attribute)
            if (value is None and option.default is None) or (option.name == "job" and value == ""):
                continue
            try:
                object.__setattr__(self, option.attribute, option.convert(value))
            except ValueError as error:
                problems.append(_wrong(option, option.attribute, value, error))
        if self.data_group == self.trainer_group:
            both = f"--data-group and --trainer-group are both {self.data_group!r}"
            problems.append(f"{both}; they need two different names.")
        params = {}
        for name, value in self.params.items():
            try:
                params[name] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                problems.append(f"the job's own option {name} is {value!r}; it needs a JSON value.")
        object.__setattr__(self, "params", params)
        if problems:
            raise SettingsError(problems)

    def to_json(self) -> str:
        """Return everything, the token included: for a child's environment, never for its arguments or a log."""
        values = self.public() | {"token": self.token}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote.

        Raises:
            SettingsError: The text is not such settings.
        """
        try:
            values = json.loads(text)
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise SettingsError([f"settings handed over by the launcher cannot be read: {error}."]) from error

    def public(self) -> dict[str, object]:
        """Return JSON values of everything but the token, for listings."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    job_defaults: Mapping[str, object] | None = None,
    *,
    require_job: bool = True,
) -> Settings:
    """Settle every option.

    Args:
        argv: Command line without the program's name.
        environ: Environment; an empty `HETERO_*` variable counts as not set.
        job_defaults: What the job file sets; names that are not in the table are defaults of the job's own options.
        require_job: Whether `--job` has to be given.

    Returns:
        The settings.

    Raises:
        SettingsError: Something is wrong; all of it is in the one message.
    """
    given, problems = parse_flags(argv)
    flags = {name for name, _ in given}
    exclusive = {option.name for option in OPTIONS if not option.adds_up}
    variables = {option.name for option in OPTIONS if environ.get(option.env)}
    found = _Resolution(problems=problems)
    found.take_job(job_defaults or {}, (flags | variables) & exclusive)
    found.take_environ(environ, flags & exclusive)
    found.take_flags(given)
    if require_job and "job" not in flags | variables:
        found.problems.append(f"--job is missing; it needs {_BY_NAME['job'].help}.")
    found.params["epochs"] = found.values.get("epochs", _BY_NAME["epochs"].default)
    try:
        settings = Settings(**{"job": "", "params": found.params, **found.values})  # type: ignore[arg-type]
    except SettingsError as error:  # what only shows once the values stand together
        found.problems.extend(error.problems)
    if found.problems:
        raise SettingsError(found.problems)
    return settings


def find_job(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the job reference before anything else is settled, since the job file has a say in the rest.

    None if there is none or it is unusable: `resolve` says so, together with all else that is wrong.
    """
    given, _ = parse_flags(argv)
    value = dict(given).get("job") if "job" in dict(given) else environ.get(_BY_NAME["job"].env)
    try:
        return str(_BY_NAME["job"].convert(value))
    except ValueError:
        return None


class Cluster(Protocol):
    """What `resolve_engine` needs to know of a topology."""

    @property
    def homogeneous(self) -> bool:
        """Whether there are no data hosts."""

    @property
    def source(self) -> str:
        """Where the topology was read."""


def resolve_engine(settings: Settings, topology: Cluster, job_engine: str | None) -> str:
    """Settle `auto` and refuse an engine that this cluster cannot use.

    Args:
        settings: Settings; only `engine` is read.
        topology: The cluster.
        job_engine: The job's own choice, None or `auto` if it has none.

    Returns:
        `tf_data`, `grpc` or `local`.

    Raises:
        EngineError: The engine cannot run here.
    """
    asked, engine = "--engine", settings.engine
    if engine == "auto" and topology.homogeneous:
        engine = "local"
    elif engine == "auto":
        asked, engine = "the job's engine", job_engine or "tf_data"
        if engine == "auto":
            engine = "tf_data"
    if engine not in ENGINES:
        raise EngineError(f"{asked} is {engine!r}; it needs one of {', '.join(ENGINES)}. Correct it in the job file.")
    if engine in ("tf_data", "grpc") and topology.homogeneous:
        raise EngineError(
            f"{asked} is {engine}, but {topology.source} has no data hosts: a homogeneous job has nobody to serve "
            f"input from elsewhere. Give --engine local (or leave it at auto), or start the job with a data group."
        )
    if engine == "local" and not topology.homogeneous:
        raise EngineError(
            f"{asked} is local, but {topology.source} has data hosts, which would idle while the ranks prepare their "
            f"own input. Give --engine tf_data or grpc, or start the job without a data group."
        )
    if engine == "local" and settings.local_workers != 0:
        raise EngineError(
            f"--local-workers is {settings.local_workers}, but {topology.source} has no data hosts: the ranks prepare "
            "all input themselves. Leave it out, or start the job with a data group."
        )
    if engine == "tf_data" and settings.deterministic:
        raise EngineError(
            "--deterministic is set, but under tf_data the workers' speed decides the order. Give --engine grpc."
        )
    if engine != "grpc" and settings.bad_split == "skip":
        raise EngineError(
            f"--bad-split is skip, but the engine is {engine}, which cannot leave out one split. "
            "Give --engine grpc, or --bad-split fail."
        )
    return engine


@dataclass
class _Resolution:
    """What the sources have said so far; each source overrides those taken before it."""

    values: dict[str, object] = field(default_factory=dict)
    params: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def take(self, option: Option, value: object, said: str) -> None:
        """Keep a value if the option accepts it, else note the problem; `said` is who gave it."""
        try:
            converted = option.convert(value)
        except ValueError as error:
            self.problems.append(_wrong(option, said, value, error))
            return
        if isinstance(converted, dict):  # channels add up, name by name
            earlier = self.values.get(option.attribute)
            converted = {**(earlier if isinstance(earlier, dict) else {}), **converted}
        self.values[option.attribute] = converted

    def take_job(self, defaults: Mapping[str, object], spoken_for: set[str]) -> None:
        """Take the job file's defaults, but for options that a stronger source speaks for."""
        names = {name: option for option in OPTIONS for name in (option.name, option.attribute)}
        for name, value in defaults.items():
            option = names.get(name)
            if option is None:
                self.params[name] = value
            elif not option.job_default:
                self.problems.append(f"the job file cannot set {name}; give {option.flag} or {option.env}.")
            elif value is not None and option.name not in spoken_for:
                self.take(option, value, f"the job file's {name}")

    def take_environ(self, environ: Mapping[str, str], spoken_for: set[str]) -> None:
        """Take the environment's variables, but for options that a flag speaks for."""
        for option in OPTIONS:
            if environ.get(option.env) and option.name not in spoken_for:
                self.take(option, environ[option.env], option.env)

    def take_flags(self, given: Sequence[tuple[str, str | None]]) -> None:
        """Take the flags; of one that is repeated the last counts."""
        last = {name: index for index, (name, _) in enumerate(given)}
        for index, (name, text) in enumerate(given):
            option = _BY_NAME.get(name)
            if option is None:
                self.params[name] = True if text is None else json_or_text(text)
            elif last[name] != index and not option.adds_up:
                continue
            elif text is None and option.type is not bool:
                self.problems.append(f"{option.flag} has no value; it needs {option.needs}.")
            else:
                self.take(option, "true" if text is None else text, option.flag)


def _wrong(option: Option, said: str, value: object, error: ValueError) -> str:
    """Return the sentence about a value that an option does not accept."""
    if option.secret:
        return f"{said} cannot be used; it needs {option.needs}."
    if isinstance(error, WrongAddress):
        return f"{said} is {value!r}; {error}."
    return f"{said} is {value!r}; it needs {option.needs}."
