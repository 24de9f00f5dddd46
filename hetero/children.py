"""What runs in the processes that a launcher starts: `python -m hetero.children KIND`, KIND one of `_MAINS`.

A child reads one environment variable that describes its host (`HostConfig`), finds everybody else through the
coordinator, and dies with its launcher. Whatever ends it is written where the launcher looks for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.errors import DataServiceLost, HeteroError
from hetero.host import (
    CHANNELS_KEY,
    CONFIG_VARIABLE,
    PORT_VARIABLE,
    PROCESS_VARIABLE,
    HostConfig,
    refuse_without_channels,
    told_channels,
    worker_key,
)
from hetero.process import memory_folder
from hetero.process.child import die_with_parent
from hetero.process.failure import record_exception
from hetero.process.heap import give_back_freed_memory, share_one_heap
from hetero.process.leaving import leave
from hetero.process.priority import yield_to_others
from hetero.spare_cpus import worker_threads
from hetero.topology import Role
from hetero.training.peers import follows_from_a_peer

if TYPE_CHECKING:
    from hetero.control.state import JobState


def main(argv: list[str] | None = None) -> int:
    """Run one child process and return its exit code."""
    die_with_parent()
    kind, *arguments = sys.argv[1:] if argv is None else argv
    config = HostConfig.from_json(os.environ[CONFIG_VARIABLE])
    process = os.environ[PROCESS_VARIABLE]
    error_path = config.run().error(config.host, process)
    try:
        if config.topology.current.role is Role.TRAINER and kind in _LOCAL:
            yield_to_others()
        _MAINS[kind](config, *arguments)
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:  # the launcher reports it, whatever it is
        secondary = follows_from_a_peer(error)
        record_exception(error_path, error, host=config.host, process=process, secondary=secondary)
        if isinstance(error, HeteroError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        return error.exit_code if isinstance(error, HeteroError) else 1
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr, flush=True)
    return 1


def run_coordinator(config: HostConfig) -> None:
    """Serve the control plane until terminated."""
    from hetero.control.config import CoordinatorConfig
    from hetero.control.coordinator import serve

    share_one_heap()
    give_back_freed_memory()
    work = config.run().work(config.host)
    work.mkdir(parents=True, exist_ok=True)
    settings, topology = config.settings, config.topology
    serve(
        CoordinatorConfig(
            port=_preferred_port(),
            data=tuple(host.name for host in topology.data),
            trainers=tuple(host.name for host in topology.trainers),
            journal=work / "coordinator.json",
            run_id=config.run_id,
            cluster=topology.cluster_id,
            token=settings.token,
            start_timeout_s=settings.start_timeout_s,
            lease_s=settings.lease_s,
            required_endpoints=("dispatcher",) if config.engine == "tf_data" else (),
            splits=config.engine == "grpc",
            deterministic=settings.deterministic,
            sharded=config.sharded_channels if config.engine == "grpc" else (),
            epochs=settings.epochs,
            bad_split=settings.bad_split,
            tls=config.tls,
        )
    )


def run_dispatcher(config: HostConfig) -> None:
    """Serve the tf.data service dispatcher, and end the tasks of workers that will not come back."""
    from hetero.data.tf_retire import Dispatcher
    from hetero.data.tf_server import serve_dispatcher

    control = config.connect()
    control.watch()
    dispatcher: list[Dispatcher] = []

    def listening(port: int) -> None:
        control.publish(CHANNELS_KEY, told_channels(config))
        control.publish("dispatcher", f"{config.topology.current.address}:{port}")
        dispatcher.append(Dispatcher(f"127.0.0.1:{port}"))

    pulse = config.run().pulse(config.host, os.environ[PROCESS_VARIABLE])

    def tick(_workers: int) -> None:
        _touch(pulse)
        lost = lost_workers(control.state)
        if lost:
            with contextlib.suppress(DataServiceLost):  # itself is being asked: the next tick asks again
                dispatcher[0].retire_all(lost)

    memory = memory_folder.path_of(config.run_id)
    work = (memory if memory.is_dir() else config.run().work(config.host)) / "dispatcher"
    serve_dispatcher(_preferred_port(), work, run_id=config.run_id, on_listening=listening, on_tick=tick)


def lost_workers(state: JobState | None) -> list[str]:
    """Return the addresses of the workers that are gone for good: with their host, or given up by it.

    Trainer hosts can have workers too.
    """
    lost = []
    for host in state.hosts if state else ():
        gone = host.lost or host.left or host.workers_gone_for_good
        given_up = {process.name for process in host.processes if process.state in ("failed", "stopped")}
        for key, value in (state.endpoints if state else {}).items():
            kind, _, rest = key.partition("/")
            name, _, process_name = rest.rpartition("/")
            if kind == "worker" and name == host.name and (gone or process_name in given_up):
                lost.append(value.partition(" ")[0])
    return lost


def run_worker(config: HostConfig, _index: str) -> None:
    """Serve one tf.data worker and tell the coordinator how many tasks it has open."""
    from hetero.data.tf_server import serve_worker

    control = config.connect()
    address, process = config.topology.current.address, os.environ[PROCESS_VARIABLE]
    state = control.wait_for(
        lambda state: "dispatcher" in state.endpoints, config.settings.start_timeout_s, "The dispatcher"
    )
    if state.ended:
        signal.pause()  # the launcher hears of the end too, and stops this process
    if config.topology.current.role is Role.TRAINER:
        refuse_without_channels(config, state.endpoints)
        if (threads := worker_threads(config)) is not None:
            # With a thread for each CPU of the machine it would use up a period's quota before it can be paused.
            for name in ("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"):
                os.environ.setdefault(name, str(threads))
    published: dict[str, str] = {}
    port: list[int] = []

    pulse = config.run().pulse(config.host, process)

    def tick(open_tasks: int) -> None:
        _touch(pulse)
        value = f"{address}:{port[0]} {open_tasks}"
        if published.get("value") != value:
            # Without an answer the next tick tries again; a worker serves on while the coordinator is being replaced.
            with contextlib.suppress(HeteroError):
                control.publish(worker_key(config.host, process), value, timeout_s=1.0)
                published["value"] = value

    def listening(actual: int) -> None:
        port.append(actual)
        tick(0)

    serve_worker(
        state.endpoints["dispatcher"],
        address,
        _preferred_port(),
        port_file=config.run().work(config.host) / f"{process}-{config.run_id}.port",
        on_listening=listening,
        on_tick=tick,
    )


def run_feed(config: HostConfig, workers: str = "0") -> None:
    """Serve the batches that this host's workers prepare; of so many at first, if more may come."""
    from hetero.feeding import serve_feed

    serve_feed(config, os.environ[PROCESS_VARIABLE], _preferred_port(), int(workers))


