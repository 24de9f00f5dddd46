"""What can happen to a host, and the proof that it did: every fault here fails where it was not injected.

A fault is called with the scene and one of its hosts, and returns once it is proven; `Injected` says when it began.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from local_job import wait_until
from sagemaker_cluster import RUN_DIR, SageMakerCluster

OUTPUT = Path("/opt/ml/output")
OUTPUT_DISK_MIB = 12
CLOCK_JUMP_S = 3600
CONTROL_PORT = 16000
_HERE = Path(__file__).parent
_CGROUPS = Path("/sys/fs/cgroup")
_serial = iter(range(1_000_000))


@dataclass
class Scene:
    """A cluster in which something is about to happen.

    Attributes:
        cluster: The hosts.
        folder: Scratch folder.
        clean_up: Called in turn when the scene is over.
    """

    cluster: SageMakerCluster
    folder: Path
    clean_up: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def run_dir(self, host: str) -> Path:
        """Return a host's run folder as the machine sees it, though the host may have mounted something over it."""
        inside = Path(f"/proc/{self.cluster.hosts[host].init}/root") if self.cluster.hosts[host].running else None
        return inside / "opt" / "ml" / RUN_DIR if inside else self.cluster.folder(host) / RUN_DIR

    def steps(self) -> int:
        """Return how many steps all ranks together have taken."""
        return sum(path.read_bytes().count(b"\n") for path in self._seen())

    def lines(self) -> list[dict[str, Any]]:
        """Return what all ranks wrote down, in the order of time."""
        texts = [line for path in self._seen() for line in path.read_text().splitlines(keepends=True)]
        found: list[dict[str, Any]] = [json.loads(line) for line in texts if line.endswith("}\n")]
        return sorted(found, key=lambda line: float(line["at_s"]))

    def _seen(self) -> list[Path]:
        folders = [self.cluster.folder(host) / RUN_DIR for host in self.cluster.trainer_hosts]
        return [path for folder in folders for path in folder.glob("seen-*.jsonl")]


@dataclass(frozen=True)
class Injected:
    """A fault that happened.

    Attributes:
        at_s: When, by time.monotonic().
        proof: How it is known, in words.
    """

    at_s: float
    proof: str


Fault = Callable[[Scene, str], Injected]


# --- processes --------------------------------------------------------------------------------------------------------


def kill(process: str) -> Fault:
    """SIGKILL a process of the host."""

    def inject(scene: Scene, host: str) -> Injected:
        scene.cluster.pid(host, process)  # waits for it
        at_s = time.monotonic()
        pid = scene.cluster.signal(host, process, signal.SIGKILL)
        return Injected(at_s, f"{process} (pid {pid}) is gone")

    return inject


def kill_repeatedly(process: str, times: int, every_s: float) -> Fault:
    """SIGKILL a process and those that replace it; the fault begins with the last kill.

    Args:
        process: Name of the process.
        times: How often at most; less often where the host gives it up.
        every_s: Seconds between two kills.
    """

    def inject(scene: Scene, host: str) -> Injected:
        killed: set[int] = set()
        at_s = 0.0
        for _ in range(times):
            try:
                pid = wait_until("the next one", lambda: _another(scene, host, process, killed), 8)
            except AssertionError:
                break  # the host has given it up
            at_s = time.monotonic()
            psutil.Process(pid).kill()
            killed.add(pid)
            time.sleep(every_s)
        assert len(killed) > 1, f"{process} on {host} was killed {len(killed)} times"
        return Injected(at_s, f"{process} was killed {len(killed)} times")

    return inject


def _another(scene: Scene, host: str, process: str, killed: set[int]) -> int | None:
    if not scene.cluster.hosts[host].running or host not in scene.cluster.running():
        return None
    found = scene.cluster._find(host, process)
    return found.pid if found is not None and found.pid not in killed else None


def send(process: str, signum: signal.Signals = signal.SIGTERM) -> Fault:
    """Send a signal to a process of the host; that it came shows in the exit code."""

    def inject(scene: Scene, host: str) -> Injected:
        scene.cluster.pid(host, process)
        at_s = time.monotonic()
        pid = scene.cluster.signal(host, process, signum)
        return Injected(at_s, f"{signum.name} was sent to {process} (pid {pid})")

    return inject


def end_alone(process: str) -> Fault:
    """Send SIGTERM to a service and see it end, though its launcher did not ask for it."""

    def inject(scene: Scene, host: str) -> Injected:
        victim = psutil.Process(scene.cluster.pid(host, process))
        at_s = time.monotonic()
        victim.terminate()
        wait_until(f"the end of {process}", lambda: _gone(victim), 15)
        return Injected(at_s, f"{process} (pid {victim.pid}) ended by SIGTERM")

    return inject


