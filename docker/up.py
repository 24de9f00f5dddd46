"""Bring a cluster of containers up, train on it, bring its results and take it down again. Started by docker/up."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from image import CHECKOUT, DOCKER, Refused, build, docker, image_name, is_there, room
from rich.console import Console
from rich.table import Table

from hetero.cli.run_command import summary_table

RUN_DIR = "/opt/ml/output/data/hetero"  # of a container, as on SageMaker
CONSOLE_LOG = "console.log"
RESULT_BYTES = 200 * 10**6  # what a run must find room for
PREFIX = re.compile(r"^\S*?(algo-\d+)[-_]\d+\s*\| ?")
"""What compose puts before a line of a container's output: project or cluster, host, number."""


def main(argv: Sequence[str]) -> int:
    """Run a cluster to its end and return the exit code of its chief; 2 if it was not started."""
    signals = Signals()
    try:
        options = arguments(argv)
        compose = tools()
        results: Path = options.results.resolve()
        with writing(results):
            results.mkdir(parents=True, exist_ok=True)
            room(results, RESULT_BYTES, "the results", "Make room, or name another folder with --results")
        if options.image and not is_there(options.image):
            refuse(f"There is no image {options.image} here. Build it, or leave --image out: docker/up builds one.")
        image = options.image or image_name(options.cluster)
        with prepared(options.cluster, results, image) as cluster:
            if options.image is None:
                build(options.cluster, image)
            return 0 if options.build else run(cluster, compose, signals)
    except Refused as refused:
        print(f"docker/up: {refused}", file=sys.stderr)
        return 2


def refuse(why: str) -> None:
    """Start nothing."""
    raise Refused(why)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="docker/up",
        description="Bring a cluster of containers up, train on it, bring its results and take it down again.",
    )
    parser.add_argument("cluster", nargs="?", type=Path, default=DOCKER / "clusters" / "default.yaml")
    image = parser.add_mutually_exclusive_group()
    image.add_argument("--image", help="image of all hosts; built from this checkout unless given")
    image.add_argument("--build", action="store_true", help="only build the image")
    parser.add_argument("--results", type=Path, default=CHECKOUT / "runs" / "compose", help="folder for the results")
    return parser.parse_args(argv)


# --- what must be there before anything is started --------------------------------------------------------------------


def tools() -> tuple[str, ...]:
    """Return the command of compose: version 2 if it is there."""
    if shutil.which("docker") is None:
        raise Refused("docker is missing. Install Docker Engine (Debian: apt-get install docker.io).")
    said = docker("info")
    if said.returncode:
        why = (said.stderr or said.stdout).strip().splitlines()[-1]
        raise Refused(f"Docker does not answer: {why} Start it (dockerd), or join the group docker.")
    if docker("compose", "version").returncode == 0:
        return "docker", "compose"
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    raise Refused("docker compose is missing. Install its plugin, or docker-compose 1.29 (Debian: docker-compose).")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Refuse where a folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"Cannot write to {folder}: {error.strerror or error}. Name another folder with --results."
        ) from error


@dataclass(frozen=True)
class Cluster:
    """A cluster that is ready to be started.

    Args:
        name: As its file says; the profile.
        hosts: What compose-config says of each; the chief is the first.
        folder: Where its compose file lies and its results go.
        project: Under which compose knows its containers: the same for every run of this cluster from here.
    """

    name: str
    hosts: list[dict[str, Any]]
    folder: Path
    project: str


@contextmanager
def prepared(cluster_file: Path, results: Path, image: str) -> Iterator[Cluster]:
    """Check a cluster file, write its compose file and lock it; a folder in which nothing ran is removed."""
    with writing(results):
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=results))
        aside.chmod(0o755)
    folder = aside
    try:
        command = [sys.executable, "-m", "hetero", "compose-config", str(cluster_file), "--output", str(aside)]
        said = subprocess.run([*command, "--image", image, "--json"], stdout=subprocess.PIPE, text=True, check=False)
        if said.returncode:
            raise Refused("nothing was built or started.")
        found = json.loads(said.stdout)["clusters"][0]
        name = found["name"]
        with locked(name, results):
            folder = results / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
            with writing(results):
                aside.rename(folder)
            digest = hashlib.sha256(str(results).encode()).hexdigest()[:8]
            yield Cluster(name, found["hosts"], folder, f"hetero-{name}-{digest}")
    finally:
        if not (folder / CONSOLE_LOG).exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(name: str, results: Path) -> Iterator[None]:
    """Hold the lock of a cluster; refuse if another docker/up has it."""
    path = results / f".{name}.lock"
    with writing(results), path.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refused(
                f"Cluster {name} runs already (process {lock.read().strip() or 'unknown'}) with results in {results}. "
                f"Wait for its end, stop it, or give this one another name (key name in the cluster file)."
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


# --- the run ----------------------------------------------------------------------------------------------------------


class Signals:
    """What SIGTERM, SIGINT and SIGHUP do: nothing is running: leave; a cluster runs: stop it, at the second at once."""

    def __init__(self) -> None:
        self.up: subprocess.Popen[str] | None = None
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._received)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.received += 1
        if self.up is None or self.received > 2:
            sys.exit(128 + number)
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)  # compose stops its containers in order, and at the second kills them

    def ignore(self) -> None:
        """Let nothing interrupt what is left to do."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def run(cluster: Cluster, compose: tuple[str, ...], signals: Signals) -> int:
    """Start a cluster, show what it prints until its end, bring its results and remove its containers and networks."""
    command = [*compose, "-p", cluster.project, "-f", str(cluster.folder / "compose.yaml"), "--profile", cluster.name]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}

    def down() -> None:
        """Remove what there is under the project's name, and what a docker/up that was killed has left there."""
        subprocess.run(
            [*command, "down", "--volumes", "--remove-orphans", "--timeout", "0"],
            env=environment,
            capture_output=True,
            check=False,
        )

    try:
        down()
        signals.up = subprocess.Popen(
            [*command, "up", "--no-color"],  # not --abort-on-container-exit: hosts end by themselves, as on SageMaker
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is ours to hand on
        )
        assert signals.up.stdout is not None  # noqa: S101  it is a pipe
        with (cluster.folder / CONSOLE_LOG).open("w", encoding="utf-8") as log:
            show(signals.up.stdout, log, {host["name"]: host["role"] for host in cluster.hosts})
        signals.up.wait()
        return collect(cluster)
    finally:
        signals.ignore()
        if signals.up is not None and signals.up.poll() is None:
            signals.up.kill()
        down()


