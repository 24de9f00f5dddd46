"""A SageMaker training job on one machine: each host a namespace with its own /opt/ml, in which the real `train` runs.

    with SageMakerCluster(tmp_path, data=2, trainers=1, job="numbers.py", hyperparameters={"lease-s": 5}) as cluster:
        cluster.start()
        cluster.signal("algo-2", "worker-0", signal.SIGKILL)
        ends = cluster.wait(90)

The files that SageMaker writes before it starts a container come from `sagemaker_files`; all that follows is
`sagemaker-training` and the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
import ssh_keys
from local_job import REPOSITORY, patient, wait_until
from namespace_hosts import Hosts
from sagemaker_files import SUBMIT_DIRECTORY, Channel, JobFiles

JOBS = Path(__file__).parent / "jobs"
RUN_DIR = Path("output") / "data" / "hetero"


@dataclass(frozen=True)
class End:
    """How a host's container ended.

    Attributes:
        code: Exit code of `train`; negative: killed by that signal, as after a power cut.
        seconds: From its start to its end.
        ended_s: When, by time.monotonic().
        success: Whether it left output/success.
        failure: Text of output/failure, None without one.
    """

    code: int
    seconds: float
    ended_s: float
    success: bool
    failure: str | None


@dataclass
class _Container:
    """`train` on a host, and a thread that notes when it ends."""

    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.process.wait()
        self.ended_s = time.monotonic()


class SageMakerCluster:
    """A heterogeneous training job. Use as a context manager: leaving it ends and removes everything.

    Args:
        folder: Scratch folder of the test.
        data: Number of data hosts; with 0 the job is homogeneous: one group without a name of its own.
        trainers: Number of trainer hosts.
        job: A file in tests/e2e/jobs, or a path; its job is called `job`.
        hyperparameters: Given to every host as SageMaker does, each value JSON-encoded.
        groups: Names of the data group and the trainer group.
        names: The hosts' names, in the order in which resourceconfig.json lists them; trainers and data hosts take
            turns, a trainer first.
        channels: Input channels by name.
        tensorflow: Whether TensorFlow is in the image. Where it is, `train` imports it before anything else, which
            costs each host some seconds of CPU that a job with framework="torch" does not need.
        mpi: Processes a trainer host under SageMaker's MPI runner; None: the plain runner.
        environment: Environment of every container, over the least that there has to be.
        sources: Further files of the source directory: name -> text.
        etc: Files below /etc of every host, and their text.
    """

    def __init__(
        self,
        folder: Path,
        data: int = 1,
        trainers: int = 1,
        job: str | Path = "numbers.py",
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        groups: tuple[str, str] = ("data_group", "dnn_group"),
        names: Sequence[str] | None = None,
        channels: Mapping[str, Channel] | None = None,
        tensorflow: bool = True,
        mpi: int | None = None,
        environment: Mapping[str, str] | None = None,
        sources: Mapping[str, str] | None = None,
        etc: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._names = list(names or (f"algo-{number}" for number in range(1, data + trainers + 1)))
        assert len(self._names) == data + trainers, f"{self._names} are not {data} + {trainers} hosts"
        order = _take_turns(["trainer"] * trainers, ["data"] * data)
        self._roles = dict(zip(self._names, order, strict=True))
        all_hyperparameters = {
            "sagemaker_program": "launcher.py",
            "sagemaker_submit_directory": SUBMIT_DIRECTORY,
            "sagemaker_container_log_level": 20,
            "job": f"jobs/{Path(job).name}:job",
            **_mpi(mpi, groups[1] if data else None),
            **(hyperparameters or {}),
        }
        names_of_groups = dict(zip(("data", "trainer"), groups, strict=True))
        self._files = JobFiles(
            self._roles, names_of_groups, all_hyperparameters, channels or {}, JOBS / job, sources or {}
        )
        self._environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY),
            "HOME": ssh_keys.HOME if mpi else "/tmp",
            "LANG": "C.UTF-8",
            "AWS_REGION": "us-east-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **{name: os.environ[name] for name in ("TEST_MARK",) if name in os.environ},
            **(environment or {}),
        }
        self._key = ssh_keys.make_key(folder / "ssh") if mpi else None
        self._containers: dict[str, _Container] = {}
        mounts = {name: {"/opt/ml": self.folder(name)} for name in self._names}
        hidden = [] if tensorflow else [str(Path(sysconfig.get_path("purelib")) / "tensorflow")]
        # MPI's runner writes every variable to /etc/environment, which sshd's sessions read.
        own_etc = {"environment": "", **(ssh_keys.etc() if mpi else {}), **(etc or {})}
        self.hosts = Hosts(folder / "hosts", self._names, mounts, own_etc, hidden)

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> SageMakerCluster:  # noqa: PYI034
        for name in self._names:
            self._furnish(name)
        self.hosts.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.close()
        for container in self._containers.values():
            container.process.wait(10)

    def _furnish(self, host: str) -> None:
        self._files.write(self.folder(host), host)
        if self._key is not None:
            ssh_keys.furnish(self._folder / "hosts" / host / "tmp", self._key)

    def start(self, *hosts: str, environment: Mapping[str, str] | None = None) -> None:
        """Start `train` on these hosts; on all that have none yet if none is named."""
        for host in hosts or [name for name in self._names if name not in self._containers]:
            assert host not in self._containers, f"{host} was started before"
            with self._log(host).open("wb") as output:
                process = subprocess.Popen(
                    self.hosts[host].enter(["train"]),
                    env={**self._environment, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self._containers[host] = _Container(process)

    def wait(self, timeout_s: float) -> dict[str, End]:
        """Wait until `train` has ended on every host where it was started.

        Raises:
            AssertionError: Some still run after `timeout_s`; with what they printed last.
        """
        deadline = time.monotonic() + patient(timeout_s)
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running, f"{running} still run after {timeout_s} s\n{self.logs()}"
        return {host: self._end(host) for host in self._containers}

    def running(self) -> list[str]:
        """Return the hosts on which `train` was started and has not ended."""
        return [host for host, container in self._containers.items() if container.ended_s is None]

    def _end(self, host: str) -> End:
        container, output = self._containers[host], self.folder(host) / "output"
        assert container.ended_s is not None
        return End(
            code=container.process.returncode,
            seconds=container.ended_s - container.started_s,
            ended_s=container.ended_s,
            success=(output / "success").exists(),
            failure=(output / "failure").read_text() if (output / "failure").exists() else None,
        )

    # --- who is who ---------------------------------------------------------------------------------------------------

    @property
    def data_hosts(self) -> list[str]:
        """The data hosts in the order of their numbers."""
        return sorted((name for name, role in self._roles.items() if role == "data"), key=_natural)

    @property
    def trainer_hosts(self) -> list[str]:
        """The trainer hosts in the order of their numbers."""
        return sorted((name for name, role in self._roles.items() if role == "trainer"), key=_natural)

    @property
    def chief(self) -> str:
        """The host of rank 0: the trainer with the lowest number, or under mpirun the one that is listed first."""
        if self._key is not None:
            return next(name for name, role in self._roles.items() if role == "trainer")
        return self.trainer_hosts[0]

    def folder(self, host: str) -> Path:
        """Return a host's /opt/ml as the machine sees it."""
        return self._folder / "ml" / host

    # --- what can happen to a host ------------------------------------------------------------------------------------

    def unplug(self, host: str) -> None:
        """Cut a host's link."""
        self.hosts[host].unplug()

    def plug(self, host: str) -> None:
        """Put a host's link back."""
        self.hosts[host].plug()

    def power_cut(self, host: str) -> None:
        """End every process of a host at once, without a word on the network; returns when they are gone."""
        self.hosts[host].power_cut()

    def pid(self, host: str, process: str, timeout_s: float = 60.0) -> int:
        """Return the pid, as the machine counts, of a process of a host; wait until there is one.

        Args:
            host: Name of the host.
            process: "train", "launcher", or the name of one of the launcher's children, such as "worker-0".
            timeout_s: How long there may be none.
        """
        return wait_until(f"{process} on {host}", lambda: self._find(host, process), timeout_s).pid

    def _find(self, host: str, process: str) -> psutil.Process | None:
        assert self.hosts[host].running, f"{host} is switched off"
        found = (each for each in self.hosts[host].processes() if _is(each, process))
        found_one = next(found, None)
        over = host in self._containers and self._containers[host].ended_s is not None
        assert found_one or not over, f"{host} ended without {process}:\n{self.log(host)[-3000:]}"
        return found_one

    def signal(self, host: str, process: str, signum: int, timeout_s: float = 60.0) -> int:
        """Send a signal to a process of a host, which must be there; return its pid. SIGKILL: when it is gone."""
        victim = psutil.Process(self.pid(host, process, timeout_s))
        assert _is(victim, process), f"{process} on {host} ended before the signal"
        victim.send_signal(signum)
        if signum == signal.SIGKILL:
            wait_until(f"the death of {process}", lambda: not _alive(victim), 10)
        return victim.pid

    def exec(self, host: str, argv: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the environment of its container, and return how it ended."""
        command = self.hosts[host].enter(argv)
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=patient(timeout_s), check=False
        )

    def processes(self, host: str) -> list[str]:
        """Return the command lines of what still runs on a host."""
        return [line for process in self.hosts[host].processes() if (line := _command_line(process))]

    # --- what it left -------------------------------------------------------------------------------------------------

    def _log(self, host: str) -> Path:
        return self._folder / f"{host}.log"

    def log(self, host: str) -> str:
        """Return what `train` printed so far."""
        return self._log(host).read_text(errors="replace") if self._log(host).exists() else ""

    def logs(self) -> str:
        """Return the end of what every host printed, for a failed assertion; without the environment it began with."""
        heads = {host: f"--- {host} ({role})" for host, role in self._roles.items()}
        return "\n".join(f"{head}\n{_without_environment(self.log(host))[-3000:]}" for host, head in heads.items())

    def seen(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank wrote down, one entry a step."""
        for host in self.trainer_hosts:
            path = self.folder(host) / RUN_DIR / f"seen-{rank}.jsonl"
            if path.exists():
                return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return []

    def rows(self, epoch: int) -> Counter[int]:
        """Return how often each row was seen in an epoch, over all ranks."""
        found: Counter[int] = Counter()
        for host in self.trainer_hosts:
            for path in (self.folder(host) / RUN_DIR).glob("seen-*.jsonl"):
                for step in self.seen(int(path.stem.partition("-")[2])):
                    found.update(step["rows"] if step["epoch"] == epoch else ())
        return found

    def wait_for_steps(self, steps: int, rank: int = 0, timeout_s: float = 90.0) -> None:
        """Wait until a rank has taken that many steps; AssertionError if the job ends before."""
        what = f"step {steps} of rank {rank}"
        wait_until(what, lambda: len(self.seen(rank)) >= steps or not self.running(), timeout_s)
        assert len(self.seen(rank)) >= steps, f"the job ended before step {steps}:\n{self.logs()}"

    def summary(self) -> dict[str, Any]:
        """Return the chief's summary.json."""
        return json.loads((self.folder(self.chief) / RUN_DIR / "summary.json").read_text())

    def failure(self, host: str) -> dict[str, Any]:
        """Return a host's failure.json."""
        return json.loads((self.folder(host) / RUN_DIR / "failure.json").read_text())


def _mpi(processes: int | None, group: str | None) -> dict[str, Any]:
    """Return what the SDK's `distribution` adds to the hyperparameters; without groups, it names none."""
    if processes is None:
        return {}
    return {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": processes,
        "sagemaker_mpi_custom_mpi_options": "",
        **({} if group is None else {"sagemaker_distribution_instance_groups": [group]}),
    }


def _take_turns(first: list[str], second: list[str]) -> list[str]:
    return [role for pair in zip_longest(first, second) for role in pair if role is not None]


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _without_environment(log: str) -> str:
    """Return what `train` printed, from the command on that it invoked."""
    return log.rpartition("Invoking script with the following command:")[2].strip()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> str:
    """Return what a process was started as; "" if it is at its end."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _is(process: psutil.Process, name: str) -> bool:
    """Return whether a process is the one that is called so on its host."""
    try:
        command, environment = process.cmdline(), process.environ()
    except psutil.NoSuchProcess:
        return False
    programs = [Path(part).name for part in command[:4]]
    if name == "train":
        return "train" in programs[:2]
    if name == "launcher":
        return "launcher.py" in programs and programs[0].startswith("python")
    return "hetero.children" in command and environment.get("HETERO_PROCESS") == name


__all__ = ["Channel", "End", "SageMakerCluster"]
