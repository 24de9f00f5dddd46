"""The options of a run: one table that flags, environment names, checks and help derive from; how flags are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.inputs import s3

AUTO = "auto"
"""Where a number could stand: found by measuring."""
ENGINES = (AUTO, "tf_data", "grpc", "local")
_DAY_S = 86_400.0
MIB = 1 << 20


class WrongAddress(ValueError):
    """A value that was meant as an address and is none; its text says why, without a full stop."""


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: With underscores; the flag and the environment name follow from it.
        type: `str`, `int`, `float`, `bool`, `Path`, or `dict` for repeatable NAME=PATH pairs.
        default: Value when nobody says anything; None where `default_text` explains it.
        help: One line.
        low: Least value of a number.
        high: Greatest value of a number.
        choices: The words that are accepted; empty accepts any.
        words: Words that are accepted beside numbers.
        default_text: What None stands for.
        field: Name in `Settings`, where it is not `name`.
        secret: Never shown in a message, a listing or a repr.
        job_default: Whether a job file may set its own default.
    """

    name: str
    type: type
    default: object
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    default_text: str = ""
    field: str = ""
    secret: bool = False
    job_default: bool = True

    @property
    def flag(self) -> str:
        """The flag, as help and messages write it."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return "HETERO_" + self.name.upper()

    @property
    def attribute(self) -> str:
        """The name in `Settings`."""
        return self.field or self.name

    @property
    def shown_default(self) -> str:
        """The default, as help and documents write it."""
        return self.default_text or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))

    @property
    def adds_up(self) -> bool:
        """Whether values given at several places are put together and none overrides the whole of another."""
        return self.type is dict

    @property
    def needs(self) -> str:
        """What a value has to be, as the end of a sentence."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.type in (int, float):
            kind = "a whole number" if self.type is int else "a number"
            return ", or ".join((f"{kind} from {_number(self.low)} to {_number(self.high)}", *self.words))
        if self.secret:
            return "1 to 1024 printable ASCII characters without spaces"
        return {bool: "true or false", dict: "NAME=PATH", Path: "a path"}.get(self.type, "a text that is not empty")

    def convert(self, value: object) -> object:
        """Return `value` (text from a flag, or a Python value) as this option's type.

        Raises:
            ValueError: It is not one of this type within the bounds; WrongAddress says more.
        """
        if isinstance(value, str) and not self.secret:
            value = _unquoted(value.strip())
        if self.type is bool:
            return _to_bool(value)
        if isinstance(value, str) and value in self.words:
            return value
        if self.type in (int, float):
            number = _to_int(value) if self.type is int else _to_float(value)
            if (self.low is not None and number < self.low) or (self.high is not None and number > self.high):
                raise ValueError("out of bounds")
            return number
        if self.type is dict:
            return _to_channels(value)
        text = str(value) if isinstance(value, Path) else value
        if not isinstance(text, str) or not text or "\0" in text or (self.choices and text not in self.choices):
            raise ValueError("not accepted")
        if self.secret and not re.fullmatch(r"[!-~]{1,1024}", text):
            raise ValueError("not printable")
        return Path(text) if self.type is Path else text


OPTIONS: tuple[Option, ...] = (
    Option("job", str, None, "path/to/job.py:name or package.module:name", default_text="required", job_default=False),
    Option("engine", str, "auto", "how input reaches the ranks", choices=ENGINES, job_default=False),
    Option("data_group", str, "data_group", "instance group that prepares input"),
    Option("trainer_group", str, "dnn_group", "instance group that trains"),
    Option("batch_size", int, 64, "rows a rank takes in one step", 1, 2**31 - 1),
    Option("epochs", int, 1, "passes over the input", 1, 2**31 - 1),
    Option("ranks_per_host", int, None, "training processes a trainer host", 1, 1024, default_text="GPUs, or 1"),
    Option("workers_per_host", int, AUTO, "workers on each data host", 1, 1024, words=(AUTO,)),
    Option("local_workers", int, 0, "workers on each trainer host, for its spare CPUs", 0, 1024, words=("auto",)),
    Option(
        "local_workers_cpus",
        float,
        None,
        "CPUs that all workers of a trainer host may use together",
        0.01,
        4096,
        default_text="what a CPU quota leaves",
    ),
    Option("control_port", int, 16000, "coordinator", 1, 65535),
    Option("data_port", int, None, "first data port", 1, 65535, default_text="6000; free ones for hetero run"),
    Option("start_timeout_s", float, 600.0, "seconds until every host has to be there", 0.1, 7 * _DAY_S),
    Option("lease_s", float, 30.0, "seconds without a sign of life until a host is lost", 0.2, _DAY_S),
    Option("grace_s", float, 10.0, "seconds between asking a process to end and killing it", 0.0, 3600.0),
    Option("token", str, None, "shared secret of the job's hosts", default_text="none", secret=True),
    Option("run_dir", Path, None, "what the run leaves", default_text="runs/<name>-<time>"),
    Option("seed", int, 0, "everything random derives from it", 0, 2**63 - 1),
    Option("deterministic", bool, False, "the same batches in the same order to the same rank (grpc)"),
    Option("remainder", str, "drop", "rows that do not fill a step of all ranks", choices=("drop", "pad")),
    Option("bad_split", str, "fail", "a split in which the job's code fails (grpc)", choices=("fail", "skip")),
    Option("prefetch_bytes", int, 256 * MIB, "bytes of input that a rank holds (grpc)", 1, 2**50),
    Option("buffer_bytes", int, 512 * MIB, "bytes of finished batches that a data host holds (grpc)", 1, 2**50),
    Option(
        "device_step_ms",
        float,
        0.0,
        "milliseconds that a step takes on a simulated accelerator; 0: none",
        0.0,
        3_600_000.0,
    ),
    Option("tls_cert", Path, None, "certificate of this host, PEM", default_text="none"),
    Option("tls_key", Path, None, "its private key, PEM", default_text="none"),
    Option("tls_ca", Path, None, "certificates to check the other hosts' by, PEM", default_text="none"),
    Option("channel", dict, None, "where input lies, repeatable", default_text="SageMaker's", field="channels"),
    Option("model_dir", str, None, "where the model goes", default_text="in the run directory"),
    Option("checkpoint_dir", str, None, "where checkpoints go", default_text="SageMaker's, or in the run directory"),
)


