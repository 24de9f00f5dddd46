"""Every row once, equal steps, exact batches, whatever the engine; and what a run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_job import LocalJob

ROWS, PIECES, BATCH = 53, 9, 8
TOTAL = ROWS * PIECES
SUMMARY_FIELDS = {
    "job", "engine", "outcome", "hosts", "ranks", "epochs", "steps", "rows", "step_ms", "input_wait_fraction",
    "rows_per_s", "first_step_s", "train_s", "cpu_s", "replayed_batches", "lost_workers",
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "data_hosts"), [("tf_data", 2), ("local", 0), pytest.param("grpc", 2, marks=pytest.mark.slow)]
)
def test_every_row_is_seen_once_an_epoch_and_all_ranks_take_the_same_steps(
    tmp_path: Path, engine: str, data_hosts: int
) -> None:
    options = [f"--engine={engine}", "--ranks-per-host=1", "--epochs=3", f"--rows={ROWS}", f"--pieces={PIECES}"]
    with LocalJob(tmp_path, data_hosts, 2, options) as job:
        codes = job.start().wait()
        assert set(codes.values()) == {0}, job.outputs()
        steps = TOTAL // (2 * BATCH)
        for epoch in range(3):
            counts = job.rows(epoch, ranks=2)
            assert set(counts.values()) == {1}, f"rows seen more than once in epoch {epoch}"
            assert set(counts) <= set(range(TOTAL))
            assert TOTAL - len(counts) < 2 * BATCH
            taken = [sum(step["epoch"] == epoch for step in job.seen(rank)) for rank in range(2)]
            assert taken == [steps, steps]
        summary = job.summary()
        assert summary.keys() >= SUMMARY_FIELDS
        assert summary["outcome"] == "succeeded"
        assert summary["engine"] == engine
        assert summary["hosts"] == {"data": data_hosts, "trainer": 2}
        assert (summary["ranks"], summary["epochs"], summary["steps"]) == (2, 3, 3 * steps)
        assert summary["rows"] == 3 * steps * 2 * BATCH
        assert summary["rank_steps"] == [3 * steps, 3 * steps]
        assert summary["dropped_rows"] == 3 * (TOTAL % (2 * BATCH))
        assert summary["lost_workers"] == 0
        assert summary["step_ms"]["p95"] >= summary["step_ms"]["p50"] > 0
        assert 0 <= summary["input_wait_fraction"] <= 1
        assert summary["cpu_s"]["trainer"] > 0
        assert (summary["cpu_s"]["data"] > 0) == (engine != "local")
        assert len((job.run_dir / "metrics.jsonl").read_text().splitlines()) >= 3 * steps - 1
        assert not (job.run_dir / "failure.json").exists()


@pytest.mark.slow
def test_padding_keeps_every_row_and_says_which_ones_it_repeated(tmp_path: Path) -> None:
    options = ["--remainder=pad", "--ranks-per-host=2", f"--rows={ROWS}", f"--pieces={PIECES}"]
    with LocalJob(tmp_path, 1, 1, options) as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        counts = job.rows(0, ranks=2)
        assert counts == dict.fromkeys(range(TOTAL), 1)
        padded = sum(step["padded"] for rank in range(2) for step in job.seen(rank))
        assert padded == -TOTAL % (2 * BATCH)
        assert len(job.seen(0)) == len(job.seen(1))
        assert job.summary()["rows"] == TOTAL
