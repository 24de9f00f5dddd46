"""One host's entry: find out which host this is, work out its part, live it, return the exit code.

prepare   arguments, environment, cluster description, job declaration -> HostConfig, HostPlan
HostLife  starts the processes, then one loop over events until something ends this host's part (`hetero.life`)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from hetero import clusters
from hetero.clusters import local
from hetero.companion import CompanionLife
from hetero.data_host import DataHostLife
from hetero.errors import HeteroError, SettingsError, Stopped
from hetero.host import HostConfig
from hetero.job_file import settle
from hetero.life import HostLife
from hetero.mpi import MpiRank
from hetero.options import likely_misspelt
from hetero.plan import Hardware, HostPlan, plan_host
from hetero.process.child import PARENT_PID, die_with_parent
from hetero.process.console import Console
from hetero.process.cpu_quota import cpu_quota, tightest_quota
from hetero.process.failure import Failure, sagemaker_text
from hetero.process.leaving import leave, open_standard_streams
from hetero.process.parent import PARENT_GONE, watch_parent
from hetero.process.starter import end_starter
from hetero.process.supervisor import Supervisor
from hetero.rundir import default_run_dir
from hetero.settings import resolve_engine
from hetero.topology import Role, Topology
from hetero.trainer_host import TrainerHostLife


@dataclass(frozen=True)
class Prepared:
    """What a launcher is about to run."""

    config: HostConfig
    plan: HostPlan
    warnings: tuple[str, ...] = ()


def prepare(argv: Sequence[str], environ: Mapping[str, str], started_s: float) -> Prepared:
    """Work out this host's part in the job; nothing is started, and nothing written but a default run folder.

    Raises:
        SettingsError, TopologyError, JobFileError, EngineError: with all that is wrong, the value and the next step.
    """
    declaration, settings = settle(argv, environ)
    topology = clusters.detect(environ, settings)
    engine = resolve_engine(settings, topology, declaration.engine)
    settings = clusters.complete(settings, environ)
    mpi = MpiRank.from_environ(environ)
    if mpi is not None and mpi.size > 1 and settings.run_dir is None:
        raise SettingsError(["--run-dir is missing: the launchers that mpirun starts need to be told one folder"])
    run_dir = settings.run_dir or default_run_dir(declaration.name)
    settings = replace(settings, run_dir=run_dir, model_dir=clusters.model_dir(settings, environ, run_dir))
    settings = replace(settings, checkpoint_dir=clusters.checkpoint_dir(settings, environ, run_dir))
    plan = plan_host(topology, settings, engine, hardware_of(topology), mpi)
    config = HostConfig(
        settings=settings,
        topology=topology,
        engine=engine,
        job_name=declaration.name,
        run_dir=str(run_dir.absolute()),
        run_id=uuid.uuid4().hex[:12],
        control_address=plan.control_address,
        started_s=started_s,
        mpi=mpi if plan.role is Role.TRAINER else None,
        sharded_channels=clusters.sharded_channels(settings, environ),
        piped_channels=clusters.piped_channels(settings, environ),
    )
    if problems := config.tls.check():
        raise SettingsError(problems)
    warnings = likely_misspelt([name for name in settings.params if name not in declaration.defaults])
    return Prepared(config, plan, tuple(warnings))


def hardware_of(topology: Topology) -> Hardware:
    """Return what this host offers: the CPUs it may use, and NVIDIA GPUs as the driver lists them."""
    pinned = topology.current.cpus
    quota = tightest_quota(pinned)
    return Hardware(cpu_quota(pinned), _count_gpus(os.environ), None if quota is None else quota.cpus)


def _count_gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    return 0


def _life_class(config: HostConfig) -> type[HostLife]:
    if config.topology.current.role is Role.DATA:
        return DataHostLife
    return TrainerHostLife if config.mpi is None or config.mpi.leads_host else CompanionLife


def _child_environment(config: HostConfig, console: Console) -> dict[str, str]:
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONFAULTHANDLER": "1",
        **os.environ,
        **console.child_environment,
    }
    if config.topology.current.role is Role.DATA:
        environment["CUDA_VISIBLE_DEVICES"] = "-1"  # a data host's GPU, if it has one, is not for input
    package = Path(__file__).resolve().parent.parent
    if package.name != "site-packages":  # run from a source directory: children must find the package too
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), environment.get("PYTHONPATH", "")]))
    return environment


def _report_failure(error: BaseException) -> None:
    """Say what was wrong before anything was started, where SageMaker looks for it too."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    path = clusters.failure_file(os.environ)
    if path is not None:
        failure = Failure("", "launcher", time.time(), exception=type(error).__name__, message=str(error))
        with contextlib.suppress(OSError):
            path.write_text(sagemaker_text(failure), encoding="utf-8")


def _forget_outcome(config: HostConfig) -> None:
    """Begin without the outcome of an earlier run, where this launcher has the folder to itself.

    A container that is started again finds its files as they were. Virtual hosts share a folder and mpirun's launchers
    a host: there another one may just have written why it failed.
    """
    if config.topology.container and config.mpi is None:
        config.run().forget_outcome()
        path = clusters.failure_file(os.environ)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def _end_when_told() -> None:
    """Hear signals, and of the end of whoever started this launcher."""
    for signum in (signal.SIGTERM, signal.SIGINT):  # until HostLife takes them over there is nobody to tell
        signal.signal(signum, lambda number, _frame: sys.exit(128 + number))
    if PARENT_PID in os.environ:
        die_with_parent()  # a virtual host ends with `hetero run`
    elif clusters.ends_with_parent(os.environ):
        signal.signal(PARENT_GONE, lambda *_: sys.exit(128 + signal.SIGTERM))
        watch_parent()


def main(argv: Sequence[str] | None = None) -> int:
    """Run this host's part of the job and return the exit code (DESIGN: Exit codes)."""
    started_s = time.time()
    _end_when_told()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        prepared = prepare(clusters.arguments(arguments, os.environ), os.environ, started_s)
        prepared.config.run().create()
        _forget_outcome(prepared.config)
    except HeteroError as error:
        _report_failure(error)
        if MpiRank.started(os.environ):
            clusters.end_mpi_wait(os.environ)
        return error.exit_code
    config, plan = prepared.config, prepared.plan
    warning = local.pin(config.topology.current.cpus)
    if warning:
        print(warning, flush=True)
    if config.is_chief:
        for line in prepared.warnings:
            print(f"warning: {line}", flush=True)
    settings = config.settings
    console = Console(bar=config.mpi is None)
    with console, Supervisor(settings.grace_s, console, host=config.host) as supervisor:
        life = _life_class(config)(config, plan, supervisor, _child_environment(config, console))
        exit_code, _ = life.run()
    if exit_code and config.mpi is not None:
        clusters.end_mpi_wait(os.environ)
        if config.mpi.leads_host:
            end_starter(config.mpi.aborted_within_s)
    return exit_code


def launch() -> NoReturn:
    """Run this host's part of the job and end the process with its exit code; what a host's entry point calls."""
    open_standard_streams()
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if code > 128:  # a signal, before there was anything to end
            _report_failure(Stopped(code - 128))
    except BaseException as error:
        traceback.print_exc()
        _report_failure(error)
        code = 1
    leave(code)


if __name__ == "__main__":
    launch()
