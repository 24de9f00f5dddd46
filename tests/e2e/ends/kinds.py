"""The kinds of faults that a random schedule draws from, and what each may bring to every host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ends import faults
from ends.faults import Fault, cut_for, end_alone, kill, send

PARTS = ("chief", "other", "first", "second")
NAMES = {"chief": "algo-1", "first": "algo-2", "other": "algo-3", "second": "algo-4"}
TRAINERS = ("chief", "other")
COORDINATOR_SILENT = r"^DataServiceLost: The coordinator at \S+ has not answered"


@dataclass(frozen=True)
class Consequence:
    """What a fault may bring to a host: the launcher's exit code, and a pattern for output/failure (None: no file)."""

    code: int | None
    cause: str | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of fault on a host.

    Attributes:
        name: What it is called.
        on: The host.
        fault: What injects and proves it.
        fatal: Whether the job cannot go on after it.
        brings: What it may bring to each host; a host that is not named ends well by it.
        engines: Under which engines there is such a thing.
        loses_rows: Whether rows may be lost by it under tf_data.
        needs: What its host needs from the start: "clock", "disk".
    """

    name: str
    on: str
    fault: Fault
    fatal: bool = False
    brings: Mapping[str, tuple[Consequence, ...]] = field(default_factory=dict)
    engines: tuple[str, ...] = ("grpc", "tf_data")
    loses_rows: bool = False
    needs: str = ""


def all_kinds() -> list[Kind]:
    """Return every kind of fault."""
    return [*_harmless(), *_fatal()]


def _harmless() -> list[Kind]:
    kinds = [Kind("coordinator killed", "first", kill("coordinator"))]
    kinds += [Kind("coordinator told to end", "first", end_alone("coordinator"))]
    kinds += [Kind("dispatcher killed", "first", kill("dispatcher"), engines=("tf_data",))]
    for part in ("first", "second"):
        kinds += [
            Kind("worker killed", part, kill("worker-0"), loses_rows=True),
            Kind("worker told to end", part, end_alone("worker-0"), loses_rows=True),
            Kind("feed killed", part, kill("feed"), engines=("grpc",)),
            Kind("feed told to end", part, end_alone("feed"), engines=("grpc",)),
            Kind("disk full", part, faults.disk_full, needs="disk"),
        ]
    for part in PARTS:
        kinds.append(Kind("link cut for 2 s", part, cut_for(2.0)))
        kinds += [
            Kind(f"clock {seconds // 3600:+d} h", part, faults.clock_jumps(seconds), needs="clock")
            for seconds in (faults.CLOCK_JUMP_S, -faults.CLOCK_JUMP_S)
        ]
    kinds += [
        Kind(name, "second", fault, brings={"second": own}, loses_rows=True)
        for name, fault, own in (
            ("launcher killed", kill("launcher"), (_killed(),)),
            ("SIGTERM to the launcher", send("launcher"), (_stopped(),)),
            ("unplugged", faults.unplug, (_cut_off(),)),
            ("power cut", faults.power_cut, (Consequence(None),)),
        )
    ]
    return kinds


def _fatal() -> list[Kind]:
    kinds = []
    for part in TRAINERS:
        name = NAMES[part]
        raised = Consequence(1, r"^ValueError: the loss is not a number")
        died = Consequence(1, rf"^rank-0 on {name} was killed by SIGKILL")
        kinds += [
            Kind("training raises", part, faults.training_raises, True, _to(TRAINERS, raised), engines=("grpc",)),
            Kind("rank killed", part, kill("rank-0"), True, _to(TRAINERS, died)),
            Kind(
                "rank out of memory",
                part,
                faults.memory_runs_out_in_cgroup,
                True,
                _to(TRAINERS, died),
                engines=("grpc",),
            ),
        ]
        stopped = Consequence(143, rf"SIGTERM.*{name}|{name}.*SIGTERM")
        kinds.append(Kind("SIGTERM to the launcher", part, send("launcher"), True, _to(TRAINERS, stopped)))
        silent = Consequence(5, rf"trainer host \S*.*{name}.* gave no sign of life")
        for what, fault, own in _ways_to_vanish(_cut_off()):
            kinds.append(Kind(what, part, fault, True, _to(PARTS, silent) | {part: own}))
    gone = Consequence(4, rf"{COORDINATOR_SILENT}|data host algo-2, which runs the coordinator")
    alone = Consequence(5, r"gave no sign of life")
    for what, fault, own in _ways_to_vanish(alone):
        kinds.append(Kind(what, "first", fault, True, _to(PARTS, gone) | {"first": own}))
    told = Consequence(4, r"SIGTERM")
    kinds.append(
        Kind("SIGTERM to the launcher", "first", send("launcher"), True, _to(PARTS, told) | {"first": (_stopped(),)})
    )
    return kinds


def _ways_to_vanish(unplugged: Consequence) -> tuple[tuple[str, Fault, tuple[Consequence, ...]], ...]:
    return (
        ("launcher killed", kill("launcher"), (_killed(),)),
        ("unplugged", faults.unplug, (unplugged,)),
        ("power cut", faults.power_cut, (Consequence(None),)),
    )


def _to(parts: Sequence[str], consequence: Consequence) -> dict[str, tuple[Consequence, ...]]:
    return dict.fromkeys(parts, (consequence,))


def _killed() -> Consequence:
    return Consequence(-9, r"ExitCode -9")


def _stopped() -> Consequence:
    return Consequence(143, r"SIGTERM")


def _cut_off() -> Consequence:
    return Consequence(4, COORDINATOR_SILENT)
