"""What the runs of headline.py come to: medians and ranges of pairs, what is required of them, tables. Pure.

Runs are paired by their round: those of one round came one after the other, so that what else the machine does is the
same for all of them, more or less. A share or a speed-up is a quotient within a round; its median over the rounds
counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headline_cases import BATCH_ROWS, CONTROL, HETEROGENEOUS, HOMOGENEOUS, SHAPES

from hetero.cost.compare import Comparison, Offer
from hetero.cost.prices import PriceList

Run = Mapping[str, Any]
FREE, DEVICE = "0", "device"
PUBLIC = {"A": {"speed_up": 2.23, "price_performance": 0.46}, "B": {"speed_up": 6.48, "price_performance": 0.77}}
"""The public figures, 192 to 86 ms and 1193 to 184 ms, for the picture and the tables."""
_SIDES = ("trainer", "data")
LEAST_USED = 0.95
"""A host that got less of its CPUs than this ran beside something else, and is nothing to compare with."""


@dataclass(frozen=True)
class Requirement:
    """What a figure of a part must keep.

    Attributes:
        figure: Its name among the part's figures.
        says: The same in words.
        step: `0`, `device`, or both if empty.
        shape: `A`, or both if empty.
        least, most, above: The bound; one of them is set.
    """

    figure: str
    says: str
    step: str = ""
    shape: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None

    def concerns(self, part: Mapping[str, Any]) -> bool:
        """Tell whether a part has to keep it."""
        return self.step in {"", part["step"]} and self.shape in {"", part["shape"]}

    def broken_by(self, value: float) -> str | None:
        """Return how a value breaks it, None if it does not. What is no number breaks it."""
        if self.least is not None:
            return None if value >= self.least else f"{value:.3f}, required: at least {self.least:g}"
        if self.most is not None:
            return None if value <= self.most else f"{value:.3f}, required: at most {self.most:g}"
        assert self.above is not None
        return None if value > self.above else f"{value:.3f}, required: more than {self.above:g}"


REQUIREMENTS = (
    Requirement("share_of_control", "share of control", FREE, least=0.95),
    Requirement("speed_up", "speed-up", FREE, "A", above=2.2),
    Requirement("price_performance", "price-performance", FREE, "A", above=0.46),
    Requirement("stall", "stall of the simulated accelerator", DEVICE, most=0.01),
    Requirement("receiving", "trainer CPU for receiving over that for preparing", most=0.05),
)


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return median, least and greatest of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "low": min(known), "high": max(known)} if known else None


def pairs(runs: Sequence[Run], first: str, second: str) -> list[tuple[Run, Run]]:
    """Return the runs of two cases that belong to one round, by round."""
    by_round = {(run["round"], run["case"]): run for run in runs}
    rounds = sorted({run["round"] for run in runs})
    found = [(by_round.get((number, first)), by_round.get((number, second))) for number in rounds]
    return [(one, other) for one, other in found if one is not None and other is not None]


def figures_of(runs: Sequence[Run], shape: str, prices: PriceList, control_cost: float | None = None) -> dict[str, Any]:
    """Return the figures of one part.

    Args:
        runs: Its runs, `Measured` as JSON values with the number of their `round`.
        shape: `A` or `B`.
        prices: What the instances that the shape stands for cost.
        control_cost: CPU seconds that preparing 1,000 rows costs, for a part without controls of its own.
    """
    cases = [case for case in (HOMOGENEOUS, HETEROGENEOUS, CONTROL) if any(run["case"] == case for run in runs)]

    def of(case: str, name: str) -> dict[str, float] | None:
        return spread(run[name] for run in of_case(runs, case))

    def each(name: str) -> dict[str, Any]:
        return {case: of(case, name) for case in cases}

    sides = pairs(runs, HOMOGENEOUS, HETEROGENEOUS)
    controls = pairs(runs, CONTROL, HETEROGENEOUS)
    received = [(cost_of(control), run) for control, run in controls]
    if not controls and control_cost is not None:
        received = [(control_cost, run) for run in of_case(runs, HETEROGENEOUS)]
    return {
        **{name: each(name) for name in ("rows_per_s", "step_ms", "step_ms_p95", "input_wait", "cpus", "throttled")},
        "cpu_s_per_1000_rows": {
            case: {side: spread(run["cpu_s_per_1000_rows"][side] for run in of_case(runs, case)) for side in _SIDES}
            for case in cases
        },
        "speed_up": spread(new["rows_per_s"] / old["rows_per_s"] for old, new in sides),
        "price_performance": spread(compared(shape, old, new, prices).price_performance for old, new in sides),
        "share_of_control": spread(run["rows_per_s"] / control["rows_per_s"] for control, run in controls),
        "receiving": spread(run["receiving_cpu_s_per_1000_rows"] / cost for cost, run in received),
        "stall": of(HETEROGENEOUS, "stall"),
        "late": of(HETEROGENEOUS, "late"),
        "stall_homogeneous": of(HOMOGENEOUS, "stall"),
    }


def of_case(runs: Sequence[Run], case: str) -> list[Run]:
    """Return the runs of one case."""
    return [run for run in runs if run["case"] == case]


def cost_of(control: Run) -> float:
    """Return the CPU seconds that preparing 1,000 rows cost a control."""
    return float(control["cpu_s_per_1000_rows"]["trainer"])


def compared(shape: str, homogeneous: Run, heterogeneous: Run, prices: PriceList) -> Comparison:
    """Return what the data hosts brought at the prices of the instances that the shape stands for."""
    instances = SHAPES[shape]
    old, new = (1000 * BATCH_ROWS / run["rows_per_s"] for run in (homogeneous, heterogeneous))
    return Comparison(
        Offer(prices.of(instances.trainer), old), Offer(prices.of({**instances.trainer, **instances.data}), new)
    )


def problems_of(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each requirement that is not kept; one that was not measured is none."""
    found = []
    for part in parts:
        for required in REQUIREMENTS:
            figure = part["figures"][required.figure]
            if required.concerns(part) and figure is not None:
                broken = required.broken_by(figure["median"])
                if broken:
                    found.append(f"{title_of(part)}: {required.says} is {broken}")
    return found


def doubts_of(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each host that prepared input all the time and yet did not get its CPUs."""
    found = []
    for part in parts:
        shape = SHAPES[part["shape"]]
        budgets = {CONTROL: shape.budget_cpus}
        if part["step"] == FREE:
            budgets[HOMOGENEOUS] = shape.trainer_cpus
        for run in part["runs"]:
            budget = budgets.get(run["case"], 0.0)
            if run["cpus"] < LEAST_USED * budget:
                used = f"{run['cpus']:.2f} of {budget:g} CPUs"
                found.append(f"{title_of(part)}, round {run['round'] + 1}: {run['case']} used {used}")
    return found


def title_of(part: Mapping[str, Any]) -> str:
    """Return what tells a part from the others."""
    device = f"simulated accelerator of {part['device_step_ms']:.0f} ms a step" if part["device_step_ms"] else "step 0"
    return f"{part['engine']}, shape {part['shape']}, {device}"
