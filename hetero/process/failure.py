"""Why a process failed, and which failure of several came first.

A child that ends by an exception writes it to a file of its own (`record_exception`); its owner reads it (`read_error`)
and adds what only an owner sees: exit code, signal, last lines. The earliest failure in time is the root cause.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

from hetero.errors import HeteroError
from hetero.inputs import s3

SAGEMAKER_FAILURE_CHARS = 1024
_SENTENCE_CHARS = 500
_TRACEBACK_CHARS = 20_000


@dataclass(frozen=True)
class Failure:
    """One process that ended badly.

    Args:
        host: Name of its host.
        process: Its name there.
        time_s: When it failed, seconds since the epoch: the exception's time where it is known, else the exit's.
        exit_code: What it exited with; None if a signal ended it or it has not ended yet.
        signal: Name of the signal that ended it, such as "SIGKILL".
        exception: Type of the exception, such as "ValueError".
        message: Text of the exception.
        traceback: Its traceback.
        last_lines: End of its output, oldest first.
        secondary: True if it only follows from the failure of a peer.
        suggested_exit_code: The exit code that the exception asks its launcher for.
    """

    host: str
    process: str
    time_s: float
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    message: str | None = None
    traceback: str | None = None
    last_lines: tuple[str, ...] = ()
    secondary: bool = False
    suggested_exit_code: int | None = None

    def describe(self) -> str:
        """Return one sentence, cause first."""
        where = f"{self.process} on {self.host}" if self.host else self.process
        if self.exception is not None:
            how = self._how()
            return f"{self._exception_text()} ({where}{', ' + how if how else ''})"
        if self.signal is not None:
            hint = " (out of memory?)" if self.signal == "SIGKILL" else ""
            return f"{where} was killed by {self.signal}, which its launcher did not send{hint}"
        if self.message is not None:
            return f"{_shorten(self.message, _SENTENCE_CHARS)} ({where})"
        code = "with an unknown exit status" if self.exit_code is None else f"with exit code {self.exit_code}"
        last = next((line.strip() for line in reversed(self.last_lines) if line.strip()), None)
        said = "without a word" if last is None else f"its last line: {_shorten(last, _SENTENCE_CHARS)}"
        return f"{where} ended {code}, {said}"

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as JSON values."""
        return {**asdict(self), "last_lines": list(self.last_lines)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Failure:
        """Build a failure from `to_dict`'s values; unknown keys are ignored, so versions may differ.

        Raises:
            ValueError: host, process or time_s is missing or a value has the wrong type.
        """
        try:
            known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
            known["time_s"] = float(known["time_s"])
            known["last_lines"] = tuple(str(line) for line in known.get("last_lines") or ())
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a failure record: {values!r:.200} ({error!r})") from error

    def _exception_text(self) -> str:
        text = f"{self.exception}: {self.message}" if self.message else str(self.exception)
        return _shorten(text, _SENTENCE_CHARS)

    def _how(self) -> str:
        if self.signal is not None:
            return f"killed by {self.signal}"
        return "" if self.exit_code is None else f"exit code {self.exit_code}"


def record_exception(
    path: Path,
    exc: BaseException,
    *,
    host: str,
    process: str,
    secondary: bool = False,
    exit_code: int | None = None,
) -> Failure:
    """Write why this process is about to end, for its owner to read; never raises.

    Args:
        path: The error file (`ChildSpec.error_path`); it appears whole or not at all.
        exc: The exception.
        host: Name of this host.
        process: Name of this process.
        secondary: True if the exception only follows from the death of a peer.
        exit_code: What the launcher should exit with; default: that of an error of hetero, else 1.

    Returns:
        What was written.
    """
    import traceback  # only processes that fail pay for it

    if exit_code is None:
        exit_code = exc.exit_code if isinstance(exc, HeteroError) else 1  # others mean something else by that name
    text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    try:
        message = str(exc)
    except Exception as error:  # a broken __str__ must not hide the failure
        message = f"(its text cannot be had: {error!r})"
    if hint := s3.hint(message):
        message = f"{message} {hint}"
    failure = Failure(
        host=host,
        process=process,
        time_s=time.time(),
        exception=type(exc).__name__,
        message=message,
        traceback=text[-_TRACEBACK_CHARS:],
        secondary=secondary,
        suggested_exit_code=exit_code,
    )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(failure.to_dict()), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        print(f"cannot write {path}: {error}; the failure is known from the output only", file=sys.stderr, flush=True)
    return failure


def read_error(path: Path | None) -> Failure | None:
    """Return what a child wrote with `record_exception`; None if there is no such file or it is not whole."""
    if path is None:
        return None
    try:
        return Failure.from_dict(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError):
        return None


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Return the root cause: the earliest failure; a secondary one only if there is nothing else.

    Raises:
        ValueError: There are no failures.
    """
    return min(failures, key=lambda failure: (failure.secondary, failure.time_s))


def sagemaker_text(failure: Failure) -> str:
    """Return the text for SageMaker's `output/failure`: at most 1,024 characters, cause first.

    SageMaker shows the first 1,024 characters of that file as the job's FailureReason. What room the sentence leaves
    goes to the end of the traceback, or of the output.
    """
    text = failure.describe()
    detail = failure.traceback or "\n".join(failure.last_lines)
    room = SAGEMAKER_FAILURE_CHARS - len(text) - 1
    if detail.strip() and room > 40:
        detail = detail.rstrip()
        text += "\n" + (detail if len(detail) <= room else "..." + detail[-(room - 3) :])
    return text[:SAGEMAKER_FAILURE_CHARS]


def _shorten(text: str, chars: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= chars else text[: chars - 3] + "..."
