"""Hosts on one machine that behave like separate ones: Linux namespaces, a bridge, and power that can be cut.

A host has namespaces of its own for

    network   one link, eth0, into the switch of its `Hosts`; address 10.77.0.N; every host's name resolves
    processes an init that does nothing but reap orphans; when it is killed, the kernel kills all others
    files     the machine's, but for /tmp, /run, /dev/shm, a copy of /etc, and what the caller mounts
    name      `hostname` says the host's

The switch is a bridge in a network namespace of its own, so that hosts of two `Hosts` can have the same addresses and
the machine's own network sees nothing of them. The switch has an address too (`Hosts.outside`): what runs there, such
as a server that stands for S3, is reachable by every host. Everything needs root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil

PREFIX = "hetero"
REPOSITORY = Path(__file__).resolve().parents[2]
_NAMESPACES = Path("/run/netns")
_serial = count()

_INIT = """
set -e
hostname "$NAME" 2>/dev/null || echo "$NAME" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
while [ "$#" -gt 0 ]; do mount --rbind "$1" "$2"; shift 2; done
exec "$PYTHON" -S -c 'import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is left to this process
os.write(1, b"ready\\n")
while True: signal.pause()'
"""


def run(*argv: str) -> str:
    """Run a system command and return what it printed; AssertionError with its message if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip() or done.stdout}"
    return done.stdout


