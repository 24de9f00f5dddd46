"""A run of docker/up as the tests see it: started, watched, hit, and its end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SHIPPED = CHECKOUT / "docker" / "clusters"
RUN_DIR = "/opt/ml/output/data/hetero"


def docker(*arguments: str, timeout_s: float = 60.0) -> str:
    """Run a docker command, which must succeed, and return what it prints."""
    said = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert said.returncode == 0, f"docker {' '.join(arguments)}: {said.stderr}"
    return said.stdout.strip()


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float) -> Any:
    """Return what a condition gives once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)
    return found


def cluster_file(folder: Path, name: str, hosts: tuple[int, int], **options: object) -> Path:
    """Write the file of a cluster of `held`: so many trainer and data hosts, lease 5 s."""
    trainers, data = hosts
    content = {
        "name": name,
        "source": str(Path(__file__).parent / "jobs"),
        "job": "held.py:job",
        "options": {"lease-s": 5, "grace-s": 3, **({"workers-per-host": 1} if data else {}), **options},
        "trainer": {"hosts": trainers, "cpus": 1.0},
        **({"data": {"hosts": data, "cpus": 1.0}} if data else {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class ClusterRun:
    """One docker/up, on an image that is there.

    Args:
        cluster: The cluster file.
        results: Where it leaves its results.
        image: Of all hosts.
    """

    def __init__(self, cluster: Path, results: Path, image: str = "hetero") -> None:
        self._results, self.name = results, cluster.stem
        results.mkdir(parents=True, exist_ok=True)
        self._output = results / f"{cluster.stem}.out"
        command = [sys.executable, str(CHECKOUT / "docker" / "up.py"), str(cluster)]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--image", image, "--results", str(results)], stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        """What docker/up has printed so far."""
        return self._output.read_text(errors="replace")

    @property
    def folder(self) -> Path:
        """The folder of the run's results."""
        return next(path for path in self._results.iterdir() if path.is_dir() and not path.name.startswith("."))

    def container(self, host: str) -> str:
        """Return the id of a host's container."""
        project = docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={self.project}")
        assert project, f"no containers of {self.project}"
        label = f"label=hetero.host={host}"
        return docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={self.project}", "--filter", label)

    @property
    def project(self) -> str:
        """The name under which compose knows the containers."""
        found = docker("ps", "-a", "--format", '{{.Label "com.docker.compose.project"}}').splitlines()
        mine = {name for name in found if name.startswith(f"hetero-{self.name}-")}
        assert len(mine) == 1, f"{mine} instead of one project of {self.name}\n{self.output[-3000:]}"
        return mine.pop()

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        """Wait until docker/up has printed a text; AssertionError if it ends before."""
        wait_until(
            f"{text!r}\n{self.output[-3000:]}",
            lambda: text in self.output or self.process.poll() is not None,
            timeout_s,
        )
        assert text in self.output, f"ended without {text!r}:\n{self.output[-5000:]}"

    def go_on(self, host: str = "algo-1") -> None:
        """Let a job that holds go on."""
        docker("exec", self.container(host), "touch", f"{RUN_DIR}/go")

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the end and return the exit code of docker/up."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"docker/up still runs after {timeout_s} s:\n{self.output[-5000:]}") from None

    def codes(self) -> list[int | None]:
        """Return the exit codes of all containers, algo-1 first."""
        return list(json.loads((self.folder / "exit_codes.json").read_text()).values())

    def result(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file among the results."""
        path = self.folder / name
        assert path.exists(), (
            f"{name} is not among {sorted(each.name for each in self.folder.iterdir())}\n{self.output[-5000:]}"
        )
        return json.loads(path.read_text())

    def end(self) -> None:
        """End what still runs, at the end of a test that failed."""
        for _ in range(3):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def own_environment(**more: str) -> Mapping[str, str]:
    """Return this process's environment without anything that would steer compose."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")} | more


def compose_command() -> tuple[str, ...]:
    """Return the command of compose: version 2 where it is there."""
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ("docker", "compose") if found.returncode == 0 else ("docker-compose",)