def freeze(process: str) -> Fault:
    """Stop a process without ending it."""

    def inject(scene: Scene, host: str) -> Injected:
        victim = psutil.Process(scene.cluster.pid(host, process))
        at_s = time.monotonic()
        victim.suspend()
        wait_until("the stop", lambda: victim.status() == psutil.STATUS_STOPPED, 10)
        return Injected(at_s, f"{process} (pid {victim.pid}) is stopped")

    return inject


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def training_raises(scene: Scene, host: str) -> Injected:
    """Have the host's rank raise in its next step."""
    at_s = time.monotonic()
    (scene.run_dir(host) / "raise").touch()
    said = wait_until("the exception", lambda: "the loss is not a number" in scene.cluster.log(host), 10)
    return Injected(at_s, f"the rank on {host} raised: {said}")


def engine_refuses(scene: Scene, host: str) -> Injected:
    """Wait until the host's rank, whose job cannot run under the engine, says so."""
    wait_until("the refusal", lambda: "cannot run tf.py_function" in scene.cluster.log(host), 240)
    return Injected(time.monotonic(), f"rank 0 on {host} looked at the graph")


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_runs_out_in_cgroup(scene: Scene, host: str) -> Injected:
    """Put the host's rank into a control group with little memory, and have it want more than that."""
    process = psutil.Process(scene.cluster.pid(host, "rank-0"))
    group, limit, events = _memory_cgroup()
    scene.clean_up.callback(_remove_cgroup, group)
    (group / limit).write_text(str(96 * 2**20))
    (group / "cgroup.procs").write_text(str(process.pid))
    at_s = time.monotonic()
    (scene.run_dir(host) / "eat").touch()
    wait_until("the kernel's kill", lambda: _oom_kills(group / events) and _gone(process), 20)
    return Injected(at_s, f"the kernel counted {_oom_kills(group / events)} kill for memory in {group.name}")


