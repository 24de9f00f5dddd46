"""What a coordinator is told at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hetero.errors import SettingsError, TopologyError
from hetero.tls import PLAIN, Tls

CONTROL_PORTS = 4
"""How many ports a coordinator tries, from the one that it is to have."""


@dataclass(frozen=True)
class CoordinatorConfig:
    """What a coordinator needs to know at its start; travels as JSON to its process.

    Args:
        port: TCP port to listen on, or one of the next where it is taken and `cluster` is given; 0 takes any free one.
        data: Names of the expected data hosts; the first one runs this coordinator.
        trainers: Names of the expected trainer hosts; the first one is the chief, but under mpirun the one with
            the first rank.
        journal: File that lets a restarted coordinator go on where it was.
        run_id: Name of this run; a journal of another run is not used.
        cluster: What the hosts of the job know themselves by; callers that say another are sent away.
        bind: Address to listen on.
        token: Shared secret; None lets everybody in.
        start_timeout_s: Within this everybody needed must be there.
        lease_s: A host silent for longer is lost.
        required_endpoints: What must have been published before training starts, if there are data hosts.
        splits: Whether the coordinator hands splits to feeds (engine `grpc`).
        deterministic: Whether ranks read an epoch split by split, in order.
        sharded: Input channels of which each data host has other files; under `grpc` all of them have to be there then.
        epochs: How many the job is going to read, as far as is known.
        bad_split: What becomes of a split in which the job's code fails: "fail" ends the job, "skip" goes on without.
        tls: Whether and with what to encrypt.
    """

    port: int
    data: tuple[str, ...]
    trainers: tuple[str, ...]
    journal: Path
    run_id: str
    cluster: str | None = None
    bind: str = "0.0.0.0"  # noqa: S104 - peers are on other machines
    token: str | None = field(default=None, repr=False)
    start_timeout_s: float = 600.0
    lease_s: float = 30.0
    required_endpoints: tuple[str, ...] = ("dispatcher",)
    splits: bool = False
    deterministic: bool = False
    sharded: tuple[str, ...] = ()
    epochs: int = 0
    bad_split: str = "fail"
    tls: Tls = PLAIN

    def __post_init__(self) -> None:
        """Refuse what no coordinator could work with."""
        if not self.trainers:
            raise TopologyError("A job needs at least one trainer host, this one has none.")
        if self.lease_s <= 0:
            raise SettingsError([f"--lease-s is {self.lease_s:g}, it must be more than 0"])
        if self.bad_split not in ("fail", "skip"):
            raise SettingsError([f"--bad-split is {self.bad_split!r}, it must be fail or skip"])

    def to_json(self) -> str:
        """Return the configuration, token included, as JSON text."""
        tls = {name: path and str(path) for name, path in asdict(self.tls).items()}
        return json.dumps({**asdict(self), "journal": str(self.journal), "tls": tls})

    @classmethod
    def from_json(cls, text: str) -> CoordinatorConfig:
        """Rebuild a configuration from `to_json`."""
        value = json.loads(text)
        tuples = {name: tuple(value[name]) for name in ("data", "trainers", "required_endpoints", "sharded")}
        tls = Tls(**{name: path and Path(path) for name, path in value["tls"].items()})
        return cls(**{**value, **tuples, "journal": Path(value["journal"]), "tls": tls})
