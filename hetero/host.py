"""What every process of a host knows from the start: HostConfig, handed down in one environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.control.client import ControlClient
from hetero.rundir import RunDir
from hetero.settings import Settings
from hetero.tls import Tls
from hetero.topology import Host, Role, Topology

CONFIG_VARIABLE = "HETERO_HOST_CONFIG"
PROCESS_VARIABLE = "HETERO_PROCESS"
PORT_VARIABLE = "HETERO_PORT"


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
    """

    settings: Settings
    topology: Topology
    engine: str
    job_name: str
    run_dir: str
    run_id: str
    control_address: str
    started_s: float

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
        return cls(**values)

    @property
    def host(self) -> str:
        """Name of this host."""
        return self.topology.current.name

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


def open_tasks(published: str | None) -> int | None:
    """Return the number of tasks that a worker published, None if it published nothing yet."""
    return int(published.rpartition(" ")[2]) if published else None
