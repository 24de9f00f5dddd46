"""What the feed is told when the job's code has failed in a worker."""

from __future__ import annotations

import re
import sys
import time
import traceback
from typing import Any

from hetero.inputs import s3
from hetero.process.failure import Failure

_TRACEBACK_LINES = 40
_MESSAGE_CHARS, _TRACEBACK_CHARS = 4_000, 20_000
# How TensorFlow names the operation that calls back into Python.
_PYTHON_OP = re.compile(r"\{\{node [^}]*?(Eager)?PyFunc[^}]*\}\}")


def cause_of(error: BaseException, *, host: str, process: str, where: str = "") -> dict[str, Any]:
    """Describe an exception; never raises, whatever the exception's own methods do.

    Args:
        error: The exception.
        host: Name of this host.
        process: Name of this process.
        where: What it was working on; stands behind the message.

    Returns:
        A `Failure` as JSON values; its text is valid Unicode, `traceback` has at most 40 lines, the last ones.
    """
    text = _text(error)
    failure = Failure(
        host=host,
        process=process,
        time_s=time.time(),
        exception=_clean(type(error).__name__, _MESSAGE_CHARS),
        message=" ".join(
            filter(None, (_clean(_place(error, text) + text, _MESSAGE_CHARS), s3.hint(text), where and f"[{where}]"))
        ),
        traceback=_traceback(error),
    )
    return failure.to_dict()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failed:  # a broken __str__ must not hide the failure
        return f"(its text cannot be had: __str__ raised {type(failed).__name__})"


def _place(error: BaseException, text: str) -> str:
    """Say where to look if TensorFlow wraps what a Python function of the job has raised."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(error, tf.errors.OpError):
        return ""
    operation = _PYTHON_OP.search(text)
    if operation is None:
        return ""
    caller = "tf.py_function" if operation[1] else "tf.numpy_function or Dataset.from_generator"
    return f"In Python code that tf.data calls through {caller}: "


def _traceback(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("hetero."):
        trace = trace.tb_next  # begin with the job's own code
    try:
        lines = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).splitlines()
    except BaseException as failed:
        lines = [f"(the traceback cannot be had: {type(failed).__name__})"]
    text = "\n".join(lines[-_TRACEBACK_LINES:])
    return _clean(text[-_TRACEBACK_CHARS:], _TRACEBACK_CHARS)


def _clean(text: str, chars: int) -> str:
    """Shorten it, and take out what cannot be sent as UTF-8."""
    return text[:chars].encode("utf-8", "backslashreplace").decode()
