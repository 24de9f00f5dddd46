"""Processes of one host: start, hear, restart, stop, reap, and say which failure came first."""

from __future__ import annotations

from hetero.process.child import Child, ChildExit, ChildSpec, die_with_parent
from hetero.process.failure import Failure, first_failure, read_error, record_exception, sagemaker_text
from hetero.process.group import ChildEnded, ChildRestarted, ChildState, ChildStatus, GroupState
from hetero.process.output import ConsoleSink, LineSink
from hetero.process.supervisor import Supervisor

__all__ = [
    "Child",
    "ChildEnded",
    "ChildExit",
    "ChildRestarted",
    "ChildSpec",
    "ChildState",
    "ChildStatus",
    "ConsoleSink",
    "Failure",
    "GroupState",
    "LineSink",
    "Supervisor",
    "die_with_parent",
    "first_failure",
    "read_error",
    "record_exception",
    "sagemaker_text",
]