@dataclass
class NamespaceHost:
    """One host. Made by `Hosts`, which also removes it.

    Attributes:
        name: What it is called on the network.
        address: Its IPv4 address.
        namespace: Name of its network namespace.
        root: Folder for its /tmp, /etc, /run and its mount points.
        mounts: What is mounted where, beside that.
        etc: Files of its /etc that differ from the machine's, and their text.
        hidden: Folders that are empty there.
    """

    name: str
    address: str
    namespace: str
    switch: str
    port: str
    root: Path
    mounts: Mapping[str, Path]
    etc: Mapping[str, str]
    hidden: Sequence[str]
    _boot: subprocess.Popen[str] | None = field(default=None, repr=False)
    _init: psutil.Process | None = field(default=None, repr=False)

    def boot(self) -> None:
        """Start the host's init; after that programs can run there."""
        mounts = [str(part) for pair in self._mount_points() for part in pair]
        environment = {**os.environ, "NAME": self.name, "PYTHON": sys.executable}
        # pdeathsig and --kill-child: a test run that is killed leaves no host behind.
        enter = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace]
        unshare = ["unshare", "--mount", "--propagation", "slave", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
        self._boot = subprocess.Popen(
            [*enter, *unshare, "--kill-child", "sh", "-c", _INIT, "init", *mounts],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._boot.stdout is not None
        said = ""
        while (line := self._boot.stdout.readline()) and line != "ready\n":
            said += line
        assert line == "ready\n", f"host {self.name} did not come up: {said}"
        (self._init,) = psutil.Process(self._boot.pid).children()

    def _mount_points(self) -> list[tuple[Path, Path]]:
        """Return what is mounted where, in order; makes the folders that have to exist first.

        A mount point that the machine lacks, such as /opt/ml, is made in a copy of the folder above it, so that nothing
        is left on the machine itself. /tmp is the host's own, but for what the tests run from.
        """
        mounts = []
        for target, source in self.mounts.items():
            above = Path(target).parent
            copy = self.root / str(above).strip("/").replace("/", "-")
            if not copy.exists():
                copy.mkdir(parents=True)
                for entry in above.iterdir() if above.exists() else ():
                    twin = copy / entry.name
                    twin.mkdir() if entry.is_dir() else twin.touch()
                    mounts.append((entry, twin))
            (copy / Path(target).name).mkdir(exist_ok=True)
            mounts += [(source, copy / Path(target).name), (copy, above)]
        tmp = self.root / "tmp"
        tmp.mkdir(parents=True, exist_ok=True)
        tmp.chmod(0o1777)
        for kept in {str(REPOSITORY), sys.prefix, sys.base_prefix}:
            if kept.startswith("/tmp/") and Path(kept).is_dir():
                twin = tmp / Path(kept).relative_to("/tmp")
                twin.mkdir(parents=True, exist_ok=True)
                mounts.append((Path(kept), twin))
        # cp and not shutil: a file that goes while it copies /etc, as in a test run beside this one, is no failure.
        subprocess.run(["cp", "-a", "/etc", str(self.root / "etc")], stderr=subprocess.DEVNULL, check=False)
        for name, text in self.etc.items():
            (self.root / "etc" / name).unlink(missing_ok=True)  # it may be a link out of the copy
            (self.root / "etc" / name).write_text(text)
        empty = self.root / "empty"
        empty.mkdir()
        mounts += [(empty, Path(folder)) for folder in self.hidden]
        (self.root / "run" / "sshd").mkdir(parents=True)  # as where a system starts sshd
        return [*mounts, *((self.root / name, Path("/") / name) for name in ("etc", "run", "tmp"))]

    @property
    def running(self) -> bool:
        """Whether the host is up."""
        return self._init is not None and self._init.is_running() and self._init.status() != psutil.STATUS_ZOMBIE

    @property
    def init(self) -> int:
        """Process id of the host's init, as the machine counts."""
        assert self._init is not None, f"host {self.name} was not booted"
        return self._init.pid

    def enter(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on this host; its working directory is /."""
        return ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", "--", *argv]

    def processes(self) -> list[psutil.Process]:
        """Return the host's living processes without its init, oldest first."""
        mine = _namespace_of(self.init) if self.running else None
        found = []
        for process in psutil.process_iter():
            if mine and process.pid != self.init and _namespace_of(process.pid) == mine:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found)]

    def unplug(self) -> None:
        """Cut the host's link; whatever is sent to it or by it is lost."""
        run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def plug(self) -> None:
        """Put the link back."""
        run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def power_cut(self) -> None:
        """End every process of the host at once, with nothing said to anybody; returns when they are gone."""
        self.unplug()  # first: the kernel closes the connections of a killed process, which a host without power cannot
        self.shut_down()

    def shut_down(self) -> None:
        """Kill the host's init, and so every process there; returns when they are gone."""
        if self._boot is None:
            return
        if self._init is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._init.send_signal(signal.SIGKILL)  # psutil makes sure that it is still this process
        else:
            self._boot.kill()
        self._boot.wait(10)
        if self._boot.stdout is not None:
            self._boot.stdout.close()


def _namespace_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


class Hosts:
    """Hosts on one network. Use as a context manager: leaving it removes them all.

    Args:
        folder: Scratch folder.
        names: The hosts' names; host number N has the address 10.77.0.N.
        mounts: For each host, what is mounted where: {"/opt/ml": folder}.
        etc: Files below /etc that differ from the machine's, and their text.
        hidden: Folders that are empty there.
    """

    outside = "10.77.0.254"
    """Address of the switch, for servers that are no host of the job."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        mounts: Mapping[str, Mapping[str, Path]],
        etc: Mapping[str, str] | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        assert os.geteuid() == 0, "hosts as namespaces need root: run these tests as root (sudo), or in CI's container"
        assert len(names) < 254, f"{len(names)} hosts; the network 10.77.0.0/24 has room for 253"
        remove_leftovers()
        me = psutil.Process()
        stem = f"{PREFIX}-{me.pid}-{_birth(me.pid)}-{next(_serial)}"
        self._switch = f"{stem}-switch"
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        lines = ["127.0.0.1 localhost", f"{self.outside} outside", *(f"{ip} {name}" for name, ip in addresses.items())]
        # The name server cannot answer, as where a job's network is isolated: whoever asks it for what /etc/hosts has
        # (gRPC, left to itself, does) waits for long.
        resolver = f"nameserver {self.outside}\n"
        all_etc = {"hosts": "\n".join(lines) + "\n", "resolv.conf": resolver, **(etc or {})}
        self._hosts = {}
        for number, (name, address) in enumerate(addresses.items(), start=1):
            where = (f"{stem}-{name}", self._switch, f"port{number}", folder / name)
            self._hosts[name] = NamespaceHost(name, address, *where, mounts.get(name, {}), all_etc, hidden)

    def __getitem__(self, name: str) -> NamespaceHost:
        return self._hosts[name]

    def __enter__(self) -> Hosts:  # noqa: PYI034
        try:
            self._make_network()
            for host in self._hosts.values():
                host.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_network(self) -> None:
        switch = self._switch
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0", "stp_state", "0")
        run("ip", "-n", switch, "addr", "add", f"{self.outside}/24", "dev", "br0")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in self._hosts.values():
            run("ip", "netns", "add", host.namespace)
            peer = ["peer", "name", "eth0", "netns", host.namespace]
            run("ip", "-n", switch, "link", "add", host.port, "type", "veth", *peer)
            run("ip", "-n", switch, "link", "set", host.port, "master", "br0", "up")
            run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            run("ip", "-n", host.namespace, "route", "add", "default", "via", self.outside)

    def on_switch(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` at the address `outside`, with the machine's own files and processes."""
        return ["ip", "netns", "exec", self._switch, *argv]

    def close(self) -> None:
        """Remove everything; may be repeated."""
        for host in self._hosts.values():
            host.shut_down()
        for namespace in (self._switch, *(host.namespace for host in self._hosts.values())):
            _remove(namespace)


def _birth(pid: int) -> str:
    """Return when a process was started, in ticks: with the pid it names one process of this boot; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def remove_leftovers() -> None:
    """Remove the namespaces of test runs that were killed."""
    for name in [path.name for path in _NAMESPACES.iterdir()] if _NAMESPACES.exists() else ():
        prefix, *owner = name.split("-")[:3]
        if prefix == PREFIX and len(owner) == 2 and owner[0].isdigit() and _birth(int(owner[0])) != owner[1]:
            _remove(name)


def _remove(namespace: str) -> None:
    if not (_NAMESPACES / namespace).exists():
        return
    deadline = time.monotonic() + 5
    while pids := subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=False).stdout.split():
        assert time.monotonic() < deadline, f"processes {pids} in {namespace} do not end"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
