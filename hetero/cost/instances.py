"""SageMaker's training instance types: vCPUs, memory, GPUs.

The figures are in `instances.json`, which `tests/unit/cost/make_instances.py` writes. They are Amazon EC2's own
(answers of DescribeInstanceTypes, as the package moto carries them) for the names that SageMaker's API accepts for
training jobs.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import SettingsError

_FILE = Path(__file__).with_name("instances.json")
_CLOSE = 3


@dataclass(frozen=True)
class Instance:
    """What a machine of one type has.

    Args:
        vcpus: Hardware threads.
        memory_gib: Main memory.
        gpus: GPUs as the driver counts them; 0 for machines with other accelerators.
    """

    vcpus: int
    memory_gib: float
    gpus: int


@functools.cache
def instances() -> Mapping[str, Instance]:
    """Return all known types by their name, such as ml.c5.xlarge."""
    listed = json.loads(_FILE.read_text(encoding="utf-8"))["types"]
    return {name: Instance(*figures) for name, figures in listed.items()}


def instance(name: str) -> Instance:
    """Return what a type has.

    Args:
        name: For example ml.c5.18xlarge.

    Raises:
        SettingsError: There is no such type here; the message names types that are written much alike.
    """
    known = instances()
    if name not in known:
        raise SettingsError([f"instance type {name!r} is not known; it needs {near(name)}."])
    return known[name]


def vcpus(name: str) -> int:
    """Return the number of vCPUs of a type; errors as of `instance`."""
    return instance(name).vcpus


def near(name: str) -> str:
    """Return known names that are much like this one, as the end of a sentence on what is needed instead."""
    known = instances()
    if f"ml.{name}" in known:
        return f"SageMaker's name for it, ml.{name}"
    family = name.rpartition(".")[0]
    same = [other for other in known if family and other.rpartition(".")[0] == family]
    close = difflib.get_close_matches(name, same or known, n=_CLOSE, cutoff=0.0 if same else 0.6)
    if not close:
        return "one of SageMaker's training instance types, such as ml.c5.18xlarge"
    return f"a training instance type such as {', '.join(close)}"
