"""The figures of headline.py as tables, for a terminal and for a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headline_cases import CONTROL, HETEROGENEOUS, HOMOGENEOUS
from headline_figures import title_of
from rich.table import Table

CASES = (
    "case",
    "rows/s",
    "step ms, median",
    "step ms, 95 %",
    "input wait",
    "CPU-s/1,000 rows, trainer",
    "data hosts",
    "CPUs used",
)
GAINS = (
    "part",
    "speed-up",
    "share of control",
    "price-performance",
    "stall",
    "late wake-ups",
    "receiving",
)


def case_rows(part: Mapping[str, Any]) -> list[list[str]]:
    """Return a part's cases, one a row, in the order of CASES."""
    figures = part["figures"]
    rows = []
    for case in (HOMOGENEOUS, HETEROGENEOUS, CONTROL):
        if case not in figures["rows_per_s"]:
            continue
        cpu = figures["cpu_s_per_1000_rows"][case]
        rows.append(
            [
                case,
                ranged(figures["rows_per_s"][case], 0),
                ranged(figures["step_ms"][case], 0),
                ranged(figures["step_ms_p95"][case], 0),
                percent(figures["input_wait"][case]),
                ranged(cpu["trainer"], 2),
                ranged(cpu["data"], 2) if case == HETEROGENEOUS else "-",
                ranged(figures["cpus"][case], 2),
            ]
        )
    return rows


def gain_row(part: Mapping[str, Any]) -> list[str]:
    """Return what a part came to, in the order of GAINS."""
    figures = part["figures"]
    return [
        title_of(part),
        ranged(figures["speed_up"], 2),
        ranged(figures["share_of_control"], 2),
        percent(figures["price_performance"], 0),
        percent(figures["stall"], 2),
        percent(figures["late"], 2),
        percent(figures["receiving"]),
    ]


def ranged(figure: Mapping[str, float] | None, digits: int) -> str:
    """Return `median (low-high)`, a dash where it was not measured."""
    if figure is None:
        return "-"
    median, low, high = (f"{figure[name]:.{digits}f}" for name in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}-{high})"


def percent(figure: Mapping[str, float] | None, digits: int = 1) -> str:
    """Return a part of one as per cent."""
    if figure is None:
        return "-"
    return f"{ranged({name: 100 * value for name, value in figure.items()}, digits)} %"


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as it stands in a page: what each part came to, then the cases."""
    lines = [_markdown(GAINS, [gain_row(part) for part in result["parts"]])]
    for part in result["parts"]:
        lines += [f"\n**{title_of(part)}**\n", _markdown(CASES, case_rows(part))]
    about = (
        f"\nMedians (least to greatest) of {result['runs']} runs of {result['seconds']:g} s each on "
        f"{result['cpus']} CPUs, CPUs kept awake: {'yes' if result['awake'] else 'no'}. The accelerator is simulated. "
        f"Prices: {result['prices']}."
    )
    return "\n".join([*lines, about])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def terminal_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal."""
    table = Table(title=title)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
