"""Every end of a job inside SageMaker's own machinery: the table in `ends.cells`, and a few random schedules.

docs/failures.md names the cells. `benchmarks/ends.py` runs them many times, `benchmarks/chaos.py` many schedules.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ends.cells import CELLS
from ends.faults import Injected
from ends.kinds import all_kinds
from ends.running import run_cells
from ends.schedules import draw, run_schedule
from ends.verdicts import Planned, Verdict, judge_hosts

SEEDS = range(int(os.environ.get("HETERO_CHAOS_SEEDS", "2")))


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.quiet
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
@pytest.mark.hosts
@pytest.mark.timeout(600)
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


RAISED = "ValueError: the loss is not a number (rank-0 on algo-3, exit code 1)"
FAILED = {"chief": 1, "other": 1, "first": 0, "second": 0}


def judged(codes: dict[str, int | None], causes: dict[str, str], *kinds: tuple[str, str]) -> set[str]:
    """Return the kinds of mistakes that the judge finds in such an end of a job that these faults hit."""
    happened = []
    for name, part in kinds:
        kind = next(kind for kind in all_kinds() if (kind.name, kind.on) == (name, part))
        happened.append(Planned(kind, 1.0, injected=Injected(1.0, "it was there"), attempted=True))
    verdict = Verdict(0, codes=codes, causes=causes)
    judge_hosts(happened, verdict)
    return set(verdict.wrong)


def test_the_judge_accepts_what_the_faults_bring() -> None:
    raised, gone = ("training raises", "other"), ("power cut", "second")
    causes = {"chief": RAISED, "other": RAISED}
    assert judged(FAILED, causes, raised) == set()
    assert judged({**FAILED, "second": None}, causes, raised, gone) == set()
    assert judged(dict.fromkeys(FAILED, 0), {}, ("worker killed", "first")) == set()
    assert judged({**dict.fromkeys(FAILED, 0), "second": None}, {}, gone) == set()


@pytest.mark.parametrize(
    ("codes", "causes", "mistake"),
    [
        (dict.fromkeys(FAILED, 0), {}, "code"),
        ({**FAILED, "chief": 5}, {"chief": RAISED, "other": RAISED}, "code"),
        ({**FAILED, "first": 4}, {"chief": RAISED, "other": RAISED}, "code"),
        (FAILED, {"chief": "Rank 1 lost the ranks' exchange", "other": RAISED}, "cause"),
        (FAILED, {"other": RAISED}, "cause"),
        (FAILED, {"chief": RAISED, "other": RAISED, "first": "something"}, "cause"),
    ],
)
def test_the_judge_finds_a_wrong_code_and_a_wrong_cause(
    codes: dict[str, int | None], causes: dict[str, str], mistake: str
) -> None:
    assert judged(codes, causes, ("training raises", "other")) == {mistake}


def test_a_job_that_nothing_fatal_hit_may_not_fail() -> None:
    assert judged(FAILED, {"chief": RAISED, "other": RAISED}, ("worker killed", "first")) == {"code"}
