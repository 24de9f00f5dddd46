"""A local cluster: virtual hosts on this machine, one launcher each, as on real ones.

`hetero run` and `hetero demo` share it. The command's process supervises the launchers; they do the rest.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.clusters.local import LocalCluster
from hetero.errors import SettingsError, Stopped
from hetero.process.child import ChildSpec
from hetero.process.console import Console
from hetero.process.group import ChildEnded
from hetero.process.supervisor import Supervisor
from hetero.rundir import RunDir, read_json, write_json_atomic

LAUNCHER_MARGIN_S = 5.0
"""A launcher needs its own grace period for its children and a moment to write down how it ended."""


@dataclass(frozen=True)
class ClusterSpec:
    """A local cluster to run.

    Attributes:
        data_hosts, trainer_hosts: How many virtual hosts of each role; no data hosts is the homogeneous job.
        data_cpus, trainer_cpus: CPUs that the hosts of a role are pinned to; None leaves them free.
        control_port: Port of the coordinator; None takes a free one.
        grace_s, lease_s: The launchers' own `--grace-s` and `--lease-s`.
    """

    data_hosts: int
    trainer_hosts: int
    data_cpus: tuple[int, ...] | None = None
    trainer_cpus: tuple[int, ...] | None = None
    control_port: int | None = None
    data_group: str = "data_group"
    trainer_group: str = "dnn_group"
    grace_s: float = 10.0
    lease_s: float = 30.0


@dataclass(frozen=True)
class HostResult:
    """How one host's launcher ended.

    Attributes:
        host: Its name.
        exit_code: Its exit code; -N if signal N ended it.
        ended_s: When, seconds since the epoch.
    """

    host: str
    exit_code: int
    ended_s: float


def run_cluster(spec: ClusterSpec, run: RunDir, arguments: Sequence[str], console: Console) -> list[HostResult]:
    """Run one launcher for each virtual host until all have ended.

    A signal to this process (SIGTERM, SIGINT, SIGHUP) is passed on to every launcher as SIGTERM. So is the bad end of
    the coordinator's host, which hosts that never reached it would not hear of before the start deadline.

    Args:
        spec: The hosts.
        run: Folder of the run.
        arguments: Options of the run, given to every launcher.
        console: Shows the lines of all hosts.

    Returns:
        How each host ended, in the order of the hosts.

    Raises:
        Stopped: After a signal, when all launchers have ended.
        TopologyError, SettingsError: The cluster cannot be made.
    """
    cluster = LocalCluster.create(
        run.path / "cluster.json",
        data_hosts=spec.data_hosts,
        trainer_hosts=spec.trainer_hosts,
        data_cpus=spec.data_cpus,
        trainer_cpus=spec.trainer_cpus,
        control_port=spec.control_port,
        data_group=spec.data_group,
        trainer_group=spec.trainer_group,
    )
    results: dict[str, HostResult] = {}
    with Supervisor(spec.grace_s + LAUNCHER_MARGIN_S, console, host="local") as supervisor:
        received: list[int] = []

        def on_signal(number: int, _frame: object) -> None:
            received.append(number)
            supervisor.post(Stopped(number))
            if len(received) > 1:
                supervisor.hurry()  # asked again: do not wait for anybody

        previous = {number: signal.signal(number, on_signal) for number in _stopping_signals()}
        try:
            for host in cluster.hosts:
                supervisor.start(_launcher(cluster, host, run, arguments, console))
            deadline_s = math.inf
            while len(results) < len(cluster.hosts) and time.monotonic() < deadline_s:
                event = supervisor.next_event(None if deadline_s == math.inf else deadline_s - time.monotonic())
                if isinstance(event, Stopped):
                    raise event
                if isinstance(event, ChildEnded):
                    results[event.name] = _result(event)
                    if event.name == cluster.hosts[0] and results[event.name].exit_code:
                        deadline_s = time.monotonic() + _patience_s(spec, results[event.name])
            cause = read_json(run.failure)
            results |= {event.name: _result(event) for event in supervisor.stop()}
            if cause is not None:
                write_json_atomic(run.failure, cause)  # those stopped just now only know that they were
        finally:
            supervisor.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)
    return [results[host] for host in cluster.hosts]


def _stopping_signals() -> list[int]:
    """Return the signals that stop a run: the end of the terminal is one, unless nohup has this process ignore it."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if kept else [signal.SIGHUP])]


def _launcher(cluster: LocalCluster, host: str, run: RunDir, arguments: Sequence[str], console: Console) -> ChildSpec:
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    paths = {} if package.endswith("site-packages") else {"PYTHONPATH": path}
    return ChildSpec(
        name=host,
        argv=(sys.executable, "-m", "hetero.launcher", *arguments, f"--run-dir={run.path}"),
        env={**os.environ, **cluster.environ(host), **console.child_environment, **paths},
        log_path=run.log(host, "launcher"),
    )


def _patience_s(spec: ClusterSpec, coordinator: HostResult) -> float:
    """Return how long the other hosts may go on after the bad end of the coordinator's host, seconds."""
    if coordinator.exit_code == SettingsError.exit_code:
        return 0.0  # it never began
    return spec.lease_s + spec.grace_s + LAUNCHER_MARGIN_S


def _result(event: ChildEnded) -> HostResult:
    return HostResult(event.name, _code(event), time.time())


def _code(event: ChildEnded) -> int:
    if event.exit_code is not None:
        return event.exit_code
    return -signal.Signals[event.signal].value if event.signal else 1


def exit_code_of(results: Sequence[HostResult], trainer_hosts: int) -> int:
    """Return the exit code of a cluster: that of the first trainer host in time that failed.

    The trainers decide whether there is a model, so a data host's code does not count; except where the coordinator's
    host refused the settings, since the others then only failed to find it.
    """
    if results[0].exit_code == SettingsError.exit_code:
        return SettingsError.exit_code
    trainers = results[len(results) - trainer_hosts :]
    failed = sorted((result for result in trainers if result.exit_code), key=lambda result: result.ended_s)
    if not failed:
        return 0
    code = failed[0].exit_code
    return code if code > 0 else 1
