"""From topology and settings to the processes of each host. Pure: the same everywhere, and nothing is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetero.errors import SettingsError
from hetero.mpi import MpiRank
from hetero.settings import Settings
from hetero.spec import ProcessKind, ProcessSpec, RestartPolicy
from hetero.topology import Host, Role, Topology

CHILDREN_MODULE = "hetero.children"
# A service that dies once is an accident and is replaced within the time that clients retry; six deaths in a minute
# are a fault that a seventh start will not cure.
SERVICE_RESTARTS = RestartPolicy(attempts=5, window_s=60.0, backoff_s=0.2, max_backoff_s=5.0)
# Workers of the grpc engine run the job's own code, which may be killed often (memory, native code) and yet get on.
# A split that kills every worker is found out by its feed, so this only bounds a worker that cannot even start: the
# window is long enough to see that also where a start takes many seconds.
FEED_WORKER_RESTARTS = RestartPolicy(attempts=100, window_s=1800.0, backoff_s=0.1, max_backoff_s=0.5)
# A rank cannot be replaced: its peers stand in the middle of an allreduce.
RANK_RESTARTS = RestartPolicy(attempts=0)
# Started on the first data host only when rank 0 asks for it; it ends once it has listed the job's splits.
LISTER = ProcessSpec(
    name="lister",
    kind=ProcessKind.LISTER,
    module=CHILDREN_MODULE,
    args=("lister",),
    restarts=SERVICE_RESTARTS,
)
_LAST_PORT = 65535
_HARDLY = 0.05  # of a CPU: so little more than a whole number is no further CPU
# More than one tf.data worker a host is worth something only where the last CPU is a part of one: a worker's threads,
# stopped in turn when the quota of a period is used up, leave some of it (0.911 of what a quota of 1.35 CPUs can do,
# two workers 1.012). With whole CPUs one worker uses them all, and a second one costs memory and its share of threads.
_MOST_TF_DATA_WORKERS = 2
# Workers that wait for disks or networks add up; 16 on two CPUs gave 16.0 times the rows of one. Beyond that it is
# memory that they cost, and on large hosts what all of them together ask of a disk.
_MOST_WORKERS_A_CPU, _MOST_WORKERS = 8, 64
_DATA_PORT = 6000


@dataclass(frozen=True)
class Hardware:
    """What a host has to offer.

    Args:
        cpus: CPUs that its processes may use, a fraction where a quota says so.
        gpus: Accelerators that its ranks may use.
        quota_cpus: CPUs that a quota leaves it, where that is less than it can run on.
    """

    cpus: float
    gpus: int
    quota_cpus: float | None = None


@dataclass(frozen=True)
class HostPlan:
    """Everything one host has to run.

    Args:
        host: The host.
        role: Its role.
        engine: `tf_data`, `grpc` or `local`.
        processes: In the order in which they are started.
        control_host: Address of the coordinator's host.
        control_port: Port of the coordinator.
        first_rank: Global rank expected for `rank-0` of this host; None on a data host. The global rank is settled when
            the hosts have registered, since each host counts its own accelerators.
        expected_ranks: World size expected, if all trainer hosts are like this one.
        local_port: Port that this trainer host's local workers prefer, or the first one; 0 if it has none.
        most_local_workers: How many of them this host may start later on, under `--local-workers auto`.
        most_workers: How many workers this data host may come to have; 0 if it keeps those that it begins with.
        ranks: Ranks of the host; under mpirun each of its launchers has one of them.
    """

    host: Host
    role: Role
    engine: str
    processes: tuple[ProcessSpec, ...]
    control_host: str
    control_port: int
    first_rank: int | None
    expected_ranks: int
    local_port: int = 0
    most_local_workers: int = 0
    most_workers: int = 0
    ranks: int = 0

    @property
    def control_address(self) -> str:
        """Where the coordinator listens, `host:port`."""
        return f"{self.control_host}:{self.control_port}"

    @property
    def runs_coordinator(self) -> bool:
        """Whether the coordinator is one of this host's processes."""
        return bool(self.of_kind(ProcessKind.COORDINATOR))

    def global_rank(self, process: ProcessSpec) -> int | None:
        """Return the global rank expected for one of this host's ranks; None for any other process."""
        if process.kind is not ProcessKind.RANK or self.first_rank is None:
            return None
        return self.first_rank + self.of_kind(ProcessKind.RANK).index(process)

    def of_kind(self, kind: ProcessKind) -> tuple[ProcessSpec, ...]:
        """Return the processes of one kind, in order."""
        return tuple(process for process in self.processes if process.kind is kind)

    def is_local(self, process: ProcessSpec) -> bool:
        """Return whether a process is a local worker of a trainer host, or their feed."""
        return self.role is Role.TRAINER and process.kind in (ProcessKind.FEED, ProcessKind.WORKER)

    def local_processes(self, workers: int) -> tuple[ProcessSpec, ...]:
        """Return what so many local workers of this trainer host consist of. The job can do without any of them."""
        return _local_processes(self.engine, self.local_port, workers)

    def more_workers(self, workers: int) -> tuple[ProcessSpec, ...]:
        """Return what this data host has to add to have so many workers. The job can do without any of them."""
        first = len(self.of_kind(ProcessKind.WORKER))
        return tuple(_feed_worker(index, workers) for index in range(first, workers))

    @property
    def later_processes(self) -> tuple[ProcessSpec, ...]:
        """What may be started later on, at most."""
        return (*self.local_processes(self.most_local_workers), *self.more_workers(self.most_workers))


