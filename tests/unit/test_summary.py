"""summary.json: what a run came to, complete whatever the run managed to measure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.control.state import HostReport, HostState, JobState, Phase
from hetero.host import HostConfig
from hetero.rundir import read_json, write_json_atomic
from hetero.settings import Settings
from hetero.summary import in_words, summarise, write_summary
from hetero.topology import Host, Role, Topology

FIELDS = {
    "job", "engine", "outcome", "hosts", "ranks", "epochs", "steps", "rows", "step_ms", "input_wait_fraction",
    "rows_per_s", "first_step_s", "train_s", "cpu_s", "replayed_batches", "lost_workers",
}  # fmt: skip
"""What DESIGN.md promises."""
DATA = tuple(Host(f"data-{n}", Role.DATA, "data_group", "127.0.0.1") for n in (1, 2))
TRAINERS = tuple(Host(f"trainer-{n}", Role.TRAINER, "dnn_group", "127.0.0.1") for n in (1, 2))


def config(run_dir: Path = Path("/runs/a")) -> HostConfig:
    return HostConfig(
        settings=Settings(job="job.py:job", epochs=3, batch_size=8),
        topology=Topology(TRAINERS[0], DATA, TRAINERS, None, "a test"),
        engine="tf_data",
        job_name="digits",
        run_dir=str(run_dir),
        run_id="of-the-launcher",
        control_address="data-1:16000",
        started_s=0.0,
    )


def state(lost: dict[str, int] | None = None) -> JobState:
    hosts = [
        HostState(host.name, host.role.value, cpu_s=cpu_s, ranks=ranks, workers_lost=(lost or {}).get(host.name, 0))
        for host, cpu_s, ranks in zip(DATA + TRAINERS, (1.5, 2.5, 4.0, 8.0), (0, 0, 2, 2), strict=True)
    ]
    return JobState(1, 0, "of-the-coordinator", 9.0, Phase.ENDED, hosts=tuple(hosts))


def rank(number: int, **figures: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "steps": 7,
        "rows": 50,
        "step_ms": {"mean": 2.0 + number, "p50": 2.0, "p95": 3.0},
        "input_wait_fraction": 0.2 * (number + 1),
        "rows_per_s": 100.0,
        "first_batch_s": 1.0,
        "first_step_s": 1.5,
        "train_s": 9.0,
        "dropped_rows": 4,
        "results": {"accuracy": 0.9 - number},
        **figures,
    }


AS_ASKED = {"local_workers": {"chosen": 0, "measured": {}, "why": "as asked for"}}


def test_what_each_host_has_chosen_is_told() -> None:
    said = {"workers_per_host": {"chosen": 4, "measured": {"2": 10.5, "4": 20.0}, "why": "twice as many"}}
    endpoints = {"tuning/data-1": json.dumps(said), "tuning/data-2": "{nonsense"}
    own = {"local_workers": {"chosen": 1, "measured": {}, "why": "mine"}}
    told = replace(state(), endpoints=endpoints)
    summary = summarise(config(), told, "succeeded", HostReport(), [rank(0)], tuning=own)
    assert summary["tuning"] == {"data-1": said, "data-2": None, "trainer-1": own, "trainer-2": AS_ASKED}
    alone = summarise(replace(config(), engine="local"), told, "succeeded", HostReport(), [rank(0)], tuning=own)
    assert alone["tuning"] == {}


def test_figures_of_all_ranks_add_up_and_times_are_those_of_rank_0() -> None:
    summary = summarise(config(), state(), "succeeded", HostReport(cpu_s=5.0, ranks=2), [rank(0), rank(1)])
    assert summary.keys() >= FIELDS
    assert summary == {
        "job": "digits", "engine": "tf_data", "outcome": "succeeded", "hosts": {"data": 2, "trainer": 2}, "ranks": 2,
        "epochs": 3, "steps": 7, "rows": 100, "step_ms": {"mean": 2.0, "p50": 2.0, "p95": 3.0},
        "input_wait_fraction": pytest.approx(0.3), "rows_per_s": 200.0, "first_step_s": 1.5, "train_s": 9.0,
        "cpu_s": {"data": 4.0, "trainer": 13.0}, "replayed_batches": 0, "lost_workers": 0, "rows_lost": 0,
        "dropped_rows": 4, "batch_size": 8, "first_batch_s": 1.0, "run_id": "of-the-coordinator",
        "rank_steps": [7, 7], "results": {"accuracy": 0.9}, "skipped_splits": 0, "batch_digests": None,
        "local_workers": {}, "tuning": {"data-1": None, "data-2": None, "trainer-1": AS_ASKED, "trainer-2": AS_ASKED},
        "simulated_device": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "figures"),
    [
        ([(6.0, 1.5), (6.0, 0.5)], {"busy_s": 12.0, "idle_s": 2.0, "stall": pytest.approx(1 / 7)}),
        ([(0.0, 0.0)], {"busy_s": 0.0, "idle_s": 0.0, "stall": None}),
        ([], {"busy_s": None, "idle_s": None, "stall": None}),
    ],
    ids=["two ranks", "one step", "failed"],
)
def test_a_simulated_device_is_summed_up_over_the_ranks(
    ranks: list[tuple[float, float]], figures: dict[str, Any]
) -> None:
    one = replace(config(), settings=Settings(job="job.py:job", device_step_ms=12.5))
    results = [rank(n, device={"busy_s": busy, "idle_s": idle}) for n, (busy, idle) in enumerate(ranks)]
    summary = summarise(one, state(), "succeeded", HostReport(), results)
    assert summary["simulated_device"] == {"step_ms": 12.5, **figures}


def test_this_hosts_own_last_report_counts_and_not_what_the_coordinator_heard_last() -> None:
    summary = summarise(config(), state(), "succeeded", HostReport(cpu_s=100.0), [rank(0)])
    assert summary["cpu_s"]["trainer"] == 108.0


def test_with_lost_workers_nobody_knows_how_many_rows_went_with_them() -> None:
    summary = summarise(config(), state({"data-2": 3}), "succeeded", HostReport(), [rank(0)])
    assert summary["lost_workers"] == 3
    assert summary["rows_lost"] is None


def test_the_workers_of_a_data_host_that_left_before_the_end_are_lost_with_it() -> None:
    one = state()
    gone = (replace(one.hosts[0], lost=True, workers_lost=2), replace(one.hosts[1], left=True, leave_reason="SIGTERM"))
    summary = summarise(config(), replace(one, hosts=gone + one.hosts[2:]), "succeeded", HostReport(), [rank(0)])
    assert (summary["lost_workers"], summary["rows_lost"]) == (3, None)


def test_a_failed_run_has_every_field_and_null_for_what_was_never_measured() -> None:
    summary = summarise(config(), state(), "failed", HostReport(ranks=2), [])
    assert summary.keys() >= FIELDS
    assert (summary["outcome"], summary["ranks"], summary["results"]) == ("failed", 4, {})
    assert summary["step_ms"] == {"mean": None, "p50": None, "p95": None}
    for name in ("steps", "rows", "input_wait_fraction", "rows_per_s", "first_step_s", "train_s", "dropped_rows"):
        assert summary[name] is None, name


def test_a_run_whose_coordinator_was_never_heard_is_summed_up_too() -> None:
    summary = summarise(config(), None, "failed", HostReport(ranks=2, cpu_s=1.234), [])
    assert (summary["ranks"], summary["run_id"]) == (2, "of-the-launcher")
    assert summary["cpu_s"] == {"data": 0.0, "trainer": 1.23}


def test_a_rank_that_took_too_few_steps_to_be_measured_leaves_the_figures_of_the_others() -> None:
    idle = rank(1, input_wait_fraction=None, rows_per_s=None, rows=0)
    summary = summarise(config(), state(), "succeeded", HostReport(), [rank(0), idle])
    assert (summary["rows_per_s"], summary["input_wait_fraction"], summary["rows"]) == (100.0, 0.2, 50)


@pytest.mark.parametrize("with_ranks", [True, False])
def test_the_summary_is_written_from_what_the_ranks_left(tmp_path: Path, with_ranks: bool) -> None:
    one = config(tmp_path)
    if with_ranks:
        write_json_atomic(one.run().result("trainer-1", "ranks"), [rank(0), rank(1)])
    write_summary(one, state(), "succeeded", HostReport())
    summary = read_json(tmp_path / "summary.json")
    assert summary["rank_steps"] == ([7, 7] if with_ranks else [])


def test_under_grpc_no_row_goes_with_a_worker_and_what_was_prepared_again_is_counted() -> None:
    lost = replace(state(), replayed_batches=7, skipped_splits=1)
    lost = replace(lost, hosts=tuple(replace(host, workers_lost=2) for host in lost.hosts))
    summary = summarise(replace(config(), engine="grpc"), lost, "succeeded", HostReport(), [rank(0)])
    assert summary["lost_workers"] > 0
    assert (summary["rows_lost"], summary["replayed_batches"], summary["skipped_splits"]) == (0, 7, 1)


def test_the_digests_of_all_ranks_are_there_where_batches_are_the_same_in_every_run() -> None:
    one = config()
    one = replace(one, settings=replace(one.settings, deterministic=True))
    ranks = [rank(0) | {"digest": "aa"}, rank(1) | {"digest": "bb"}]
    assert summarise(one, state(), "succeeded", HostReport(), ranks)["batch_digests"] == ["aa", "bb"]


def with_local_workers(asked: int | str, **told: str) -> dict[str, Any]:
    settings = replace(config().settings, local_workers=asked)
    endpoints = {f"local/{host.replace('_', '-')}": text for host, text in told.items()}
    own = {"asked": asked, "used": 2, "why": "as asked for"}
    asked_for = replace(config(), settings=settings)
    summary = summarise(asked_for, replace(state(), endpoints=endpoints), "succeeded", HostReport(), [], own)
    return summary["local_workers"]


def test_local_workers_are_told_for_each_trainer_host() -> None:
    assert with_local_workers(0) == {}
    own = {"asked": "auto", "used": 2, "why": "as asked for"}
    other = '{"asked": "auto", "used": 0, "why": "no need"}'
    assert with_local_workers("auto", trainer_2=other) == {
        "trainer-1": own,
        "trainer-2": {"asked": "auto", "used": 0, "why": "no need"},
    }
    untold = {"asked": "auto", "used": None, "why": "this host has not told", "cap_cpus": None}
    assert with_local_workers("auto")["trainer-2"] == untold
    assert with_local_workers("auto", trainer_2="{nonsense")["trainer-2"] == untold


def test_in_words_it_is_one_line_without_what_was_never_measured() -> None:
    good = summarise(config(), state(), "succeeded", HostReport(ranks=2), [rank(0), rank(1)])
    words = in_words(good)
    assert words.startswith("summary: succeeded, ")
    assert f"{good['steps']} steps, {good['rows']} rows, step {good['step_ms']['mean']:.1f} ms" in words
    assert in_words(summarise(config(), state(), "failed", HostReport(ranks=2), [])) == "summary: failed"
