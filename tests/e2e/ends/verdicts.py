"""The judge of random schedules: it knows what each fault may bring, and looks at what the hosts left.

What a host did must be among what the faults that happened may bring to it, and its output/failure must be explained by
one of them. If none of them was fatal the job must have succeeded, with every row seen once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ends.faults import Injected, Scene
from ends.kinds import NAMES, Consequence, Kind
from ends.running import again_s, by_part, launcher_code, left_on, rows_judged

LEASE_S = 10.0
"""Longer than in the cells: several jobs share few CPUs, and a coordinator that is replaced must be back within it."""
BOUND_S = LEASE_S + 10
START_TIMEOUT_S = 45.0
EPOCHS = 3


@dataclass
class Planned:
    """A fault of a schedule, and what became of it.

    Attributes:
        kind: Which.
        at_s: Seconds after the first step; after the start where `early`.
        early: Whether it may come before training runs.
        injected: When and how it happened, None if it did not.
        attempted: Whether it was begun; one that was begun and not proven may have happened.
        trained: Whether a step had been taken by then.
        why_not: Why it is not proven.
    """

    kind: Kind
    at_s: float
    early: bool = False
    injected: Injected | None = None
    attempted: bool = False
    trained: bool = True
    why_not: str = ""

    def __str__(self) -> str:
        after = "the start" if self.early else "the first step"
        state = "" if self.injected else f" (not proven: {self.why_not.splitlines()[0][:80] if self.why_not else '-'})"
        return f"{self.kind.name} on {self.kind.on} {self.at_s:.1f} s after {after}{state}"


@dataclass
class Verdict:
    """What became of a schedule.

    Attributes:
        seed: Its seed.
        faults: What happened, in words.
        fatal: Whether one of them was fatal.
        codes: Exit codes of the launchers.
        causes: First line of output/failure by host.
        steps: Steps that the ranks took.
        again_s: Seconds from the last fault to the end of the last pause of training, where the job went on.
        out_s: Seconds from the last fault until the last host was out, where it did not.
        seconds: How long all of it took.
        wrong: By kind of mistake, what was wrong: "hang", "left", "code", "cause", "rows", "late".
        logs: End of what the hosts printed, where something was wrong.
    """

    seed: int
    faults: list[str] = field(default_factory=list)
    fatal: bool = False
    codes: dict[str, int | None] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    again_s: float | None = None
    out_s: float | None = None
    seconds: float = 0.0
    wrong: dict[str, list[str]] = field(default_factory=dict)
    logs: str = ""

    def note(self, kind: str, text: str) -> None:
        """Note a mistake."""
        self.wrong.setdefault(kind, []).append(text)


def collect(scene: Scene, ends: Mapping[str, Any], planned: list[Planned], verdict: Verdict) -> None:
    """Note in the verdict how every host ended."""
    cluster = scene.cluster
    last_s = max((one.injected.at_s for one in planned if one.injected), default=0.0)
    for part, host in by_part(cluster).items():
        verdict.codes[part] = launcher_code(ends[host], cluster.log(host))
        output = scene.run_dir(host).parents[1]
        if (output / "failure").exists():
            verdict.causes[part] = (output / "failure").read_text()
        if left := left_on(scene, host):
            verdict.note("left", f"{part}: still runs {left}")
        if verdict.codes[part] == 0 and verdict.causes.get(part) == "":
            verdict.codes[part] = None  # the toolkit wanted to say how its launcher ended, and had no room for it
        if verdict.codes[part] == 0 and not (output / "success").exists():
            verdict.note("code", f"{part}: the launcher ended well, but train did not report success")
    verdict.steps = scene.steps()
    verdict.out_s = round(max(end.ended_s for end in ends.values()) - last_s, 2)


def judge(scene: Scene, planned: list[Planned], verdict: Verdict, engine: str, started_s: float) -> None:
    """Note in the verdict what is wrong."""
    happened = [one for one in planned if one.attempted]
    judge_hosts(happened, verdict)
    succeeded = verdict.codes["chief"] == 0
    whole = EPOCHS if succeeded and (engine == "grpc" or not any(one.kind.loses_rows for one in happened)) else 0
    for problem in rows_judged(scene, whole):
        verdict.note("rows", problem)
    _judge_times(scene, happened, verdict, started_s, succeeded=succeeded)


def judge_hosts(happened: list[Planned], verdict: Verdict) -> None:
    """Compare how each host ended, and what it says, with what the faults may bring."""
    verdict.fatal = any(one.kind.fatal and one.injected for one in happened)
    may_fail = any(one.kind.fatal for one in happened)
    for part, code in verdict.codes.items():
        _judge_host(part, code, verdict, happened, may_succeed=not verdict.fatal, may_fail=may_fail)


def _judge_host(
    part: str, code: int | None, verdict: Verdict, happened: list[Planned], *, may_succeed: bool, may_fail: bool
) -> None:
    """Compare a host's end with all that the faults may bring to it."""
    possible = [consequence for one in happened for consequence in _brought(one, part)]
    hit = any(one.injected and one.kind.brings.get(part) and not one.kind.fatal for one in happened)
    if (may_succeed and not hit) or (may_fail and _ends_well(part, happened)):
        possible.append(Consequence(0))
    full = any(one.kind.needs == "disk" and one.kind.on == part for one in happened)
    if full and hit:
        possible.append(Consequence(None))
    if code not in {consequence.code for consequence in possible}:
        allowed = sorted({str(consequence.code) for consequence in possible})
        verdict.note("code", f"{part}: ended with {code}, not with {' or '.join(allowed)}")
        return
    cause = verdict.causes.get(part)
    patterns = [consequence.cause for consequence in possible if consequence.code == code]
    if cause is None:
        # A host without power writes nothing, one with a full disk cannot.
        if code is not None and None not in patterns and not full:
            verdict.note("cause", f"{part}: ended with {code} without a word in output/failure")
    elif code is not None and not any(pattern and re.search(pattern, cause) for pattern in patterns):
        verdict.note("cause", f"{part}: no fault that happened explains: {cause[:300]}")


