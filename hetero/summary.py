"""summary.json: what a run came to, from its ranks and the coordinator's last word; the chief's launcher writes it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetero.control.state import HostReport, HostState, JobState
from hetero.host import HostConfig, local_key, tuning_key
from hetero.rundir import read_json, write_json_atomic
from hetero.training.device import stall


def write_summary(  # noqa: PLR0917  each is another witness
    config: HostConfig,
    state: JobState | None,
    outcome: str,
    own: HostReport,
    local: Mapping[str, Any] | None = None,
    tuning: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write summary.json and return it. Figures that a failed run never measured are null.

    Args:
        config: The chief's configuration.
        state: The coordinator's last word; None if it was never heard.
        outcome: `succeeded`, `failed` or `stopped`.
        own: This host's last report.
        local: What is to be said of this host's local workers: see `LocalWorkers.summary`.
        tuning: What this host has decided by measuring.
    """
    run = config.run()
    ranks = read_json(run.result(config.host, "ranks")) or []
    summary = summarise(config, state, outcome, own, ranks, local, tuning)
    write_json_atomic(run.summary, summary)
    return summary


def in_words(summary: Mapping[str, Any]) -> str:
    """Return what a summary comes to in one line, for a log; what was never measured is left out."""
    figures = {
        "{} steps": summary["steps"],
        "{} rows": summary["rows"],
        "step {:.1f} ms": summary["step_ms"]["mean"],
        "input wait {:.0%}": summary["input_wait_fraction"],
        "{:.0f} rows/s": summary["rows_per_s"],
    }
    words = [form.format(value) for form, value in figures.items() if value is not None]
    words += [f"{name} {value:.4g}" for name, value in summary["results"].items() if isinstance(value, (int, float))]
    return f"summary: {', '.join([summary['outcome'], *words])}"


def summarise(  # noqa: PLR0917  each is another witness
    config: HostConfig,
    state: JobState | None,
    outcome: str,
    own: HostReport,
    ranks: Sequence[dict[str, Any]],
    local: Mapping[str, Any] | None = None,
    tuning: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the summary as JSON values.

    Args:
        ranks: What each rank measured, rank 0 first; empty if training did not end well.
        local, tuning: See `write_summary`.
    """
    topology = config.topology
    hosts = {host.name: host for host in state.hosts} if state else {}
    cpu_s = {name: host.cpu_s for name, host in hosts.items()} | {config.host: own.cpu_s}
    lost = sum(host.workers_lost + _workers_gone_with(host) for host in hosts.values())
    first = ranks[0] if ranks else {}
    return {
        "job": config.job_name,
        "engine": config.engine,
        "outcome": outcome,
        "hosts": {"data": len(topology.data), "trainer": len(topology.trainers)},
        "ranks": len(ranks) or sum(host.ranks for host in hosts.values()) or own.ranks,
        "epochs": config.settings.epochs,
        "steps": first.get("steps"),
        "rows": _sum(rank.get("rows") for rank in ranks),
        "step_ms": first.get("step_ms", {"mean": None, "p50": None, "p95": None}),
        "input_wait_fraction": _mean(rank.get("input_wait_fraction") for rank in ranks),
        "rows_per_s": _sum(rank.get("rows_per_s") for rank in ranks),
        "first_step_s": first.get("first_step_s"),
        "train_s": first.get("train_s"),
        "cpu_s": {
            "data": round(sum(cpu_s.get(host.name, 0.0) for host in topology.data), 2),
            "trainer": round(sum(cpu_s.get(host.name, 0.0) for host in topology.trainers), 2),
        },
        "local_workers": _local_workers(config, state, local),
        "simulated_device": _simulated_device(config.settings.device_step_ms, ranks),
        "tuning": _tuning(config, state, tuning),
        "replayed_batches": state.replayed_batches if state else 0,
        "lost_workers": lost,
        # A tf.data worker takes the rows that it had begun with it, and nobody knows how many those were.
        "rows_lost": 0 if lost == 0 or config.engine == "grpc" else None,
        "skipped_splits": state.skipped_splits if state else 0,
        "dropped_rows": first.get("dropped_rows"),
        "batch_size": config.settings.batch_size,
        "first_batch_s": first.get("first_batch_s"),
        "run_id": state.run_id if state else config.run_id,
        "rank_steps": [rank["steps"] for rank in ranks],
        "batch_digests": [rank.get("digest") for rank in ranks] if config.settings.deterministic else None,
        "results": first.get("results", {}),
    }


def _simulated_device(step_ms: float, ranks: Sequence[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """Return what the simulated accelerators of all ranks did; None without them."""
    if step_ms == 0:
        return None
    devices = [rank["device"] for rank in ranks]
    busy_s, idle_s = (_sum(device[name] for device in devices) for name in ("busy_s", "idle_s"))
    part = None if busy_s is None or idle_s is None else stall(busy_s, idle_s)
    return {"step_ms": step_ms, "busy_s": busy_s, "idle_s": idle_s, "stall": part}


def _local_workers(
    config: HostConfig, state: JobState | None, own: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """Return by trainer host how many local workers it had and why; empty if none were asked for."""
    if config.settings.local_workers == 0:
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for host in config.topology.trainers:
        found[host.name] = {
            "asked": config.settings.local_workers,
            "used": None,
            "why": "this host has not told",
            "cap_cpus": None,
        }
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            found[host.name] = json.loads(state.endpoints[local_key(host.name)]) if state else found[host.name]
    return found | ({config.host: own} if own is not None else {})


def _tuning(
    config: HostConfig, state: JobState | None, own: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any] | None]:
    """Return by host what was chosen, out of what and why; null for a host that has not told; empty under `local`."""
    if config.engine == "local":
        return {}
    found: dict[str, Mapping[str, Any] | None] = {host.name: None for host in config.topology.hosts}
    if isinstance(asked := config.settings.local_workers, int):
        local = {"local_workers": {"chosen": asked, "measured": {}, "why": "as asked for"}}
        found |= {host.name: local for host in config.topology.trainers}
    for name in found:
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            found[name] = json.loads(state.endpoints[tuning_key(name)]) if state else None
    return found | ({config.host: own} if own is not None else {})


def _workers_gone_with(host: HostState) -> int:
    """Return the workers of a data host that left before the end; of one that vanished the coordinator counted them."""
    return max(1, host.workers_alive) if host.role == "data" and host.leave_reason else 0


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
