"""The picture of headline.py: rows/s, how long the simulated accelerator waits, and what a step costs.

The only module that needs matplotlib (dependency group `bench`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from headline_cases import CONTROL, HETEROGENEOUS, HOMOGENEOUS, SHAPES
from headline_figures import DEVICE, FREE, PUBLIC

mpl.use("Agg")

from matplotlib import pyplot as plt

COLOURS = {HOMOGENEOUS: "#9aa5b1", HETEROGENEOUS: "#1f7a4d", CONTROL: "#ffffff"}
NAMES = {
    HOMOGENEOUS: "trainer host alone",
    HETEROGENEOUS: "with data hosts (hetero)",
    CONTROL: "all these CPUs in one host, without hetero",
}
PUBLIC_COLOUR = "#b3541e"
ENGINES = {"tf_data": "tf.data service", "grpc": "Python workers (grpc)"}
WIDTH = 0.26
Part = Mapping[str, Any]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result.

    Args:
        result: What `--json` writes.
        path: PNG, or what else the name ends with that matplotlib can write.
    """
    free = [part for part in result["parts"] if part["step"] == FREE]
    device = [part for part in result["parts"] if part["step"] == DEVICE]
    shapes = [name for name in SHAPES if any(part["shape"] == name for part in free)]
    figure = plt.figure(figsize=(13, 9.6), layout="constrained")
    figure.suptitle("CPU hosts beside a trainer host: what they bring when input takes CPU", fontsize=17, weight="bold")
    rows = figure.subfigures(2, 1, height_ratios=(1.12, 1), hspace=0.04) if free else [None, figure]
    if free:
        panels = rows[0].subplots(1, len(shapes), squeeze=False)[0]
        for panel, shape in zip(panels, shapes, strict=True):
            _rates(panel, shape, [part for part in free if part["shape"] == shape])
        handles, names = panels[0].get_legend_handles_labels()
        rows[0].legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    below = rows[1].subplots(1, 2 if device and free else 1, squeeze=False)[0]
    if device:
        _stalls(below[0], device)
        if not free:  # else the colours are explained above
            below[0].legend(frameon=False, fontsize=11)
    if free:
        _savings(below[-1], free)
    figure.supxlabel(_about(result), fontsize=9, color="#555555")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _about(result: Mapping[str, Any]) -> str:
    return (
        "One machine: CPU quotas stand for instances, in the ratio of their vCPUs; the accelerator is SIMULATED. "
        f"Data: {result['data']['name']}.\nBars are medians of {result['runs']} alternating runs of "
        f"{result['seconds']:g} s, whiskers go from the least to the greatest. Prices: "
        f"{result['prices'].partition(': ')[0]}."
        + (" DOUBTFUL: something else ran on this machine." if result["doubts"] else "")
    )


def _bars(
    panel: Any,
    at: Sequence[float],
    figures: Sequence[Mapping[str, float]],
    case: str,
    *,
    scale: float = 1.0,
    width: float = WIDTH,
) -> Any:
    middle = [scale * figure["median"] for figure in figures]
    low = [scale * (figure["median"] - figure["low"]) for figure in figures]
    high = [scale * (figure["high"] - figure["median"]) for figure in figures]
    hatch = {"hatch": "///", "edgecolor": "#666666"} if case == CONTROL else {"edgecolor": COLOURS[case]}
    return panel.bar(
        at,
        middle,
        width,
        yerr=[low, high],
        label=NAMES[case],
        color=COLOURS[case],
        linewidth=0.8,
        error_kw={"elinewidth": 1.2, "capsize": 3, "ecolor": "#333333"},
        **hatch,
    )


