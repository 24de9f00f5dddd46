"""Training in a rank: Horovod, the built-in loop, and the measuring of steps.

Importing this package loads no TensorFlow and no Horovod; `fit` and `evaluate` load TensorFlow when they are
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero.training.meter import MeterResult, StepMeter

if TYPE_CHECKING:
    from hetero.training.loop import evaluate, fit

__all__ = ["MeterResult", "StepMeter", "evaluate", "fit"]


def __getattr__(name: str) -> Any:
    """Load the loop, and with it TensorFlow, on first use."""
    if name in ("fit", "evaluate"):
        from hetero.training import loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
