"""The workers of a data host, from its launcher's side: more of them are started where that pays, and told of.

How many pay is decided in `hetero.worker_count`; here are the measurements that go in, and what is done about what
comes out. Only under `grpc`, and only where `--workers-per-host` says no number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from hetero.crew import Crew, shortened
from hetero.errors import HeteroError
from hetero.host import HostConfig
from hetero.options import AUTO
from hetero.plan import HostPlan
from hetero.process.cpu import idle_cpu_s
from hetero.process.cpu_quota import cpu_quota, tightest_quota
from hetero.process.failure import Failure
from hetero.process.memory import available_bytes, resident_bytes
from hetero.rundir import read_json
from hetero.spec import ProcessKind, ProcessSpec
from hetero.worker_count import Decision, Figures, Growth, Sample

INTERVAL_S = 1.0
SPARED_BYTES = 2**30
"""Memory that is left alone: for inputs that take more later on, and for finished batches."""
_LEAST_COST_BYTES = 2**26
THING = "workers_per_host"


class DataWorkers:
    """The workers of one data host. Driven by its launcher's loop, about once a second.

    Args:
        config: The host.
        plan: Its plan; the workers that it begins with are among its processes.
        crew: Starts and ends processes.
        clock: Monotonic seconds.
    """

    def __init__(
        self, config: HostConfig, plan: HostPlan, crew: Crew, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._plan, self._crew, self._clock = config, plan, crew, clock
        self._names = [spec.name for spec in plan.of_kind(ProcessKind.WORKER)]
        self._added: list[str] = []  # in the order in which they were started
        self._looked_s = clock()
        self._growth: Growth | None = None
        self._why = "as asked for"
        self._meter = config.run().meter(config.host, "feed")
        if config.settings.workers_per_host == AUTO:
            self._why = "one for each CPU begun, at most two: a tf.data worker that is stopped would lose rows"
        if plan.most_workers:
            self._growth = Growth(workers=len(self._names), most=plan.most_workers)
            with contextlib.suppress(OSError):
                self._meter.unlink()  # of an earlier run in this folder

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of this host: what was `chosen`, rows a second `measured` by number, `why`."""
        growth = self._growth
        values = {str(workers): round(rate, 1) for workers, rate in growth.measured.items()} if growth else {}
        why = growth.why if growth else self._why
        return {THING: {"chosen": len(self._names) + len(self._added), "measured": values, "why": why}}

    def tick(self) -> None:
        """Look at how this host's batches are taken, and do what follows from it."""
        now_s = self._clock()
        if self._growth is None or self._growth.decided or now_s - self._looked_s < INTERVAL_S:
            return
        self._looked_s = now_s
        if self._any_died():
            self._carry_out(self._growth.give_up("one of the added workers died while they were being tried"))
            return
        pinned = self._config.topology.current.cpus
        cpus = cpu_quota(pinned)
        idle_s = idle_cpu_s() if tightest_quota(pinned) is None else None
        sample = Sample(now_s, self._crew.used_cpu_s(), idle_s, cpus, self._figures(), self._room())
        decision = self._growth.look(sample, serving=self._crew.serving())
        if decision is not None:
            self._carry_out(decision)

    def on_failed(self, spec: ProcessSpec, failure: Failure) -> bool:
        """Do without an added worker that has failed for good; the job goes on with the others.

        Returns:
            Whether it is one of these.
        """
        if self._growth is None or spec.name not in self._added:
            return False
        why = f"given up: {failure.describe()}"
        if self._growth.decided:
            self._end([spec.name])
            self._growth.why = why
            self._say(f"{len(self._names) + len(self._added)} left; {why}")
            self.tell()
        else:
            self._carry_out(self._growth.give_up(why))
        return True

    def tell(self) -> None:
        """Let the chief know, for the summary."""
        self._crew.tell_tuning(shortened(self.summary(), THING))

    def _carry_out(self, decision: Decision) -> None:
        have = len(self._names) + len(self._added)
        if decision.workers > have:
            self._say(f"starting {decision.workers - have} more: {decision.why}")
            self._start(decision.workers)
        elif decision.workers < have:
            self._say(f"stopping {have - decision.workers}: {decision.why}")
            self._end(self._added[decision.workers - have :])
        else:
            self._say(f"keeping {have}: {decision.why}")
        self.tell()

    def _start(self, workers: int) -> None:
        assert self._growth is not None  # noqa: S101  it decided so
        before = len(self._added)
        try:
            for spec in self._plan.more_workers(workers)[before:]:
                self._crew.start(spec)
                self._added.append(spec.name)
        except HeteroError as error:
            self._end(self._added[before:])
            self._say(self._growth.give_up(f"given up: {error}").why)

    def _end(self, names: list[str]) -> None:
        self._crew.give_up(tuple(names))
        self._added = [name for name in self._added if name not in names]

    def _any_died(self) -> bool:
        """Return whether one of the workers that are being tried had to be started again."""
        assert self._growth is not None  # noqa: S101  nothing is tried without
        tried = set(self._added[self._growth.kept - len(self._names) :])
        return any(child.name in tried and child.restarts for child in self._crew.children())

    def _figures(self) -> Figures | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Figures(**read_json(self._meter))
        return None

    def _room(self) -> int:
        """Return how many more workers there is memory for, if they take what the largest one takes."""
        left = available_bytes()
        if left is None:
            return self._plan.most_workers
        pids = [child.pid for child in self._crew.children() if child.name in self._names and child.pid]
        cost = max((resident_bytes(pid) or 0 for pid in pids), default=0)
        return max(0, (left - SPARED_BYTES) // max(cost, _LEAST_COST_BYTES))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"[data {self._config.host}] workers: {text}", flush=True)
