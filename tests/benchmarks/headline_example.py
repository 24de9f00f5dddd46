"""A result of benchmarks/headline.py with round numbers, made as it makes one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from headline_cases import CONTROL, HETEROGENEOUS, HOMOGENEOUS, Measured
from headline_figures import doubts_of, figures_of, problems_of

from hetero.cost.prices import PriceList

PRICES = PriceList.read(Path(__file__).resolve().parents[2] / "benchmarks" / "prices" / "us-east-1-2022.json")
RATES = {
    ("A", HOMOGENEOUS): (480, 500, 520),
    ("A", HETEROGENEOUS): (1200, 1300, 1350),
    ("A", CONTROL): (1250, 1300, 1400),
    ("B", HOMOGENEOUS): (380, 400, 410),
    ("B", HETEROGENEOUS): (2300, 2400, 2500),
    ("B", CONTROL): (2350, 2400, 2450),
}


def run(number: int, case: str, rows_per_s: float, **changed: Any) -> dict[str, Any]:
    """Return a run; preparing costs 0.8 CPU-s per 1,000 rows, receiving a fortieth of that."""
    values: dict[str, Any] = {
        "case": case,
        "rows_per_s": float(rows_per_s),
        "step_ms": None if case == CONTROL else 128_000 / rows_per_s,
        "step_ms_p95": None if case == CONTROL else 150_000 / rows_per_s,
        "input_wait": None if case == CONTROL else 0.99,
        "cpu_s_per_1000_rows": {"trainer": 0.8, "data": 0.0},
        "cpus": 1.65,
        "throttled": 0.5,
        "receiving_cpu_s_per_1000_rows": 0.02 if case == HETEROGENEOUS else None,
    }
    return {"round": number, **asdict(Measured(**{**values, **changed}))}


def free_runs(shape: str) -> list[dict[str, Any]]:
    """Return three rounds without an accelerator."""
    return [
        run(number, case, RATES[shape, case][number])
        for number in range(3)
        for case in (HOMOGENEOUS, HETEROGENEOUS, CONTROL)
    ]


def device_runs(shape: str) -> list[dict[str, Any]]:
    """Return three rounds on an accelerator that takes 80 %."""
    found = []
    for number, stall in enumerate((0.004, 0.006, 0.012)):
        rate = 0.8 * RATES[shape, HETEROGENEOUS][1]
        found += [
            run(number, HETEROGENEOUS, rate * (1 - stall), stall=stall, late=stall / 2, input_wait=stall / 2),
            run(number, HOMOGENEOUS, RATES[shape, HOMOGENEOUS][number], stall=0.55, late=0.01, input_wait=0.54),
        ]
    return found


def part(engine: str, shape: str, step: str) -> dict[str, Any]:
    """Return one part."""
    runs = free_runs(shape) if step == "0" else device_runs(shape)
    step_ms = 0.0 if step == "0" else 128_000 / (0.8 * RATES[shape, HETEROGENEOUS][1])
    about = {"engine": engine, "shape": shape, "step": step, "device_step_ms": step_ms}
    return {**about, "runs": runs, "figures": figures_of(runs, shape, PRICES, None if step == "0" else 0.8)}


def result() -> dict[str, Any]:
    """Return a whole result."""
    parts = [
        part(engine, shape, step) for shape in ("A", "B") for engine in ("tf_data", "grpc") for step in ("0", "device")
    ]
    problems = problems_of(parts)
    return {
        "runs": 3,
        "seconds": 15.0,
        "cpus": 2,
        "awake": True,
        "data": {"name": "fashion-mnist", "rows": 60_000},
        "prices": PRICES.describe(),
        "parts": parts,
        "doubts": doubts_of(parts),
        "problems": problems,
        "passed": not problems,
    }