def plan_host(
    topology: Topology, settings: Settings, engine: str, hardware: Hardware, mpi: MpiRank | None = None
) -> HostPlan:
    """Plan the processes of the topology's current host.

    Args:
        topology: The cluster, seen from the host to plan.
        settings: The run's settings.
        engine: `tf_data`, `grpc` or `local`, as `resolve_engine` settled it.
        hardware: What the host has; its GPUs decide the number of ranks and its CPUs that of workers where the settings
            do not.
        mpi: Which of mpirun's processes the launcher to plan for is; None where mpirun did not start it.

    Returns:
        The plan.

    Raises:
        SettingsError: The ports of the settings cannot all be used on one host, or mpirun started the wrong processes.
    """
    if engine not in ("tf_data", "grpc", "local"):
        raise ValueError(f"engine is {engine!r}; a plan needs tf_data, grpc or local")
    host = topology.current
    workers, most_workers = _workers(settings, engine, hardware.cpus)
    ports = 1 + workers if engine == "tf_data" else 1
    ranks = settings.ranks_per_host or hardware.gpus or 1
    control_port = topology.control_port or settings.control_port
    local, most_local = _local_workers(settings, engine, hardware)
    local_ports = min(1, local + most_local) if engine == "grpc" else local + most_local
    if engine != "local":
        _check_ports(topology, settings, ports, local_ports, control_port)
    processes: list[ProcessSpec] = []
    if host == topology.coordinator_host:
        processes.append(
            _service("coordinator", ProcessKind.COORDINATOR, ("coordinator",), control_port, critical=True)
        )
    if host.role is Role.DATA and engine == "grpc":
        port = _first_port(topology, settings, ports, host)
        args = ("feed", str(workers)) if most_workers else ("feed",)
        processes.append(_service("feed", ProcessKind.FEED, args, port, critical=True))
        processes.extend(_feed_worker(index, workers) for index in range(workers))
    if host.role is Role.DATA and engine == "tf_data":
        port = _first_port(topology, settings, ports, host)
        if host == topology.data[0]:
            processes.append(_service("dispatcher", ProcessKind.DISPATCHER, ("dispatcher",), port, critical=True))
        for index in range(workers):
            args = ("worker", str(index))
            name, worker_port = f"worker-{index}", port + 1 + index
            processes.append(_service(name, ProcessKind.WORKER, args, worker_port, critical=False))
    local_port = 0
    if host.role is Role.TRAINER:
        processes.extend(_rank(index) for index in range(ranks))
        local_port = _local_port(topology, settings, ports, local_ports, host) if local_ports else 0
        processes.extend(_local_processes(engine, local_port, local))
    plan = HostPlan(
        host=host,
        role=host.role,
        engine=engine,
        processes=tuple(processes),
        control_host=topology.coordinator_host.address,
        control_port=control_port,
        first_rank=topology.trainers.index(host) * ranks if host.role is Role.TRAINER else None,
        expected_ranks=len(topology.trainers) * ranks,
        local_port=local_port,
        most_local_workers=most_local if host.role is Role.TRAINER else 0,
        most_workers=most_workers if host.role is Role.DATA else 0,
        ranks=ranks if host.role is Role.TRAINER else 0,
    )
    return plan if mpi is None else _under_mpirun(plan, settings, mpi)


