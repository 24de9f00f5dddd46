"""What a job needs of its hosts to begin, and what data hosts it needs to go on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetero.control.config import CoordinatorConfig
from hetero.control.member import Member
from hetero.control.state import first_rank_key


def chief_of(config: CoordinatorConfig, endpoints: Mapping[str, str]) -> str:
    """Return the trainer host of rank 0: the one that mpirun gave it, else the first one."""
    return next((name for name in config.trainers if endpoints.get(first_rank_key(name)) == "0"), config.trainers[0])


def unmet(
    config: CoordinatorConfig, members: Mapping[str, Member], endpoints: Collection[str]
) -> list[tuple[str, str]]:
    """List what training still waits for: (host, what)."""
    missing = [(n, f"trainer host {n} did not come") for n in config.trainers if not members[n].registered]
    data = [members[name] for name in config.data]
    idle = [m for m in data if m.barren or not m.registered or m.report.workers_alive == 0]
    if not idle or (len(idle) < len(data) and not config.sharded):
        absent = [name for name in config.required_endpoints if data and name not in endpoints]
        return missing + [(data[0].name, f"{data[0].name} did not announce its {name}") for name in absent]
    for member in idle:
        what = "has no living worker" if member.registered else "did not come"
        missing.append((member.name, f"data host {member.name} {what}"))
    return missing


def lost_data(
    config: CoordinatorConfig, members: Mapping[str, Member], *, in_time: bool, training: bool
) -> tuple[list[Member], str] | None:
    """Return which data hosts the job cannot do without are lost, and a sentence about it; None if it can go on.

    Args:
        config: The job; it has data hosts.
        members: All hosts by name.
        in_time: Whether hosts that did not come yet still may.
        training: Whether training has begun. Until then local workers of trainer hosts count for nothing: what fails on
            every data host is said at once.
    """
    data = [members[name] for name in config.data]
    if data[0].gone:
        return data[:1], f"data host {data[0].name}, which runs the coordinator, {data[0].why_gone(config.lease_s)}"
    if any(not member.barren and (member.registered or in_time) for member in data):
        return None
    if training and any(members[name].helps for name in config.trainers):
        return None
    reasons = "; ".join(f"{member.name} {member.why_gone(config.lease_s)}" for member in data)
    return data, f"no data host is left that could prepare input: {reasons}"