def _memory_cgroup() -> tuple[Path, str, str]:
    """Make a control group for memory; return it and the names of its limit and of its counter of kills."""
    name = f"hetero-test-{os.getpid()}-{next(_serial)}"
    if (_CGROUPS / "memory").is_dir():
        group, limit, events = _CGROUPS / "memory" / name, "memory.limit_in_bytes", "memory.oom_control"
    else:
        group, limit, events = _CGROUPS / name, "memory.max", "memory.events"
        with contextlib.suppress(OSError):
            (_CGROUPS / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    assert (group / limit).exists(), f"{group} has no {limit}: this needs the memory controller of control groups"
    return group, limit, events


def _oom_kills(events: Path) -> int:
    fields = dict(line.split()[:2] for line in events.read_text().splitlines() if len(line.split()) > 1)
    return int(fields.get("oom_kill", 0))


def _remove_cgroup(group: Path) -> None:
    for _ in range(200):  # a group can be removed once its last process is reaped
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def memory_runs_out_by_ulimit(scene: Scene, host: str) -> Injected:
    """Give the host's rank little more address space than it has (`ulimit -v`), and have it want much more."""
    process = psutil.Process(scene.cluster.pid(host, "rank-0"))
    most = process.memory_info().vms + 192 * 2**20
    process.rlimit(resource.RLIMIT_AS, (most, most))
    at_s = time.monotonic()
    (scene.run_dir(host) / "eat").touch()
    wait_until("the rank's end", lambda: _gone(process), 20)
    return Injected(at_s, f"the rank (pid {process.pid}) ended with its address space limited to {most} bytes")


# --- the host ---------------------------------------------------------------------------------------------------------


def unplug(scene: Scene, host: str) -> Injected:
    """Cut the host's link."""
    at_s = time.monotonic()
    scene.cluster.unplug(host)
    state = wait_until("the link's end", lambda: _without_carrier(scene, host), 5)
    return Injected(at_s, f"{host}: {state}")


def _without_carrier(scene: Scene, host: str) -> str:
    argv = ["ip", "-n", scene.cluster.hosts[host].namespace, "-o", "link", "show", "eth0"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return "eth0 NO-CARRIER" if "NO-CARRIER" in shown or "state DOWN" in shown else ""


def cut_for(seconds: float) -> Fault:
    """Cut the host's link and put it back."""

    def inject(scene: Scene, host: str) -> Injected:
        cut = unplug(scene, host)
        time.sleep(max(0.0, cut.at_s + seconds - time.monotonic()))
        scene.cluster.plug(host)
        wait_until("the link", lambda: not _without_carrier(scene, host), 5)
        return Injected(cut.at_s, f"{cut.proof} for {seconds:g} s")

    return inject


def power_cut(scene: Scene, host: str) -> Injected:
    """End every process of the host, with nothing said on the network."""
    at_s = time.monotonic()
    scene.cluster.power_cut(host)
    wait_until("the host's end", lambda: not scene.cluster.hosts[host].running, 10)
    return Injected(at_s, f"{host} is off")


def small_disk(scene: Scene, host: str) -> None:
    """Before the start: let the host's output folder be a small disk of its own."""
    scene.cluster.exec(host, ["mkdir", "-p", str(OUTPUT / "data")]).check_returncode()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={OUTPUT_DISK_MIB}m", "output", str(OUTPUT)]
    scene.cluster.exec(host, argv).check_returncode()
    scene.cluster.exec(host, ["mkdir", "-p", str(OUTPUT / "data")]).check_returncode()


def disk_full(scene: Scene, host: str) -> Injected:
    """Fill the host's output folder to the last byte; `small_disk` must have been there first."""
    output = scene.run_dir(host).parents[1]
    at_s = time.monotonic()
    with contextlib.suppress(OSError), (output / "ballast").open("wb", buffering=0) as ballast:
        while os.fstat(ballast.fileno()).st_size < 2 * OUTPUT_DISK_MIB * 2**20:
            ballast.write(b"x" * 4096)
    free = os.statvfs(output).f_bavail
    size = (output / "ballast").stat().st_size
    assert free == 0, f"{free} blocks are free in {output}"
    assert size <= OUTPUT_DISK_MIB * 2**20, f"{output} is no small disk: {size} bytes went in"
    return Injected(at_s, f"no block is free in the output folder of {host}")


# --- the clock --------------------------------------------------------------------------------------------------------


def build_clock() -> Path:
    """Compile the wall clock that can be set; return the library."""
    library = Path(os.environ.get("TMPDIR", "/tmp")) / f"hetero-clock-shim-{os.getpid()}.so"
    if not library.exists():
        aside = library.with_name(f"{library.name}.{next(_serial)}")
        argv = ["cc", "-shared", "-fPIC", "-O1", "-o", str(aside), str(_HERE / "clock_shim.c")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        aside.replace(library)
    return library


def own_clock(scene: Scene, host: str) -> dict[str, str]:
    """Before the start: return the environment by which the host has a wall clock that can be set."""
    folder = scene.cluster.folder(host) / "input" / "config"
    library = folder / "clock_shim.so"
    library.write_bytes(build_clock().read_bytes())
    library.chmod(0o755)
    (folder / "wall_clock").write_bytes(struct.pack("q", 0))
    inside = Path("/opt/ml/input/config")
    return {"LD_PRELOAD": str(inside / library.name), "WALL_CLOCK_FILE": str(inside / "wall_clock")}


def clock_jumps(seconds: int) -> Fault:
    """Set the wall clock of the host, which must have `own_clock`; proven by what its processes then read."""

    def inject(scene: Scene, host: str) -> Injected:
        is_data = host in scene.cluster.data_hosts
        field_ = "workers_wall_s" if is_data else "wall_s"
        at_s = time.monotonic()
        with (scene.cluster.folder(host) / "input" / "config" / "wall_clock").open("r+b") as file:
            file.write(struct.pack("q", seconds))
        wait_until("a step by the new clock", lambda: _jumped(scene, field_, seconds), 20)
        return Injected(at_s, f"processes of {host} read a wall clock {seconds:+d} s off")

    return inject


def _jumped(scene: Scene, name: str, seconds: int) -> bool:
    off = time.time() - time.monotonic()
    return any(abs(line[name] - line["at_s"] - off - seconds) < 600 for line in scene.lines()[-40:])


# --- ports ------------------------------------------------------------------------------------------------------------

_LISTEN = """import signal, socket, sys
servers = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
signal.pause()"""


@contextlib.contextmanager
def taken_ports(scene: Scene, host: str, *ports: int) -> Iterator[None]:
    """Have somebody else listen on ports of the host."""
    argv = scene.cluster.hosts[host].enter(
        ["setpriv", "--pdeathsig", "KILL", "python3", "-S", "-c", _LISTEN, *map(str, ports)]
    )
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        try:
            said = squatter.stdout.readline()
            assert said == "listening\n", f"cannot take ports {ports} of {host}: {said!r}"
            yield
        finally:
            squatter.kill()