def likely_misspelt(names: Sequence[str]) -> list[str]:
    """Return a sentence for each of the job's own options whose name is almost that of an option of the run."""
    import difflib

    known = {option.name.replace("_", ""): option for option in OPTIONS}
    found = []
    for name in sorted(set(names) - {option.name for option in OPTIONS}):
        close = difflib.get_close_matches(name.replace("_", ""), known, n=1, cutoff=0.85)
        if close:
            flag = f"--{name.replace('_', '-')}"
            found.append(f"{flag} is no option of the run and goes to the job; did you mean {known[close[0]].flag}?")
    return found


def options_help() -> str:
    """Return the table of options as text, a line each: flag, meaning, default."""
    width = max(len(option.flag) for option in OPTIONS)
    return "\n".join(f"{o.flag:<{width}}  {o.help} ({o.shown_default})" for o in OPTIONS)


def parse_flags(argv: Sequence[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Return (name, text or None) for each flag in order, and what could not be read.

    SageMaker's toolkit writes a hyperparameter of one letter as `-x`, so that is a flag as well.
    """
    given: list[tuple[str, str | None]] = []
    problems: list[str] = []
    rest = [str(token) for token in argv]
    while rest:
        token = rest.pop(0)
        if token == "--":  # noqa: S105 - what separates a command's options from the job's
            continue
        match = re.fullmatch(r"(?:--([^\W\d_][\w.-]*)|-([A-Za-z]))(?:=(.*))?", token, re.DOTALL)
        if not match:
            problems.append(_unreadable(token, given[-1][0] if given else None))
            continue
        name, text = (match[1] or match[2]).replace("-", "_"), match[3]
        if text is None and rest and _is_value(rest[0]):
            text = rest.pop(0)
        given.append((name, text))
    return given, problems


def _is_value(token: str) -> bool:
    """Return whether a token after a flag is its value: anything without a dash, and negative numbers."""
    return not token.startswith("-") or token == "-" or re.match(r"-(\d|\.\d)", token) is not None  # noqa: S105


def _unreadable(token: str, before: str | None) -> str:
    """Say what to do about a token that is no flag and no flag's value."""
    if before == "token":
        return "unexpected text after the value of --token; a token has no spaces."
    if token.startswith("-"):
        return f"cannot read {token!r}: a flag is --name, and a value that begins with a dash is --name={token}."
    hint = f" If it belongs to --{before.replace('_', '-')}, give a JSON list or quote the text." if before else ""
    return f"unexpected {token!r}: every value follows a flag, as in --name {token}.{hint}"


def _number(bound: float | None) -> str:
    """Return a bound as people write it."""
    return "any" if bound is None else f"{bound:g}" if bound < 100_000 else f"{bound:.0f}"


def _unquoted(text: str) -> str:
    """Return the text inside a JSON string, which is how a hyperparameter that was encoded twice arrives."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    value = json_or_text(text)
    return value if isinstance(value, str) else text


def _refuse(text: str) -> object:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    """Return a JSON number, refusing one too great for a float."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too great")
    return value


# SageMaker's toolkit hands a hyperparameter on as Python prints it; as text, "False" would be true.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def json_or_text(text: str) -> object:
    """Return the JSON value if `text` is one (or Python's True, False or None), else the text."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _to_bool(value: object) -> bool:
    """Return a truth value from a bool or one of the words for it."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    word = str(value).lower()
    if not isinstance(value, (bool, str)) or word not in words:
        raise ValueError("not a truth value")
    return words[word]


def _to_int(value: object) -> int:
    """Return a whole number; 6.5, 64.0, True and "1_000" are none."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,40}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("not a whole number")


def _to_float(value: object) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or (isinstance(value, str) and "_" in value):
        raise ValueError("not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("too great") from error
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _to_channels(value: object) -> dict[str, str]:
    """Return channels from NAME=PATH, from a JSON object as text, or from a mapping."""
    if isinstance(value, str):
        if value.startswith("{"):
            value = json_or_text(value)
        else:
            name, _, path = value.partition("=")
            value = {name.strip(): path.strip()}
    if not isinstance(value, Mapping):
        raise ValueError("not channels")  # noqa: TRY004 - what `convert` promises
    channels = {name: str(path) if isinstance(path, Path) else path for name, path in value.items()}
    for name, path in channels.items():
        if not (isinstance(name, str) and name and "/" not in name and isinstance(path, str) and path):
            raise ValueError("not a channel")
        if (problem := s3.problem_of(path)) is not None:
            raise WrongAddress(problem)
    return channels
