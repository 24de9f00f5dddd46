"""The local workers of a trainer host, from its launcher's side: started when they are worth it, given up, told of.

How many are worth it under `--local-workers auto` is decided in `hetero.local_workers`; here are the measurements that
go in, and what is done about what comes out. The processes themselves are those of a data host.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection
from typing import Any

from hetero.crew import Crew, shortened
from hetero.errors import HeteroError
from hetero.host import HostConfig
from hetero.local_workers import AUTO, Sample, Sums, Trial
from hetero.plan import HostPlan
from hetero.process.cpu import idle_cpu_s
from hetero.process.cpu_quota import CpuQuota, cpu_quota, tightest_quota
from hetero.process.failure import Failure
from hetero.process.pacer import Pacer
from hetero.rundir import read_json
from hetero.spec import ProcessKind, ProcessSpec

INTERVAL_S = 1.0
THING = "local_workers"


class LocalWorkers:
    """The local workers of one trainer host. Driven by its launcher's loop, about once a second.

    Args:
        config: The host.
        plan: Its plan; local workers that are asked for by number are among its processes.
        crew: Starts and ends processes.
        clock: Monotonic seconds.
    """

    def __init__(
        self, config: HostConfig, plan: HostPlan, crew: Crew, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._plan, self._crew, self._clock = config, plan, crew, clock
        self._run = config.run()
        self._names = [spec.name for spec in plan.processes if plan.is_local(spec)]
        self._workers = {spec.name for spec in plan.of_kind(ProcessKind.WORKER) if plan.is_local(spec)}
        # Under mpirun a host has several launchers: the first one of them has the local workers.
        self._asked = config.settings.local_workers if config.mpi is None or config.mpi.leads_host else 0
        self._why = "as asked for"
        self._trial: Trial | None = None
        self._looked_s = clock()
        self._told = False
        self._quota = tightest_quota(config.topology.current.cpus)
        self._pacer = self._make_pacer() if self._asked else None
        self._served = 0  # the most that could prepare input at one time
        if self._asked == AUTO:
            # Under tf_data what a worker has begun is lost with it, so that one that was started stays.
            self._trial = Trial(
                cpus=self._cpus(),
                most=plan.most_local_workers,
                may_stop=plan.engine == "grpc",
                paced=self._pacer is not None,
            )
            for path in self._run.work(config.host).glob("rank-*.meter.json"):  # of an earlier run in this folder
                with contextlib.suppress(OSError):
                    path.unlink()

    @property
    def asked(self) -> bool:
        """Whether this host is to have local workers at all, or may have."""
        return self._asked != 0

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of this host.

        Returns:
            `asked`; `used`, the workers left that were ever ready; `why`; `cap_cpus`, what they are kept to, None where
            nothing but their priority holds them back.
        """
        why = self._trial.why if self._trial is not None else self._why
        if self._workers and not self._served:
            why += "; training ended before one of them was ready"
        used, pacer = min(len(self._workers), self._served), self._pacer
        cap_cpus = None if pacer is None else round(pacer.cpus, 2)
        return {"asked": self._asked, "used": used, "why": why, "cap_cpus": cap_cpus}

    def tuning(self) -> dict[str, Any]:
        """Return what was chosen, rows a second `measured` by number of local workers, and why."""
        told, trial = self.summary(), self._trial
        values = {str(workers): round(rate, 1) for workers, rate in trial.measured.items()} if trial else {}
        return {THING: {"chosen": told["used"], "measured": values, "why": told["why"]}}

    def note(self) -> None:
        """See how many serve; once more before they are stopped because training is over."""
        self._served = max(self._served, self._crew.serving()) if self.asked else 0

    def tick(self) -> None:
        """Look at how training goes, and do what follows from it."""
        now_s = self._clock()
        if not self.asked or now_s - self._looked_s < INTERVAL_S:
            return
        self._looked_s = now_s
        self._look_at_quota()
        if self._pacer is not None and self._workers:
            self._pacer.start()
        self.note()
        if not self._told and self._served:
            self.tell()
        if self._trial is None or self._trial.decided:
            return
        quota = self._quota
        self._trial.allow(self._cpus(), paced=self._pacer is not None)
        sample = Sample(now_s, self._ranks(), self._used_cpu_s(), None if quota else idle_cpu_s())
        decision = self._trial.look(sample, serving=self._crew.serving())
        if decision is None:
            return
        have = len(self._workers)
        if not decision.final:
            self._say(f"starting {decision.workers}: {decision.why}")
            self._start(decision.workers)
        elif have and not decision.workers:
            self._say(f"stopping {have}: {decision.why}")
            self._end(self._names)
        else:
            self._say(f"{f'keeping {have}' if have else 'none'}: {decision.why}")
        self.tell()

    def on_failed(self, spec: ProcessSpec, failure: Failure) -> None:
        """Do without a process that has failed for good; the job goes on with the data hosts."""
        if spec.name not in self._names:
            return
        alone = spec.kind is ProcessKind.WORKER and self._workers > {spec.name}
        self._end([spec.name] if alone else self._names)
        self._give_up(f"given up: {failure.describe()}")

    def tell(self) -> None:
        """Let the chief know, for the summary."""
        if self.asked:
            self._told = True
            self.note()
            self._crew.tell(shortened(self.summary()))
            self._crew.tell_tuning(shortened(self.tuning(), THING))

    def close(self) -> None:
        """End what paces the workers. May be repeated."""
        if self._pacer is not None:
            self._pacer.close()

    def _give_up(self, why: str) -> None:
        self._why = why
        if self._trial is not None and not self._workers:
            self._trial.give_up(why)
        left = f"{len(self._workers)} left; " if self._workers else ""
        self._say(f"{left}{why}. The job goes on with the data hosts")
        self.tell()

    def _start(self, workers: int) -> None:
        try:
            for spec in self._plan.local_processes(workers):
                self._crew.start(spec)
                self._names.append(spec.name)
                if spec.kind is ProcessKind.WORKER:
                    self._workers.add(spec.name)
        except HeteroError as error:
            self._end(self._names)
            self._give_up(f"given up: {error}")

    def _end(self, names: Collection[str]) -> None:
        self._crew.give_up(tuple(names))
        self._workers -= set(names)
        self._names = [name for name in self._names if name not in set(names)]

    def _cpus(self) -> float:
        return self._quota.cpus if self._quota else cpu_quota(self._config.topology.current.cpus)

    def _look_at_quota(self) -> None:
        """Pace by the quota that there is now: one can be set, changed and lifted while a host runs."""
        quota = tightest_quota(self._config.topology.current.cpus)
        if _same(quota, self._quota):
            return
        self.close()
        self._quota = quota
        self._pacer = self._make_pacer()

    def _make_pacer(self) -> Pacer | None:
        """Return what keeps the workers within a quota or the cap that was asked for; None where there is neither."""
        lanes, cap_cpus = worker_threads(self._config), self._config.settings.local_workers_cpus
        if lanes is None:
            return None
        lanes = lanes if self._plan.engine == "tf_data" else 1
        return Pacer(self._crew.living, lambda name: name in self._workers, self._quota, cap_cpus, lanes)

    def _used_cpu_s(self) -> float:
        """Return the CPU seconds of all that shares the quota, as far as the system tells, else of this host's part."""
        figures = self._quota.read() if self._quota else None
        return self._crew.used_cpu_s() if figures is None or figures.used_s is None else figures.used_s

    def _ranks(self) -> dict[str, Sums]:
        """Return what the ranks of this host have measured so far."""
        found = {}
        for path in self._run.work(self._config.host).glob("rank-*.meter.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[path.name] = Sums(**read_json(path))
        return found

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"[trainer {self._config.host}] local workers: {text}", flush=True)


def _same(one: CpuQuota | None, other: CpuQuota | None) -> bool:
    """Return whether two looks have found the same quota."""
    return (one and one.cpus) == (other and other.cpus)


def worker_threads(config: HostConfig) -> int | None:
    """Return how many threads a local worker can keep busy within what it is kept to; None where that is nothing."""
    quota, cap_cpus = tightest_quota(config.topology.current.cpus), config.settings.local_workers_cpus
    if quota is None and cap_cpus is None:
        return None
    return math.ceil(min(quota.cpus if quota else math.inf, cap_cpus or math.inf))
