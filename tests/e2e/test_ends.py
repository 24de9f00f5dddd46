"""Every end of a job inside SageMaker's own machinery: the table in `ends.cells`, and a few random schedules.

docs/failures.md names the cells. `benchmarks/ends.py` runs them many times, `benchmarks/chaos.py` many schedules.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ends.cells import CELLS
from ends.running import run_cells
from ends.schedules import draw, run_schedule

SEEDS = range(int(os.environ.get("HETERO_CHAOS_SEEDS", "2")))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_end_is_as_the_table_says(tmp_path: Path) -> None:
    """One test for all cells, because they mostly wait and so run beside each other."""
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    wrong = []
    for outcome in run_cells([(cell, tmp_path / str(number)) for number, cell in enumerate(CELLS)], jobs=3):
        print(f"{outcome.cell}: {outcome.proof}; {outcome.codes}; {outcome.seconds:.0f} s")
        wrong += [f"{outcome.cell}: {problem}" for problem in outcome.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_end_as_they_may(tmp_path: Path, seed: int) -> None:
    verdict = run_schedule(seed, tmp_path / "schedule")
    assert not verdict.wrong, f"{verdict.faults}: {verdict.wrong}\n{verdict.causes}\n{verdict.logs}"


def test_a_schedule_follows_from_its_seed() -> None:
    schedules = [[str(planned) for planned in draw(seed, "grpc")] for seed in range(200)]
    assert schedules == [[str(planned) for planned in draw(seed, "grpc")] for seed in range(200)]
    kinds = {planned.kind.name for seed in range(200) for planned in draw(seed, "grpc")}
    assert len(kinds) >= 15, "too few kinds of faults are drawn"
    assert {len(schedule) for schedule in schedules} == {1, 2, 3}
