"""For whom the coordinator stays when its job is over: who finds nobody there would take it for a loss. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.control.state import JobState

FAREWELL_S = 1.5
"""How long the coordinator outlives the end at least, for whoever still has to hear of it."""


def patience_s(state: JobState, lease_s: float, start_timeout_s: float, *, stopped: bool) -> dict[str, float]:
    """Return how long to wait for each host, from now.

    A peer whose link is cut just then has a lease from its last sign of life. One that has not come yet, as a data host
    may after a short training, has a lease too, but not longer than the start may take.

    Args:
        state: The job at its end.
        lease_s: `--lease-s`.
        start_timeout_s: `--start-timeout-s`.
        stopped: Whether this host was told to stop: whoever did that does not wait for hosts that never came.
    """
    to_come_s = 0.0 if stopped else min(lease_s, start_timeout_s - state.uptime_s)
    return {host.name: max(FAREWELL_S, lease_s - host.age_s if host.registered else to_come_s) for host in state.hosts}


def left_s(state: JobState, patience: Mapping[str, float], own: str) -> float:
    """Return how long after the end somebody is still waited for, in seconds; 0 if nobody is.

    Args:
        state: The job as it is known now.
        patience: What `patience_s` returned at the end.
        own: The coordinator's host.
    """
    waited_for = [host.name for host in state.hosts if not (host.left or host.lost or host.name == own)]
    return max((patience.get(name, FAREWELL_S) for name in waited_for), default=0.0)
