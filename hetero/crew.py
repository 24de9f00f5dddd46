"""How a part of a host's launcher starts and ends processes in mid-training: local workers, and workers on trial."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.control.client import ControlClient
from hetero.control.state import HostReport
from hetero.errors import HeteroError
from hetero.host import HostConfig, local_key, tuning_key
from hetero.process.child import Child
from hetero.process.group import ChildStatus
from hetero.process.supervisor import Supervisor
from hetero.spec import ProcessSpec

GRACE_S = 2.0
"""How long workers that are stopped in mid-training have to end; `--grace-s`, if that is less."""
_TELL_S = 1.0
_MOST_CHARS = 500  # of what other hosts are told


def _tell_nobody(_: str) -> None:
    """Where the chief need not know."""


@dataclass(frozen=True)
class Crew:
    """What starts and ends the processes, and knows of the host: its life.

    Attributes:
        start: Starts a process; raises HeteroError if that cannot be done.
        give_up: Ends processes for good, and lets the other hosts know that they will not come back.
        serving: Returns how many workers of this host run and have been announced.
        used_cpu_s: Returns the CPU seconds of all processes of this host so far.
        tell: Lets the chief know how many local workers there are and why, as a JSON object.
        tell_tuning: Lets it know what was decided by measuring, as a JSON object.
        children: Returns every process of this host that was ever started.
        living: Returns the children that run; from any thread.
    """

    start: Callable[[ProcessSpec], None]
    give_up: Callable[[Collection[str]], None]
    serving: Callable[[], int]
    used_cpu_s: Callable[[], float]
    tell: Callable[[str], None] = _tell_nobody
    tell_tuning: Callable[[str], None] = _tell_nobody
    children: Callable[[], tuple[ChildStatus, ...]] = tuple
    living: Callable[[], Sequence[Child]] = tuple


def shortened(values: dict[str, Any], *within: str) -> str:
    """Return a JSON object as text that fits an announcement: its `why`, or that of a part of it, is cut."""
    part = values
    for name in within:
        part = part[name]
    while len(text := json.dumps(values, ensure_ascii=False)) > _MOST_CHARS and part["why"]:
        part["why"] = part["why"][: len(part["why"]) * 3 // 4]
    return text


def crew_of(
    config: HostConfig,
    control: ControlClient,
    supervisor: Supervisor,
    *,
    start: Callable[[ProcessSpec], None],
    report: Callable[[], HostReport],
    given_up: set[str],
) -> Crew:
    """Return the crew of a host.

    Args:
        config: The host.
        control: Its connection to the coordinator.
        supervisor: Of its processes.
        start: Starts a process.
        report: Returns what the host tells of itself.
        given_up: Takes the names of processes that are ended for good.
    """

    def give_up(names: Collection[str]) -> None:
        given_up.update(names)
        control.report_now()  # the coordinator takes back what they have in hand
        supervisor.stop(names, min(GRACE_S, config.settings.grace_s))

    def publish(key: str, text: str) -> None:
        with contextlib.suppress(HeteroError):  # the chief writes of its own host at least
            control.publish(key, text, _TELL_S)

    return Crew(
        start=start,
        give_up=give_up,
        serving=lambda: report().workers_alive,
        used_cpu_s=lambda: report().cpu_s,
        tell=lambda text: publish(local_key(config.host), text),
        tell_tuning=lambda text: publish(tuning_key(config.host), text),
        children=supervisor.children,
        living=supervisor.living,
    )
