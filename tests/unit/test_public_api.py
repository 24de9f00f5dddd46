"""The public surface is a tested list, and naming it costs nothing: no heavy library comes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import hetero

LAZY = {"inputs", "torch", "training"}
HEAVY = {"tensorflow", "tensorflow_io", "keras", "horovod", "torch", "grpc", "numpy", "rich", "typer", "psutil"}
PROBE = """
import json, sys, time
started = time.process_time()
import {module}
took_s = time.process_time() - started
print(json.dumps([took_s, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def import_alone(module: str) -> tuple[float, set[str]]:
    """Import a module in a fresh interpreter; return the seconds it took and the top-level names loaded by then."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, timeout=60, check=True
    )
    took_s, loaded = json.loads(done.stdout)
    return took_s, set(loaded)


def test_the_public_names_are_those_of_the_namespace() -> None:
    classes = {
        name
        for name, value in vars(hetero).items()
        if not name.startswith("_") and isinstance(value, type) and value.__module__.startswith("hetero.")
    }
    assert hetero.__all__ == sorted(classes | LAZY | {"errors", "__version__"})
    assert dir(hetero) == hetero.__all__


def test_every_error_is_public_or_one_that_only_launchers_meet() -> None:
    kinds = {
        name
        for name, value in vars(hetero.errors).items()
        if isinstance(value, type) and issubclass(value, hetero.errors.HeteroError)
    }
    hidden = {"ChildFailed", "CoordinatorUnreachable", "PeerFailed", "PortInUse", "Unauthorised"}
    assert kinds - set(hetero.__all__) == hidden


def test_every_public_name_can_be_had_and_no_other() -> None:
    for name in hetero.__all__:
        assert getattr(hetero, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        hetero.nonsense  # noqa: B018


def test_importing_hetero_takes_under_150_ms_of_cpu_and_loads_nothing_heavy() -> None:
    runs = [import_alone("hetero") for _ in range(4)]
    assert min(took_s for took_s, _ in runs) < 0.15
    assert not runs[0][1] & HEAVY


@pytest.mark.parametrize("module", ["hetero.launcher", "hetero.cli.main"])
def test_launchers_and_the_command_line_load_neither_tensorflow_nor_horovod(module: str) -> None:
    _, loaded = import_alone(module)
    assert not loaded & {"tensorflow", "tensorflow_io", "keras", "horovod", "sagemaker_training", "boto3"}


@pytest.mark.parametrize(("set_already", "expected"), [({}, "native"), ({"GRPC_DNS_RESOLVER": "ares"}, "ares")])
def test_grpc_asks_the_system_for_host_names_unless_told_otherwise(set_already: dict[str, str], expected: str) -> None:
    code = "import hetero, os; print(os.environ['GRPC_DNS_RESOLVER'])"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_DNS_RESOLVER"} | set_already
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
