"""StepMeter with an injected clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.training.meter import EVENT_MARK, StepMeter


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def stream(clock: FakeClock, waits_s: list[float], end_s: float = 0.0, rows: int = 4) -> Iterator[Any]:
    """Give a batch after each wait, and the end after one more."""
    for wait_s in waits_s:
        clock.wait(wait_s)
        yield SimpleNamespace(mask=np.arange(4) < rows)
    clock.wait(end_s)


def train(meter: StepMeter, clock: FakeClock, epoch: int, batches: Iterator[Any], compute_s: float = 0.3) -> None:
    for _ in meter.batches(epoch, batches):
        clock.wait(compute_s)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_lasts_from_one_batch_to_the_next_and_the_first_is_left_out(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = StepMeter(metrics=tmp_path / "metrics.jsonl", clock=clock, wall=clock, started_at=90.0, progress="off")

    train(meter, clock, 0, stream(clock, [5.0, 0.1, 0.2], end_s=0.1))
    clock.wait(50)  # an evaluation between two epochs belongs to no step
    train(meter, clock, 1, stream(clock, [0.4, 0.1]))
    clock.wait(1)
    meter.close()

    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["epoch"], line["step_ms"], line["wait_ms"]) for line in lines] == [
        (0, 0, 400, 100),
        (1, 0, 500, 200),
        (2, 0, 800, 500),
        (3, 1, 400, 100),
        (4, 1, 300, 0),
    ]
    result = meter.result()
    assert (result.steps, result.rows) == (5, 20)
    assert result.step_ms == pytest.approx({"mean": 500, "p50": 400, "p95": 800})
    assert result.input_wait_fraction == pytest.approx(0.8 / 2.0)
    assert result.rows_per_s == pytest.approx(16 / 2.0)
    assert result.first_batch_s == pytest.approx(15)
    assert result.first_step_s == pytest.approx(15.3)
    assert result.train_s == pytest.approx(0.4 + 0.5 + 0.4 + 50 + 0.4 + 0.4 + 0.3 + 1)
    assert json.loads(json.dumps(result.to_dict()))["steps"] == 5


def test_rows_that_fill_up_a_batch_are_not_counted() -> None:
    clock = FakeClock()
    meter = StepMeter(clock=clock, progress="off")
    train(meter, clock, 0, stream(clock, [0, 0], rows=3))
    meter.close()
    assert meter.result().rows == 6


def test_what_the_job_logs_goes_to_the_current_step(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = StepMeter(metrics=tmp_path / "metrics.jsonl", clock=clock, progress="off")
    for number, _ in enumerate(meter.batches(0, stream(clock, [0, 0]))):
        clock.wait(0.1)
        meter.log(loss=np.float32(number), bad=float("nan"))
    meter.log(val=0.5)
    meter.close()
    meter.close()
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["loss"], line["bad"], line.get("val")) for line in lines] == [(0.0, None, None), (1.0, None, 0.5)]


def test_lines_reach_the_file_about_each_second(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "metrics.jsonl"
    meter = StepMeter(metrics=path, clock=clock, progress="off")
    batches = meter.batches(0, stream(clock, [0.0] * 10))
    next(batches)
    for _ in range(2):
        clock.wait(0.3)
        next(batches)
    assert lines_of(path) == []
    for _ in range(2):
        clock.wait(0.3)
        next(batches)
    assert len(lines_of(path)) == 4, "the step that is not over yet has no line"


def test_plain_lines_come_every_few_seconds_and_at_the_end_of_an_epoch() -> None:
    clock, said = FakeClock(), list[str]()
    meter = StepMeter(clock=clock, emit=said.append, interval_s=5, size=2)
    train(meter, clock, 0, stream(clock, [0.0] + [0.25] * 30), compute_s=0.75)
    train(meter, clock, 1, stream(clock, [0.25]), compute_s=0.75)
    meter.close()
    assert len(said) == 8
    assert said[0] == "hetero_step_ms=1000.00 hetero_wait_ms=250.00 hetero_rows_per_s=8.0 epoch=1 step=6"
    assert said[-2].endswith("epoch=1 step=31")
    assert said[-1].endswith("epoch=2 step=1")


def test_the_wait_for_an_epoch_is_shown_with_it_and_each_step_once() -> None:
    clock, said = FakeClock(), list[str]()
    meter = StepMeter(clock=clock, emit=said.append, progress="events", interval_s=1e9)
    train(meter, clock, 0, stream(clock, [0.0, 0.0, 0.0]), compute_s=1.0)
    train(meter, clock, 1, stream(clock, [9.0, 0.0]), compute_s=3.0)
    events = [json.loads(line.removeprefix(EVENT_MARK)) for line in said]
    assert all(line.startswith(EVENT_MARK) for line in said)
    assert [(event["step"], event["step_ms"], event["epoch_ended"]) for event in events] == [
        (3, 1000, True),
        (2, 7500, True),
    ]
    assert [event["steps_per_epoch"] for event in events] == [3, 2]
    assert events[1]["rows"] == 20


@pytest.mark.parametrize("device", [None, lambda: "simulated_device_ms=80"])
def test_what_is_shown_says_whether_the_device_is_simulated(device: Callable[[], str] | None) -> None:
    for progress in ("plain", "events"):
        clock, said = FakeClock(), list[str]()
        meter = StepMeter(clock=clock, emit=said.append, progress=progress, device=device)
        train(meter, clock, 0, stream(clock, [0.0, 0.0]))
        (line,) = said
        if progress == "plain":
            assert line.endswith("epoch=1 step=2" + (" simulated_device_ms=80" if device else ""))
        else:
            assert json.loads(line.removeprefix(EVENT_MARK))["simulated"] is (device is not None)


def test_a_step_that_its_device_ends_later_is_as_long(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = StepMeter(metrics=tmp_path / "metrics.jsonl", clock=clock, progress="off")
    meter.lengthen(9.0)  # there is no step yet
    train(meter, clock, 0, stream(clock, [0.0, 0.0]))
    meter.lengthen(0.5)
    meter.close()
    assert [line["step_ms"] for line in lines_of(tmp_path / "metrics.jsonl")] == [300, 800]


def test_an_epoch_that_the_job_leaves_early_is_measured_too(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = StepMeter(metrics=tmp_path / "metrics.jsonl", clock=clock, progress="off")
    for epoch in range(2):
        for number, _ in enumerate(meter.batches(epoch, stream(clock, [0.0] * 5))):
            clock.wait(0.5)
            if number == 1:
                break
    meter.close()
    assert [line["step_ms"] for line in lines_of(tmp_path / "metrics.jsonl")] == [500, 500, 500, 500]


def test_a_run_without_steps_has_no_figures() -> None:
    meter = StepMeter(progress="off")
    meter.close()
    result = meter.result()
    assert (result.steps, result.rows, result.rows_per_s, result.first_step_s, result.train_s) == (
        0,
        0,
        None,
        None,
        None,
    )
    assert result.step_ms == {"mean": None, "p50": None, "p95": None}


def test_a_full_disk_does_not_end_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    meter = StepMeter(metrics=Path("/dev/full"), clock=clock, progress="off")
    train(meter, clock, 0, stream(clock, [0.0] * 5), compute_s=2.0)
    meter.close()
    assert meter.result().steps == 5
    assert capsys.readouterr().out.count("cannot write /dev/full") == 1


def test_an_error_of_the_input_passes_through() -> None:
    def broken() -> Iterator[Any]:
        yield SimpleNamespace(mask=np.ones(4, bool))
        raise ValueError("bad row")

    meter = StepMeter(progress="off")
    with pytest.raises(ValueError, match="bad row"):
        list(meter.batches(0, broken()))
    meter.close()
    assert meter.result().steps == 1


def test_an_unknown_kind_of_progress_is_refused() -> None:
    with pytest.raises(ValueError, match="progress is 'fancy'"):
        StepMeter(progress="fancy")


def test_sums_are_written_about_each_second_without_the_first_step(tmp_path: Path) -> None:
    clock, sums = FakeClock(), tmp_path / "work" / "rank-0.meter.json"
    meter = StepMeter(sums=sums, clock=clock, progress="off")
    seen: list[dict[str, Any]] = []
    for _ in meter.batches(0, stream(clock, [5.0, *[0.1] * 9])):
        clock.wait(0.4)
        if sums.exists() and (not seen or seen[-1] != json.loads(sums.read_text())):
            seen.append(json.loads(sums.read_text()))
    meter.close()
    assert [one["steps"] for one in seen] == [1, 3, 5, 7]
    assert seen[1]["rows"] == 12
    assert seen[1]["step_s"] == pytest.approx(1.5)
    assert seen[1]["wait_s"] == pytest.approx(0.3)


def test_sums_that_cannot_be_written_do_not_end_the_training(tmp_path: Path) -> None:
    clock = FakeClock()
    (tmp_path / "work").write_text("a file where a folder should be")
    meter = StepMeter(sums=tmp_path / "work" / "rank-0.meter.json", clock=clock, progress="off")
    train(meter, clock, 0, stream(clock, [1.0] * 5))
    assert meter.result().steps == 5
