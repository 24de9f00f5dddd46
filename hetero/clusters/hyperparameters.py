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
        If `argv` is just what the toolkit makes of the hyperparameters: what `as_flags` makes of them. Else, as when
        other arguments stand there too, `argv` unchanged.
    """
    own = _own(hyperparameters)
    if list(argv) != [part for name, value in own.items() for part in (_flag(name), _printed(value))]:
        return list(argv)
    return as_flags(hyperparameters)


def as_flags(hyperparameters: Mapping[str, object]) -> list[str]:
    """Return `--name=value` for each hyperparameter but the toolkit's: a text as it is, anything else as JSON."""
    own = _own(hyperparameters).items()
    return [f"{_flag(name)}={value if isinstance(value, str) else json.dumps(value)}" for name, value in own]


def is_toolkits_own(name: str) -> bool:
    """Return whether a hyperparameter of this name is the toolkit's, and does not come to the launcher."""
    return name.startswith(_TOOLKITS_OWN)


def _own(hyperparameters: Mapping[str, object]) -> dict[str, object]:
    """Return the values that come to the launcher, in the toolkit's order."""
    named = sorted(hyperparameters.items())
    return {name: _decoded(value) for name, value in named if name and not is_toolkits_own(name)}


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
