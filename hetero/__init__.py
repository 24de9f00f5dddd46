"""hetero: train on heterogeneous clusters. CPU hosts prepare the input, GPU hosts only train."""

from __future__ import annotations

import importlib
import os
from typing import Any

from hetero import errors
from hetero.errors import (
    DataServiceLost,
    EngineError,
    HeteroError,
    InputError,
    JobFileError,
    PeerNeverCame,
    SettingsError,
    Stopped,
    TopologyError,
    TrainerLost,
)
from hetero.job import InputContext, Job, TrainContext

# Read by gRPC when it is first imported. Its own resolver asks name servers even for names that /etc/hosts has: where
# none answers, as on a host whose network is cut, each new connection would wait for them.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

__version__ = "0.1.0"

__all__ = [
    "DataServiceLost",
    "EngineError",
    "HeteroError",
    "InputContext",
    "InputError",
    "Job",
    "JobFileError",
    "PeerNeverCame",
    "SettingsError",
    "Stopped",
    "TopologyError",
    "TrainContext",
    "TrainerLost",
    "__version__",
    "errors",
    "inputs",
    "torch",
    "training",
]


def __getattr__(name: str) -> Any:
    # These lead to TensorFlow or PyTorch, so they are imported when a job first names them.
    if name in ("inputs", "torch", "training"):
        return importlib.import_module(f"hetero.{name}")
    raise AttributeError(f"module 'hetero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
