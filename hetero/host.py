"""What every process of a host knows from the start: HostConfig, handed down in one environment variable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.channels import Channels, Place
from hetero.control.client import ControlClient
from hetero.errors import EngineError
from hetero.mpi import MpiRank
from hetero.rundir import RunDir, write_json_atomic
from hetero.settings import Settings
from hetero.tls import Tls
from hetero.topology import Host, Role, Topology

CONFIG_VARIABLE = "HETERO_HOST_CONFIG"
PROCESS_VARIABLE = "HETERO_PROCESS"
PORT_VARIABLE = "HETERO_PORT"
CHANNELS_KEY = "channels"
"""Name under which the first data host publishes which channels have files there, before anything that reads them."""
LISTING_KEY = "listing"
"""Name under which rank 0 publishes where it waits for a data host's list of splits."""
_MOST_TOLD_CHARS = 500


@dataclass(frozen=True)
class HostConfig:
    """Everything that the processes of one host need to know from the start.

    Attributes:
        settings, topology, engine: As the launcher resolved them.
        job_name: As the job file declares it.
        run_dir: The folder of the run on this host.
        run_id: Differs between two runs, so that neither takes the other's journal for its own.
        control_address: host:port of the coordinator.
        started_s: Wall-clock time at which the launcher of this host started, seconds since the epoch.
        mpi: Which of mpirun's processes this host's launcher is; None where mpirun did not start it.
        sharded_channels: Names of input channels of which each host has other files.
        piped_channels: Names of input channels that come as streams, without files.
    """

    settings: Settings
    topology: Topology
    engine: str
    job_name: str
    run_dir: str
    run_id: str
    control_address: str
    started_s: float
    mpi: MpiRank | None = None
    sharded_channels: tuple[str, ...] = ()
    piped_channels: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        values = {**asdict(self), "settings": self.settings.to_json()}
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> HostConfig:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        values["settings"] = Settings.from_json(values["settings"])
        values["topology"] = _topology(values["topology"])
        values["mpi"] = values["mpi"] and MpiRank(**values["mpi"])
        for name in ("sharded_channels", "piped_channels"):
            values[name] = tuple(values[name])
        return cls(**values)

    @property
    def host(self) -> str:
        """Name of this host."""
        return self.topology.current.name

    @property
    def is_chief(self) -> bool:
        """Whether the launcher with this configuration has rank 0: it runs the rendezvous and ends the job.

        mpirun numbers the hosts as it was told them, so under it that can be another host than the first one.
        """
        return self.mpi.leads_world if self.mpi else self.topology.chief == self.topology.current

    def connect(self) -> ControlClient:
        """Return a client of the job's coordinator for a process of this host."""
        current = self.topology.current
        return ControlClient(
            self.control_address,
            self.settings.token,
            current.name,
            current.role.value,
            host_address=current.address,
            cluster=self.topology.cluster_id,
            tls=self.tls,
            on_found=self._note_met,
        )

    def _note_met(self, address: str) -> None:
        """Leave word for the launcher where the coordinator has answered a process of this host."""
        with contextlib.suppress(OSError):  # a full disk: then the launcher knows only what it hears itself
            write_json_atomic(self.run().met(self.host), address)

    def channels(self) -> Channels:
        """Return this host's input channels."""
        current, groups = self.topology.current, dict.fromkeys(host.group for host in self.topology.hosts)
        return Channels(
            self.settings.channels,
            sharded=self.sharded_channels,
            piped=self.piped_channels,
            place=Place(current.name, current.group, tuple(groups)) if self.topology.container else None,
        )

    @property
    def tls(self) -> Tls:
        """What connections between hosts are encrypted with."""
        return Tls(self.settings.tls_cert, self.settings.tls_key, self.settings.tls_ca)

    def run(self) -> RunDir:
        """Return the paths of the run."""
        return RunDir(Path(self.run_dir))


def _topology(values: dict[str, Any]) -> Topology:
    """Rebuild a topology from `dataclasses.asdict` after its way through JSON."""
    hosts = {key: tuple(_host(host) for host in values[key]) for key in ("data", "trainers")}
    return Topology(**{**values, **hosts, "current": _host(values["current"])})


def _host(values: dict[str, Any]) -> Host:
    cpus = values["cpus"]
    return Host(**{**values, "role": Role(values["role"]), "cpus": None if cpus is None else tuple(cpus)})


def worker_key(host: str, process: str) -> str:
    """Return the name under which a data worker publishes `address open_tasks`."""
    return f"worker/{host}/{process}"


def feed_key(host: str) -> str:
    """Return the name under which a data host's feed publishes its address."""
    return f"feed/{host}"


def local_key(host: str) -> str:
    """Return the name under which a trainer host publishes how many local workers it has, and why."""
    return f"local/{host}"


def tuning_key(host: str) -> str:
    """Return the name under which a host publishes what it has decided by measuring."""
    return f"tuning/{host}"


def told_channels(config: HostConfig) -> str:
    """Return what a data host publishes under `CHANNELS_KEY`: its channels that have files, as far as there is room."""
    channels = config.channels()
    names = sorted(name for name in channels if channels.has_files(name))
    while len(told := json.dumps(names)) > _MOST_TOLD_CHARS:
        names.pop()
    return told


def refuse_without_channels(config: HostConfig, endpoints: Mapping[str, str]) -> None:
    """Have local workers not even begin where they would fail: on a trainer host that lacks files of the data hosts.

    Args:
        config: The trainer host.
        endpoints: What all have published, `CHANNELS_KEY` included.

    Raises:
        EngineError: A channel is missing.
    """
    channels = config.channels()
    names: list[str] = json.loads(endpoints[CHANNELS_KEY])
    # Under grpc splits that are one host's own are given to no other.
    elsewhere = config.sharded_channels if config.engine == "tf_data" else ()
    lacking = [name for name in names if name in elsewhere or not channels.has_files(name)]
    if lacking:
        raise EngineError(
            f"--local-workers: trainer host {config.host} does not have the files of channel {', '.join(lacking)} that "
            "the data hosts have. Give the whole channel to its instance group too, or leave --local-workers out."
        )


def open_tasks(published: str | None) -> int | None:
    """Return the number of tasks that a worker published, None if it published nothing yet."""
    return int(published.rpartition(" ")[2]) if published else None