def show(lines: IO[str], log: IO[str], roles: dict[str, str]) -> None:
    """Print and keep what compose prints; each line of a container begins with role and host."""
    showing = True
    for line in lines:
        found = PREFIX.match(line)
        text = line[found.end() :] if found else line
        if found and not text.startswith("["):  # launchers say role and host themselves
            text = f"[{roles.get(found[1], '?')} {found[1]}] {text}"
        log.write(text)
        log.flush()
        try:
            if showing:
                sys.stdout.write(text)
                sys.stdout.flush()
        except OSError:  # nobody reads any longer: no reason to end a training
            showing = False


def collect(cluster: Cluster) -> int:
    """Bring what the hosts left, print how they ended, and return the exit code of the chief."""
    codes = {host["name"]: exit_code(cluster, host) for host in cluster.hosts}
    for number, host in enumerate(cluster.hosts):
        copy(cluster, host, f"{RUN_DIR}/logs/.", cluster.folder / "logs")
        if number:
            copy(cluster, host, f"{RUN_DIR}/failure.json", cluster.folder / f"failure-{host['name']}.json")
            continue
        for name in ("summary.json", "failure.json", "metrics.jsonl"):
            copy(cluster, host, f"{RUN_DIR}/{name}", cluster.folder / name)
        copy(cluster, host, "/opt/ml/model/.", cluster.folder / "model")
        copy(cluster, host, "/opt/ml/checkpoints/.", cluster.folder / "checkpoints")
    (cluster.folder / "exit_codes.json").write_text(json.dumps(codes) + "\n", encoding="utf-8")
    report(cluster, codes)
    code = next(iter(codes.values()))
    return 1 if code is None else code


def exit_code(cluster: Cluster, host: dict[str, Any]) -> int | None:
    """Return the exit code of a host's container; None if it never started."""
    said = docker(
        "inspect", "--format", "{{.State.StartedAt}} {{.State.ExitCode}}", container(cluster, host)
    ).stdout.split()
    return None if len(said) != 2 or said[0].startswith("0001-") else int(said[1])


def container(cluster: Cluster, host: dict[str, Any]) -> str:
    """Return the id of a host's container; a name that none has if there is none."""
    labels = {"com.docker.compose.project": cluster.project, "com.docker.compose.service": host["service"]}
    filters = [part for name, value in labels.items() for part in ("--filter", f"label={name}={value}")]
    said = docker("ps", "-aq", *filters)
    return said.stdout.strip() or "no-such-container"


def copy(cluster: Cluster, host: dict[str, Any], source: str, target: Path) -> None:
    """Copy a file, or a folder that ends with a dot, out of a container, if it is there."""
    if source.endswith("/."):
        target.mkdir(exist_ok=True)
    said = docker("cp", f"{container(cluster, host)}:{source}", str(target))
    if said.returncode and "o such" not in said.stderr and "ould not find" not in said.stderr:
        print(f"docker/up: {source} of {host['name']} could not be brought: {said.stderr.strip()}", file=sys.stderr)
    if source.endswith("/.") and not any(target.iterdir()):
        target.rmdir()


def report(cluster: Cluster, codes: dict[str, int | None]) -> None:
    """Print the exit codes, the summary and where the results are."""
    console = Console()
    hosts = Table("host", "role", "CPUs", "exit code", title=f"cluster {cluster.name}", title_justify="left")
    for host in cluster.hosts:
        code = codes[host["name"]]
        hosts.add_row(host["name"], host["role"], f"{host['cpus']:g}", "never started" if code is None else str(code))
    console.print(hosts)
    summary = cluster.folder / "summary.json"
    figures = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    if figures.get("steps") is not None:  # nothing was measured of a run that failed
        console.print(summary_table(figures))
    failure = cluster.folder / "failure.json"
    if failure.exists():
        cause = json.loads(failure.read_text(encoding="utf-8"))
        text = f"cause: {cause['host']}, {cause['process']}: {cause['message']}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(f"results: {cluster.folder}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
