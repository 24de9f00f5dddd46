"""The hyperparameters of a SageMaker job as their author wrote them, whatever its toolkit made of them on the way.

The toolkit reads hyperparameters.json and writes each value on the command line as Python prints it: of ["a", "b"] it
makes `['a', 'b']`, of {"a": 1} `a=1`, of null nothing at all, and a text that begins with a dash looks like a flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_TOOLKITS_OWN = ("sagemaker_", "_tuning_objective_metric", "default_user_module_name")


def as_written(argv: Sequence[str], hyperparameters: Mapping[str, object]) -> list[str]:
    """Return a command line with its values as they stand in hyperparameters.json.

    Args:
        argv: The launcher's command line without the program's name.
        hyperparameters: The content of hyperparameters.json: each value a text, JSON or not.

    Returns:
        If `argv` is just what the toolkit makes of the hyperparameters: `--name=value` for each, a text as it is and
        anything else as JSON. Else, as when other arguments stand there too, `argv` unchanged.
    """
    values = {name: _decoded(value) for name, value in sorted(hyperparameters.items())}
    own = {name: value for name, value in values.items() if name and not name.startswith(_TOOLKITS_OWN)}
    if list(argv) != [part for name, value in own.items() for part in (_flag(name), _printed(value))]:
        return list(argv)
    return [f"{_flag(name)}={value if isinstance(value, str) else json.dumps(value)}" for name, value in own.items()]


def _decoded(value: object) -> object:
    try:
        return json.loads(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        return value


def _flag(name: str) -> str:
    return f"--{name}" if len(name) > 1 else f"-{name}"


def _printed(value: object) -> str:
    """Return a value as the toolkit writes it on a command line."""
    if isinstance(value, dict):
        return ",".join(f"{key}={inner}" for key, inner in sorted(value.items()))
    return "" if value is None else str(value)