def plan_cluster(topology: Topology, settings: Settings, engine: str, hardware: Hardware) -> tuple[HostPlan, ...]:
    """Plan every host, data hosts first, as if each trainer host had this hardware.

    Raises:
        SettingsError: As `plan_host`.
    """
    return tuple(plan_host(topology.seen_from(h.name), settings, engine, hardware) for h in topology.hosts)


def _under_mpirun(plan: HostPlan, settings: Settings, mpi: MpiRank) -> HostPlan:
    """Return what one launcher does of a host's plan where mpirun starts a launcher for each rank.

    Raises:
        SettingsError: mpirun runs on a data host too, or starts another number of ranks than was asked for.
    """
    if plan.role is Role.DATA:
        if mpi.size == 1:
            return plan  # whatever started it so, it is one launcher on one host
        problem = (
            f"mpirun started this launcher on data host {plan.host.name} as one of {mpi.size} processes; data hosts "
            f"have no ranks. Name the trainer group alone in the job's `distribution` (`instance_groups`)"
        )
        raise SettingsError([problem])
    if settings.ranks_per_host not in (None, mpi.local_size):
        problem = (
            f"--ranks-per-host is {settings.ranks_per_host}, but mpirun starts {mpi.local_size} on {plan.host.name}: "
            f"leave it out, or set mpi's `processes_per_host` to the same number"
        )
        raise SettingsError([problem])
    plan = replace(plan, first_rank=mpi.rank, expected_ranks=mpi.size, ranks=mpi.local_size)
    own = _rank(mpi.local_rank)
    if not mpi.leads_host:
        return replace(plan, processes=(own,), local_port=0, most_local_workers=0)
    return replace(plan, processes=tuple(p for p in plan.processes if p.kind is not ProcessKind.RANK or p == own))


def _service(name: str, kind: ProcessKind, args: tuple[str, ...], port: int, *, critical: bool) -> ProcessSpec:
    """Return the blueprint of a process that is replaced when it dies."""
    return ProcessSpec(
        name=name,
        kind=kind,
        module=CHILDREN_MODULE,
        args=args,
        port=port,
        restarts=SERVICE_RESTARTS,
        critical=critical,
    )


def _workers(settings: Settings, engine: str, cpus: float) -> tuple[int, int]:
    """Return how many workers a data host begins with, and how many it may come to have; 0: it keeps those."""
    if isinstance(settings.workers_per_host, int):
        return settings.workers_per_host, 0
    begun = max(1, math.ceil(cpus - _HARDLY))
    if engine == "grpc":
        return begun, max(begun, min(_MOST_WORKERS_A_CPU * begun, _MOST_WORKERS))
    if engine == "local":
        return 0, 0
    return min(begun, _MOST_TF_DATA_WORKERS if begun - cpus > _HARDLY else 1), 0


def _local_workers(settings: Settings, engine: str, hardware: Hardware) -> tuple[int, int]:
    """Return how many local workers each trainer host starts, and how many it may start later on."""
    if isinstance(settings.local_workers, int):
        return settings.local_workers, 0
    # One is left to training; where there is hardly another, local workers take what training leaves of it.
    spare = max(1, int(hardware.cpus) - 1)
    if hardware.quota_cpus is not None or settings.local_workers_cpus is not None:
        # They are paced, so that training finds its part in the same CPU.
        paced = min(hardware.quota_cpus or hardware.cpus, settings.local_workers_cpus or math.inf)
        spare = math.ceil(paced)
    return 0, min(1, spare) if engine == "tf_data" else spare  # one tf.data worker uses all CPUs that it gets