def _brought(one: Planned, part: str) -> list[Consequence]:
    found = list(one.kind.brings.get(part, ()))
    if one.early and not one.trained:
        # Who is gone before the others knew him is waited for until the start deadline; and whoever is told to end
        # before the launcher listens just ends.
        hit = one.kind.on == part
        found.append(Consequence(3, "algo-" if hit else NAMES[one.kind.on]))
        if hit and "SIGTERM" in one.kind.name:
            found += [Consequence(143, r"ExitCode|SIGTERM"), Consequence(-15, r"ExitCode -15")]
    return found


def _ends_well(part: str, happened: list[Planned]) -> bool:
    """Return whether a fatal fault lets this host end with 0: what a trainer host reports, data hosts do not repeat."""
    return any(one.kind.fatal and part not in one.kind.brings for one in happened)


def _judge_times(scene: Scene, happened: list[Planned], verdict: Verdict, started_s: float, *, succeeded: bool) -> None:
    proven = [one.injected.at_s for one in happened if one.injected]
    if not proven:
        return
    last_s = max(proven)
    if succeeded:
        verdict.again_s = again_s(scene, last_s, LEASE_S + 5)
        verdict.out_s = None
        if verdict.again_s > BOUND_S:
            verdict.note("late", f"training went on only {verdict.again_s} s after the last fault")
        return
    bound_s = BOUND_S
    if any(one.early and not one.trained for one in happened):
        bound_s = max(bound_s, started_s + START_TIMEOUT_S + BOUND_S - last_s)
    if verdict.out_s is not None and verdict.out_s > bound_s:
        verdict.note("late", f"the last host was out only {verdict.out_s} s after the last fault, not {bound_s:.0f} s")