def run_feed_worker(config: HostConfig, workers: str) -> None:
    """Prepare splits for this host's feed, as one of so many workers."""
    from hetero.feeding import serve_worker

    serve_worker(config, os.environ[PROCESS_VARIABLE], int(workers))


def run_lister(config: HostConfig) -> None:
    """List the job's splits for rank 0, whose host lacks the channel that they are of."""
    from hetero.listing import serve_list

    serve_list(config, os.environ[PROCESS_VARIABLE])


def _touch(pulse: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to stop serving
        pulse.touch()


def _preferred_port() -> int:
    return int(os.environ[PORT_VARIABLE])


def run_rank(config: HostConfig, local_rank: str) -> None:
    """Train: the job's file, Horovod, the input stream and the meter put together."""
    from hetero.rank import Rank

    Rank(config, int(local_rank)).run()


_LOCAL = ("feed", "feed-worker", "worker")
"""What a trainer host runs beside its ranks if it has local workers: they must not slow training down."""
_MAINS: Mapping[str, Callable[..., None]] = {
    "coordinator": run_coordinator,
    "dispatcher": run_dispatcher,
    "worker": run_worker,
    "feed": run_feed,
    "feed-worker": run_feed_worker,
    "rank": run_rank,
    "lister": run_lister,
}


if __name__ == "__main__":
    leave(main())
