"""The arithmetic of benchmarks/headline.py: medians, pairs, requirements, tables."""

from __future__ import annotations

import pytest
from control_groups import GroupUsage
from headline import arguments, device_step_ms
from headline_cases import CONTROL, HETEROGENEOUS, HOMOGENEOUS, SHAPES, Window, rate_of
from headline_example import PRICES, device_runs, free_runs, part, result, run
from headline_figures import Requirement, doubts_of, figures_of, pairs, problems_of, spread, title_of
from headline_tables import CASES, GAINS, case_rows, gain_row, markdown, ranged
from virtual_hosts import BenchmarkFailed


def test_a_spread_has_the_median_and_the_ends_of_what_is_known() -> None:
    assert spread([3.0, None, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert spread([4.0, 2.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([None]) is None


def test_runs_are_paired_by_their_round_whatever_their_order() -> None:
    runs = [run(1, CONTROL, 10), run(0, HETEROGENEOUS, 2), run(1, HETEROGENEOUS, 3), run(2, CONTROL, 5)]
    assert [(a["rows_per_s"], b["rows_per_s"]) for a, b in pairs(runs, CONTROL, HETEROGENEOUS)] == [(10, 3)]


def test_quotients_are_of_rounds_and_not_of_medians() -> None:
    runs = [
        *(run(number, HOMOGENEOUS, rate) for number, rate in enumerate((100, 200, 400))),
        *(run(number, HETEROGENEOUS, rate) for number, rate in enumerate((300, 400, 1600))),
        *(run(number, CONTROL, rate) for number, rate in enumerate((300, 500, 2000))),
    ]
    figures = figures_of(runs, "A", PRICES)
    assert figures["speed_up"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert figures["share_of_control"] == {"median": 0.8, "low": 0.8, "high": 1.0}
    assert figures["rows_per_s"][HETEROGENEOUS]["median"] == 400


def test_price_performance_is_that_of_the_instances_that_a_shape_stands_for() -> None:
    runs = [run(0, HOMOGENEOUS, 86), run(0, HETEROGENEOUS, 192)]
    assert round(figures_of(runs, "A", PRICES)["price_performance"]["median"], 2) == 0.46
    runs = [run(0, HOMOGENEOUS, 184), run(0, HETEROGENEOUS, 1193)]
    assert round(figures_of(runs, "B", PRICES)["price_performance"]["median"], 2) == 0.77


def test_receiving_is_compared_with_what_preparing_costs_the_control() -> None:
    assert figures_of(free_runs("A"), "A", PRICES)["receiving"]["median"] == pytest.approx(0.02 / 0.8)
    assert figures_of(device_runs("A"), "A", PRICES, 0.4)["receiving"]["median"] == pytest.approx(0.02 / 0.4)
    assert figures_of(device_runs("A"), "A", PRICES)["receiving"] is None


def test_a_stall_is_that_of_the_heterogeneous_job() -> None:
    figures = figures_of(device_runs("B"), "B", PRICES)
    assert figures["stall"] == {"median": 0.006, "low": 0.004, "high": 0.012}
    assert figures["stall_homogeneous"]["median"] == 0.55
    assert figures_of(free_runs("B"), "B", PRICES)["stall"] is None


def test_what_keeps_all_requirements_has_no_problem() -> None:
    assert result()["problems"] == []
    assert result()["passed"]


@pytest.mark.parametrize(
    ("step", "case", "change", "problem"),
    [
        ("0", HETEROGENEOUS, {"rows_per_s": 1200.0}, "share of control is 0.923, required: at least 0.95"),
        ("0", HOMOGENEOUS, {"rows_per_s": 600.0}, "speed-up is 2.167, required: more than 2.2"),
        ("0", HOMOGENEOUS, {"rows_per_s": 600.0}, "price-performance is 0.449, required: more than 0.46"),
        ("0", HETEROGENEOUS, {"receiving_cpu_s_per_1000_rows": 0.05}, "for preparing is 0.062, required: at most 0.05"),
        ("device", HETEROGENEOUS, {"stall": 0.02}, "stall of the simulated accelerator is 0.020, required: at most"),
        ("device", HETEROGENEOUS, {"stall": float("nan")}, "stall of the simulated accelerator is nan"),
    ],
)
def test_what_is_not_kept_is_said_with_the_part(step: str, case: str, change: dict[str, float], problem: str) -> None:
    changed = part("grpc", "A", step)
    changed["runs"] = [one | change if one["case"] == case else one for one in changed["runs"]]
    changed["figures"] = figures_of(changed["runs"], "A", PRICES, 0.8)
    found = problems_of([changed])
    assert any(problem in one for one in found)
    assert all(one.startswith(title_of(changed)) for one in found)


def test_speed_up_and_price_performance_are_required_in_a_only() -> None:
    slow = part("grpc", "B", "0")
    slow["figures"] |= {"speed_up": spread([2.0]), "price_performance": spread([0.3])}
    assert problems_of([slow]) == []


def test_a_bound_that_is_met_exactly_is_kept_unless_more_is_required() -> None:
    assert Requirement("x", "x", least=0.95).broken_by(0.95) is None
    assert Requirement("x", "x", most=0.01).broken_by(0.01) is None
    assert Requirement("x", "x", above=2.2).broken_by(2.2) is not None


def test_a_run_that_did_not_get_its_cpus_is_doubted() -> None:
    doubtful = part("tf_data", "B", "0")
    assert doubts_of([doubtful]) == []
    for one in doubtful["runs"]:
        if one["case"] == CONTROL and one["round"] == 1:
            one["cpus"] = 1.2
    assert doubts_of([doubtful]) == ["tf_data, shape B, step 0, round 2: control used 1.20 of 1.65 CPUs"]
    for step, expected in (("0", 1), ("device", 0)):  # on an accelerator the trainer host may have enough
        slow = part("grpc", "A", step)
        for one in slow["runs"]:
            one["cpus"] = 0.37 if one["case"] == HOMOGENEOUS and one["round"] == 0 else one["cpus"]
        assert len(doubts_of([slow])) == expected


def test_rows_count_from_the_first_batch_to_the_last() -> None:
    lines = [{"at_s": 10.0, "rows": 1000}, {"at_s": 11.0, "rows": 100}, {"at_s": 14.0, "rows": 300}]
    assert rate_of(lines) == 100.0


def test_only_batches_of_the_window_count_and_a_few_are_needed() -> None:
    used = {"trainer-1": GroupUsage(3.0, 100, 60, 4.0), "data-1": GroupUsage(2.0, 100, 20, 1.0)}
    window = Window(10.0, 20.0, used, {})
    lines = [{"at_s": float(at), "rows": 1} for at in range(5, 30)]
    assert [line["at_s"] for line in window.lines(lines)] == [float(at) for at in range(10, 20)]
    assert (window.cpu_s("trainer"), window.cpu_s("data"), window.throttled) == (3.0, 2.0, 0.4)
    with pytest.raises(BenchmarkFailed, match=r"only 2 steps in 10\.0 s"):
        window.lines(lines[:7])


def test_the_accelerator_takes_80_per_cent_of_what_there_was_without_one() -> None:
    assert device_step_ms(1000.0) == 160.0


def test_the_shapes_have_the_ratios_of_the_public_clusters() -> None:
    ratios = {name: shape.budget_cpus / shape.trainer_cpus for name, shape in SHAPES.items()}
    assert ratios == pytest.approx({"A": 240 / 96, "B": 44 / 8})


def test_the_tables_have_a_row_for_each_case_and_part() -> None:
    free, device = part("grpc", "A", "0"), part("grpc", "A", "device")
    assert [row[0] for row in case_rows(free)] == [HOMOGENEOUS, HETEROGENEOUS, CONTROL]
    assert [row[0] for row in case_rows(device)] == [HOMOGENEOUS, HETEROGENEOUS]
    assert {len(row) for row in case_rows(free)} == {len(CASES)}
    assert dict(zip(GAINS, gain_row(free), strict=True)) == {
        "part": "grpc, shape A, step 0",
        "speed-up": "2.60 (2.50-2.60)",
        "share of control": "0.96 (0.96-1.00)",
        "price-performance": "54 (52-54) %",
        "stall": "-",
        "late wake-ups": "-",
        "receiving": "2.5 %",
    }
    assert ranged({"median": 2.0, "low": 2.0, "high": 2.0}, 1) == "2.0"


def test_the_page_says_of_every_part_that_the_accelerator_is_simulated() -> None:
    text = markdown(result())
    assert text.count("simulated accelerator of") == 8
    assert "The accelerator is simulated." in text
    assert "us-east-1, 2022-10-27" in text
    tables = [line for line in text.splitlines() if line.startswith("| ---")]
    assert len(tables) == 9


def test_the_command_line_chooses_parts() -> None:
    assert arguments([]).step == ("0", "device")
    chosen = arguments(["--shape", "B", "--engine", "grpc", "--step", "0", "--", "--prefetch-bytes=1"])
    assert (chosen.shape, chosen.engine, chosen.step, chosen.more) == ("B", "grpc", ("0",), ["--prefetch-bytes=1"])


@pytest.mark.parametrize("wrong", [["--runs", "0"], ["--seconds", "0"], ["--warm-up", "-1"], ["--device-step-ms", "0"]])
def test_numbers_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(wrong)
    assert "needs" in capsys.readouterr().err
