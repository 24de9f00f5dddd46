"""What the ledger keeps of one host, and of one failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetero.control.state import HostReport, HostState, host_state, report_from_json, report_to_json


@dataclass
class Member:
    """One expected host; `heard_s` is the uptime of its last sign of life.

    A host that `left_early` was a data host that left before the job's end; one that `lapsed` was silent for a lease.
    """

    name: str
    role: str
    address: str = ""
    registered: bool = False
    seen: bool = False  # a process of it has announced something, perhaps before its launcher has registered
    heard_s: float = 0.0
    report: HostReport = field(default_factory=HostReport)
    left: bool = False
    left_early: bool = False
    leave_reason: str = ""
    lapsed: bool = False
    launcher: str = ""  # which one has registered; not known to a coordinator that was started again
    workers_lapsed: int = 0  # whose tasks were given up when the host fell silent, should it come back or not

    @property
    def gone(self) -> bool:
        """Whether the host itself is not there any more."""
        return self.left or self.lapsed

    def arrive(self, address: str, launcher: str, report: HostReport, uptime_s: float, *, anew: bool) -> None:
        """Note that the host's launcher is there; `anew`: whatever was thought of the host before is over."""
        self.registered, self.address, self.launcher = True, address, launcher
        self.report, self.heard_s = report, uptime_s
        if anew:
            self.left = self.left_early = self.lapsed = False
            self.leave_reason = ""

    def is_silent(self, uptime_s: float, lease_s: float) -> bool:
        """Return whether something of the host was there, and has given no sign of life for a lease."""
        return (self.registered or self.seen) and not self.gone and uptime_s - self.heard_s > lease_s

    def other_than(self, launcher: str) -> str:
        """Return a sentence if another launcher, which lives, plays this trainer host; else an empty text.

        The ranks of two would share the rows of an epoch, and each call its part the whole.
        """
        known = self.registered and not self.gone and "" not in {self.launcher, launcher}
        if self.role != "trainer" or not known or self.launcher == launcher:
            return ""
        return (
            f"another launcher plays host {self.name!r} already: start one on each host, after the end of the last one"
        )

    @property
    def barren(self) -> bool:
        """Whether the host cannot prepare input any more."""
        return self.gone or self.report.workers_gone_for_good

    @property
    def helps(self) -> bool:
        """Whether this is a trainer host with local workers that prepare input, or will again."""
        if self.role != "trainer" or self.gone or self.report.workers_gone_for_good:
            return False
        workers = [process for process in self.report.processes if process.name.startswith("worker-")]
        return any(worker.state in ("running", "waiting") for worker in workers)

    def lapse(self) -> None:
        """Give the host up; what its workers had in hand is lost even if it comes back."""
        self.lapsed = True
        if self.role == "data":
            self.workers_lapsed += max(1, self.report.workers_alive)

    def state(self, uptime_s: float) -> HostState:
        """Return what is pushed to everybody."""
        return host_state(
            self.name,
            self.role,
            replace(self.report, workers_lost=self.report.workers_lost + self.workers_lapsed),
            address=self.address,
            registered=self.registered,
            left=self.left,
            # A trainer host can do without workers of its own.
            lost=self.lapsed or self.left_early or (self.role == "data" and self.report.workers_gone_for_good),
            leave_reason=self.leave_reason,
            age_s=uptime_s - self.heard_s,
        )

    def why_gone(self, lease_s: float) -> str:
        """Return the end of a sentence that starts with the host's name."""
        if self.left:
            return f"left before the end: {self.leave_reason or 'it gave no reason'}"
        if self.lapsed:
            return f"gave no sign of life for {lease_s:g} s"
        return "has no worker left and cannot start another" if self.registered else "did not come"

    def to_json(self) -> dict[str, Any]:
        """Return the member as JSON values."""
        return {**vars(self), "report": report_to_json(self.report)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], heard_s: float) -> Member:
        """Rebuild a member from `to_json`, with a new sign of life."""
        return cls(**{**value, "report": report_from_json(value["report"]), "heard_s": heard_s})


@dataclass
class ReportedFailure:
    """A failure and the uptime at which it happened."""

    at_s: float
    cause: dict[str, object]


def note(host: str, message: str, time_s: float, suggested_exit_code: int | None = None) -> dict[str, object]:
    """Write a cause that no process reported, with the fields that a reported one has."""
    return {
        "host": host,
        "process": "launcher",
        "time_s": time_s,
        "exit_code": None,
        "signal": None,
        "exception": None,
        "message": message,
        "traceback": None,
        "last_lines": [],
        "secondary": False,
        "suggested_exit_code": suggested_exit_code,
    }


def weighty(report: HostReport) -> tuple[int, int, int, bool]:
    """Return the part of a report that everybody must hear of at once."""
    return report.ranks, report.workers_alive, report.workers_lost, report.workers_gone_for_good


def seconds(value: float) -> float:
    """Return a duration that a host told, made harmless."""
    return max(0.0, value) if math.isfinite(value) else 0.0