def _rates(panel: Any, shape: str, parts: Sequence[Part]) -> None:
    """Rows/s of the three cases for each engine, and the two quotients that matter above the middle one."""
    top = 0.0
    for number, case in enumerate((HOMOGENEOUS, HETEROGENEOUS, CONTROL)):
        figures = [part["figures"]["rows_per_s"][case] for part in parts]
        _bars(panel, [group + (number - 1) * WIDTH for group in range(len(parts))], figures, case)
        top = max(top, *(figure["high"] for figure in figures))
    for group, part in enumerate(parts):
        figures = part["figures"]
        for number, case in enumerate((HOMOGENEOUS, HETEROGENEOUS, CONTROL)):
            height = figures["rows_per_s"][case]["median"]
            colour = "#333333" if case == CONTROL else "white"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if case == CONTROL else None
            where = group + (number - 1) * WIDTH
            panel.text(where, height / 2, f"{height:,.0f}", ha="center", va="center", color=colour, bbox=box)
        speed, share = figures["speed_up"]["median"], figures["share_of_control"]["median"]
        panel.text(
            group,
            1.17 * top,
            f"{speed:.2f} x as fast",
            ha="center",
            va="center",
            weight="bold",
            fontsize=14,
            color=COLOURS[HETEROGENEOUS],
        )
        panel.text(
            group, 1.09 * top, f"{100 * share:.0f} % of all CPUs in one host", ha="center", va="center", fontsize=10.5
        )
    spec = SHAPES[shape]
    hosts = " + ".join(f"{cpus:g}" for cpus in spec.data_cpus)
    panel.set_title(
        f"{shape}: {spec.says.partition(',')[0]}\n"
        f"as quotas: trainer {spec.trainer_cpus:g} CPU, data hosts {hosts} CPU "
        f"({spec.budget_cpus / spec.trainer_cpus:.1f} times the CPUs)",
        fontsize=11.5,
    )
    _groups(panel, [ENGINES[part["engine"]] for part in parts])
    panel.set_ylim(0, 1.24 * top)
    panel.set_ylabel("rows trained on a second")


def _stalls(panel: Any, parts: Sequence[Part]) -> None:
    """The part of the time in which the simulated accelerator was idle."""
    for number, (case, name) in enumerate(((HOMOGENEOUS, "stall_homogeneous"), (HETEROGENEOUS, "stall"))):
        figures = [part["figures"][name] for part in parts]
        at = [group + (number - 0.5) * WIDTH for group in range(len(parts))]
        _bars(panel, at, figures, case, scale=100)
        for where, figure in zip(at, figures, strict=True):
            height = 100 * figure["median"]
            panel.text(
                where,
                100 * figure["high"] + 1.5,
                f"{height:.1f} %" if height < 10 else f"{height:.0f} %",
                ha="center",
                va="bottom",
                weight="bold",
                color=COLOURS[case] if case == HETEROGENEOUS else "#555555",
            )
    _groups(panel, [_label(part) for part in parts])
    panel.set_ylim(0, 100)
    panel.set_ylabel("% of the time")
    panel.set_title(
        "How long the simulated accelerator waits\n(it takes 80 % of the rows/s that there were without one)",
        fontsize=11.5,
    )


def _savings(panel: Any, parts: Sequence[Part]) -> None:
    """The part of a step's cost that is saved, beside the public figures."""
    figures = [part["figures"]["price_performance"] for part in parts]
    _bars(panel, range(len(parts)), figures, HETEROGENEOUS, scale=100, width=2 * WIDTH)
    for group, (part, figure) in enumerate(zip(parts, figures, strict=True)):
        public = 100 * PUBLIC[part["shape"]]["price_performance"]
        panel.hlines(
            public,
            group - 0.32,
            group + 0.32,
            color=PUBLIC_COLOUR,
            linewidth=2.5,
            label="public figure, on real instances" if group == 0 else None,
        )
        panel.text(group + 0.34, public, f"{public:.0f} %", va="center", color=PUBLIC_COLOUR, fontsize=10)
        inside = max(100 * figure["median"] / 2, 4)
        panel.text(
            group, inside, f"{100 * figure['median']:.0f} %", ha="center", va="center", color="white", weight="bold"
        )
    _groups(panel, [_label(part) for part in parts])
    panel.set_xlim(-0.6, len(parts) - 0.25)
    panel.set_ylim(min(0, *(105 * figure["low"] for figure in figures)), 100)
    panel.set_ylabel("% of a step's cost saved")
    panel.set_title("Price-performance: how much less a step costs with data hosts\n(at the rows above)", fontsize=11.5)
    handles, names = panel.get_legend_handles_labels()
    public_only = [(handle, name) for handle, name in zip(handles, names, strict=True) if name.startswith("public")]
    panel.legend(*zip(*public_only, strict=True), loc="upper left", frameon=False, fontsize=10)


def _label(part: Part) -> str:
    engine = ENGINES[part["engine"]].replace(" (", "\n(")
    return f"{part['shape']}\n{engine}"


def _groups(panel: Any, names: Sequence[str]) -> None:
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.spines[["top", "right"]].set_visible(False)
