"""What a start takes without hetero: a plain process that imports TensorFlow and builds the demo's model.

Runs examples/digits/job.py itself, with stand-ins where it names hetero, so that imports and model are those of the job
and nothing of hetero is loaded. Prints one JSON line: when each moment came, seconds since 1970.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

moments = {"python": time.time()}


class StandIn:
    """Whatever the job file does with hetero: as a decorator it gives the function back, else itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **_: Any) -> Any:
        """Return the decorated function, or this."""
        return args[0] if len(args) == 1 and callable(args[0]) else self


def fit(*_: Any, model: Any, **__: Any) -> None:
    """Stand in for `hetero.training.fit`: the model is built, which is all."""
    moments["model"] = time.time()
    print(json.dumps({**moments, "parameters": model.count_params()}), flush=True)
    os._exit(0)  # an orderly end takes time that nobody asked for


names = {
    "hetero": ["Job", "inputs", "training"],
    "hetero.inputs": ["digits", "tfrecord"],
    "hetero.training": ["evaluate"],
}
for module, attributes in names.items():
    sys.modules[module] = ModuleType(module)
    sys.modules[module].__dict__.update({name: StandIn() for name in attributes})
sys.modules["hetero.training"].__dict__["fit"] = fit
job = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "digits" / "job.py"))
moments["tensorflow"] = time.time()
job["train"](SimpleNamespace(seed=0))
