"""Virtual hosts with CPU quotas that stand for instance types: each host is a control group of its own.

    with stopped_in_order(), QuotaHosts(folder, job, trainer_cpus=[0.4], data_cpus=[0.3, 0.3]) as hosts:
        hosts.start()
        hosts.wait_until_training(120.0)
        hosts.limit()
        before = hosts.usage()

A host's processes are born into its group, but the quota is set only by `limit`: seconds of TensorFlow's import would
take a minute at 0.3 CPUs, and are no part of what is compared. Needs root.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from control_groups import ControlGroup, GroupUsage, Hierarchy, remove_stale_groups
from virtual_hosts import BenchmarkFailed, VirtualHosts

from hetero.control.client import ControlClient
from hetero.control.state import JobState, Phase
from hetero.errors import HeteroError
from hetero.process.cpu import read_stat

LAUNCHER = "launcher"
_LOOK_S = 0.2
_PROCESS = b"HETERO_PROCESS="


class QuotaHosts(VirtualHosts):
    """Virtual hosts, each in a control group. A context manager: leaving it ends them and removes the groups.

    Args:
        folder: Scratch folder; each host's output and the run's folder go there.
        job: `path/to/job.py:name`.
        trainer_cpus: CPUs of each trainer host.
        data_cpus: CPUs of each data host; none is a homogeneous job.
        options: Options for every launcher.
        environment: Variables for every launcher, beside this process's own.

    Raises:
        BenchmarkFailed: Control groups cannot be made here.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        *,
        trainer_cpus: Sequence[float],
        data_cpus: Sequence[float] = (),
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            folder,
            job,
            data_hosts=len(data_cpus),
            trainer_hosts=len(trainer_cpus),
            options=options,
            environment=environment,
        )
        self.cpus = dict(zip(self.cluster.hosts, (*data_cpus, *trainer_cpus), strict=True))
        hierarchy = Hierarchy.find()
        remove_stale_groups(hierarchy)
        self._groups: dict[str, ControlGroup] = {}
        try:
            for host in self.cluster.hosts:
                self._groups[host] = ControlGroup(host, hierarchy)
        except BaseException:
            self._remove_groups()
            raise

    def command(self, host: str) -> list[str]:
        """Return what starts a host's launcher, in the host's group."""
        return self._groups[host].command(super().command(host))

    def wait_until_training(self, timeout_s: float) -> None:
        """Wait until rank 0 has taken steps and every worker of every host can prepare input.

        Raises:
            BenchmarkFailed: That did not come in time, or a launcher has ended.
        """
        deadline_s, why = time.monotonic() + timeout_s, "the coordinator has not answered"
        with ControlClient(self.control_address) as client:
            while time.monotonic() < deadline_s and not self.over:
                with contextlib.suppress(HeteroError):
                    why = _not_ready(client.status(1.0)) or ("" if self._has_stepped() else "no step was taken")
                    if not why:
                        return
                time.sleep(_LOOK_S)
        raise BenchmarkFailed(f"training has not begun within {timeout_s:g} s: {why}\n{self.outputs()}")

    def _has_stepped(self) -> bool:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def limit(self) -> None:
        """Put every host into its quota."""
        for host, group in self._groups.items():
            group.limit(self.cpus[host])

    def lift(self) -> None:
        """Take the quotas away again, so that the hosts end as soon as they can."""
        for group in self._groups.values():
            group.limit(None)

    def usage(self) -> dict[str, GroupUsage]:
        """Return by host what it has used since its start."""
        return {host: group.usage() for host, group in self._groups.items()}

    def process_cpu_s(self, host: str) -> dict[str, float]:
        """Return the CPU seconds of each living process of a host, by the name that hetero knows it by, to 10 ms.

        The launcher, and what else bears no name, is `launcher`.
        """
        found: dict[str, float] = {}
        for pid in self._groups[host].pids:
            stat = read_stat(pid)
            if stat is not None:
                name = _name_of(pid)
                found[name] = found.get(name, 0.0) + stat.cpu_s
        return found

    def stop(self) -> None:
        """End whatever still runs and remove the groups, with what the launchers may have left in them."""
        try:
            with contextlib.suppress(BenchmarkFailed):  # the group may be gone: this is called twice where a run failed
                self.lift()
            super().stop()
        finally:
            self._remove_groups()

    def _remove_groups(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for group in self._groups.values():
                all_of_them.callback(group.remove)


def _not_ready(state: JobState) -> str:
    """Return what a job still waits for; empty if every rank trains and every worker can prepare input."""
    if state.phase is not Phase.TRAINING:
        return f"the job is {state.phase.value}"
    for host in state.hosts:
        workers = sum("worker" in process.name for process in host.processes)
        if not host.registered or host.workers_alive < workers:
            return f"{host.name} has {host.workers_alive} of {workers} workers ready"
    return ""


def _name_of(pid: int) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return LAUNCHER
    names = [value[len(_PROCESS) :].decode() for value in environment if value.startswith(_PROCESS)]
    return names[0] if names else LAUNCHER


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """Have SIGTERM, SIGINT and SIGHUP raise SystemExit (128 + signal) once, so that context managers clean up.

    Further signals are ignored until that is done: a second Ctrl-C must not leave a host in its quota.
    """
    signals = [
        one
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(one) is not signal.SIG_IGN  # as under nohup
    ]

    def stop(signum: int, _frame: FrameType | None) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    before = {one: signal.signal(one, stop) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
