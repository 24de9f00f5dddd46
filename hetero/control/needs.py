"""What a job needs of its hosts to begin, and what data hosts it needs to go on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetero.control.config import CoordinatorConfig
from hetero.control.member import Member


def unmet(
    config: CoordinatorConfig, members: Mapping[str, Member], endpoints: Collection[str]
) -> list[tuple[str, str]]:
    """List what training still waits for: (host, what)."""
    missing = [(n, f"trainer host {n} did not come") for n in config.trainers if not members[n].registered]
    data = [members[name] for name in config.data]
    if any(m.report.workers_alive > 0 and m.registered and not m.barren for m in data) or not data:
        absent = [name for name in config.required_endpoints if data and name not in endpoints]
        return missing + [(data[0].name, f"{data[0].name} did not announce its {name}") for name in absent]
    for member in data:
        what = "has no living worker" if member.registered else "did not come"
        missing.append((member.name, f"data host {member.name} {what}"))
    return missing


def lost_data(
    config: CoordinatorConfig, members: Mapping[str, Member], *, in_time: bool
) -> tuple[list[Member], str] | None:
    """Return which data hosts the job cannot do without are lost, and a sentence about it; None if it can go on.

    Args:
        config: The job; it has data hosts.
        members: All hosts by name.
        in_time: Whether hosts that did not come yet still may.
    """
    data = [members[name] for name in config.data]
    if data[0].gone:
        return data[:1], f"data host {data[0].name}, which runs the coordinator, {data[0].why_gone(config.lease_s)}"
    if any(not member.barren and (member.registered or in_time) for member in data):
        return None
    reasons = "; ".join(f"{member.name} {member.why_gone(config.lease_s)}" for member in data)
    return data, f"no data host is left that could prepare input: {reasons}"