def _local_processes(engine: str, port: int, workers: int) -> tuple[ProcessSpec, ...]:
    """Return local workers and what belongs to them: like those of a data host, but nothing ends with them."""
    if not workers:
        return ()
    if engine == "grpc":
        feed = _service("feed", ProcessKind.FEED, ("feed",), port, critical=False)
        processes = (feed, *(_feed_worker(index, workers) for index in range(workers)))
    else:
        processes = tuple(
            _service(f"worker-{index}", ProcessKind.WORKER, ("worker", str(index)), port + index, critical=False)
            for index in range(workers)
        )
    # The accelerators are the ranks': what `inputs` imports must not take memory of theirs.
    return tuple(replace(process, env={"CUDA_VISIBLE_DEVICES": "-1"}) for process in processes)


def _feed_worker(index: int, workers: int) -> ProcessSpec:
    """Return the blueprint of a worker of the grpc engine, which serves its host's feed and listens on no port."""
    return ProcessSpec(
        name=f"worker-{index}",
        kind=ProcessKind.WORKER,
        module=CHILDREN_MODULE,
        args=("feed-worker", str(workers)),
        port=None,
        restarts=FEED_WORKER_RESTARTS,
        critical=False,
    )


def _rank(index: int) -> ProcessSpec:
    """Return the blueprint of the rank with this local index."""
    return ProcessSpec(
        name=f"rank-{index}",
        kind=ProcessKind.RANK,
        module=CHILDREN_MODULE,
        args=("rank", str(index)),
        port=None,
        restarts=RANK_RESTARTS,
        critical=True,
    )


def _first_port(topology: Topology, settings: Settings, ports: int, host: Host) -> int:
    """Return the first data port of a data host: virtual hosts at one address get ranges one after the other."""
    same_address = [other for other in topology.data if other.address == host.address]
    return _data_port(topology, settings) + same_address.index(host) * ports


def _local_port(topology: Topology, settings: Settings, ports: int, local_ports: int, host: Host) -> int:
    """Return the first port of a trainer host's local workers: after those of virtual hosts at the same address."""
    data = [other for other in topology.data if other.address == host.address]
    trainers = [other for other in topology.trainers if other.address == host.address]
    return _data_port(topology, settings) + len(data) * ports + trainers.index(host) * local_ports


def _data_port(topology: Topology, settings: Settings) -> int:
    """Return the first data port of the cluster."""
    return settings.data_port or topology.data_port or _DATA_PORT


def _check_ports(topology: Topology, settings: Settings, ports: int, local_ports: int, control_port: int) -> None:
    """Raise SettingsError if the data ports leave the range of ports, or take the coordinator's on its address.

    Args:
        ports: How many each data host takes.
        local_ports: How many the local workers of each trainer host take.
    """
    problems = []
    data_port = _data_port(topology, settings)
    taken = [(host, _first_port(topology, settings, ports, host), ports) for host in topology.data]
    if local_ports:
        local = [(host, _local_port(topology, settings, ports, local_ports, host)) for host in topology.trainers]
        taken += [(host, first, local_ports) for host, first in local]
    last = max(first + count - 1 for _, first, count in taken)
    if last > _LAST_PORT:
        needed = last - data_port
        why = f"with --workers-per-host {ports - 1}" if ports > 1 else f"for {len(topology.data)} data hosts"
        why += f" and --local-workers {settings.local_workers}" if local_ports else ""
        problems.append(
            f"--data-port is {data_port}, which {why} takes ports up to {last}; "
            f"it needs {needed} ports below {_LAST_PORT + 1}: give --data-port {max(1, _LAST_PORT - needed)} or less."
        )
    for host, first, count in taken:
        end = first + count - 1
        if host.address == topology.coordinator_host.address and first <= control_port <= end:
            problems.append(
                f"--control-port is {control_port}, which is among the data ports {first} to {end} of host "
                f"{host.name}; it needs a port of its own: give --control-port {min(_LAST_PORT, last + 1)} "
                f"or another --data-port."
            )
    if problems:
        raise SettingsError(problems)
