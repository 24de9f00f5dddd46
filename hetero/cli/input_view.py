"""How the input of a `grpc` job stands: tables for people, values for scripts, and rows a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from hetero._proto import splits_pb2 as pb

EPOCHS_SHOWN = 3
SKIPPED_SHOWN = 5

Key = tuple[str, str]
"""("worker", "algo-1/worker-0") or ("rank", "3")"""


class Rates:
    """Rows a second of each worker and rank, from two looks at the input."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[int, float]] = {}
        self._rates: dict[Key, float] = {}

    def look(self, state: pb.InputState, now_s: float) -> None:
        """Take in a state; `now_s` is when it was told, in monotonic seconds."""
        for key, rows, age_s in _rows(state):
            at_s = now_s - age_s
            before = self._seen.get(key)
            if before is not None and at_s - before[1] < 0.2:
                continue  # the figures are the same: they come once a second
            if before is not None and rows >= before[0]:
                self._rates[key] = (rows - before[0]) / (at_s - before[1])
            else:
                self._rates.pop(key, None)
            self._seen[key] = rows, at_s

    def of(self, kind: str, name: str) -> float | None:
        """Return rows a second of a worker or rank; None before the second look."""
        return self._rates.get((kind, name))

    def total(self, kind: str) -> float | None:
        """Return rows a second of all workers, or all ranks, together."""
        rates = [rate for (of, _), rate in self._rates.items() if of == kind]
        return sum(rates) if rates else None


def _rows(state: pb.InputState) -> Iterator[tuple[Key, int, float]]:
    for host in state.hosts:
        for worker in host.stats.workers:
            yield ("worker", f"{host.host}/{worker.name}"), worker.rows, host.stats_age_s
    for rank in state.ranks:
        yield ("rank", str(rank.rank)), rank.rows, 0.0


def input_to_dict(state: pb.InputState, rates: Rates) -> dict[str, Any]:
    """Return the input as JSON values, named as in splits.proto, with `rows_per_s` where it is known, else null."""
    value = _to_dict(state)
    for host in value["hosts"]:
        for worker in host["stats"]["workers"]:
            worker["rows_per_s"] = rates.of("worker", f"{host['host']}/{worker['name']}")
    for rank in value["ranks"]:
        rank["rows_per_s"] = rates.of("rank", str(rank["rank"]))
    value["rows_per_s"] = rates.total("worker")
    return value


def _to_dict(message: Any) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        content = getattr(message, field.name)
        if field.message_type is None:
            value[field.name] = list(content) if field.label == field.LABEL_REPEATED else content
        elif field.label == field.LABEL_REPEATED:
            value[field.name] = [_to_dict(one) for one in content]
        else:
            value[field.name] = _to_dict(content)
    return value


def input_tables(state: pb.InputState, rates: Rates) -> list[str | Table]:
    """Return what to print, top to bottom."""
    waiting = sum(host.stats.waiting_batches for host in state.hosts)
    listed = f"{state.splits} splits an epoch" if state.splits else "splits not listed yet"
    head = f"input: {listed}; {_rate(rates.total('worker'))} rows/s; {waiting} batches wait on data hosts"
    if state.replayed_batches:
        head += f"; {state.replayed_batches} batches prepared again"
    if state.skipped:
        head += f"; {len(state.skipped)} splits skipped"
    tables: list[str | Table] = [head]
    if state.epochs:
        tables.append(_epochs(state))
    tables.append(_workers(state, rates))
    if state.ranks:
        tables.append(_ranks(state, rates))
    for skipped in state.skipped[-SKIPPED_SHOWN:]:
        where = f"epoch {skipped.epoch}, split {skipped.split} {skipped.value} on {skipped.host}"
        tables.append(f"skipped: {where}: {skipped.cause}")
    return tables


def _epochs(state: pb.InputState) -> Table:
    table = _table("epoch", "splits done", "in hand", "batches", "state")
    for epoch in state.epochs[-EPOCHS_SHOWN:]:
        done = f"{epoch.done} of {state.splits}"
        how = "ended" if epoch.ended else "open"
        table.add_row(str(epoch.epoch), done, str(epoch.held), str(epoch.batches), how)
    return table


def _workers(state: pb.InputState, rates: Rates) -> Table:
    table = _table("host", "feed", "worker", "rows/s", "rows", "batches", "splits", "waiting", "at hand")
    for host in state.hosts:
        where = (host.host, "here" if host.connected else "not here")
        if not host.stats.workers:
            table.add_row(*where)
        for index, worker in enumerate(host.stats.workers):
            table.add_row(
                *(where if index == 0 else ("", "")),
                worker.name,
                _rate(rates.of("worker", f"{host.host}/{worker.name}")),
                str(worker.rows),
                str(worker.batches),
                str(worker.splits),
                str(worker.waiting_batches),
                f"epoch {worker.epoch}, split {worker.split}" if worker.epoch >= 0 else "",
            )
        table.add_section()
    return table


def _ranks(state: pb.InputState, rates: Rates) -> Table:
    table = _table("rank", "rows/s", "rows", "batches", "waiting", "waiting MB", "epoch")
    for rank in state.ranks:
        table.add_row(
            str(rank.rank),
            _rate(rates.of("rank", str(rank.rank))),
            str(rank.rows),
            str(rank.batches),
            str(rank.waiting_batches),
            f"{rank.waiting_bytes / 1e6:.1f}",
            str(rank.epoch) if rank.epoch >= 0 else "",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        left = column in ("host", "feed", "worker", "at hand", "state")
        table.add_column(column, justify="left" if left else "right")
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}"
