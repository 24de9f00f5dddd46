"""Real containers: a Docker that answers, an image that was built, and nothing that is left behind."""

import subprocess

import pytest
from cluster_runs import ClusterRun, docker


@pytest.fixture(scope="session", autouse=True)
def image():
    """The image of all hosts; these tests never skip: where they are asked for, Docker has to be there."""
    said = subprocess.run(["docker", "image", "inspect", "hetero"], capture_output=True, text=True, check=False)
    if said.returncode:
        pytest.fail(
            f"There is no Docker with an image `hetero` here: {said.stderr.strip()}. Build it: "
            f"docker build --network host -f docker/Dockerfile -t hetero . (CONTRIBUTING.md)"
        )
    return "hetero"


@pytest.fixture
def up(tmp_path):
    """Start docker/up on a cluster file; what it started is gone when the test is over."""
    runs = []

    def start(cluster, image="hetero"):
        runs.append(ClusterRun(cluster, tmp_path / "results", image))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
    for kind, listing in (("container", ("ps", "-a")), ("network", ("network", "ls")), ("volume", ("volume", "ls"))):
        names = docker(*listing, "--format", "{{.Names}}" if kind == "container" else "{{.Name}}").splitlines()
        left = [name for run in runs for name in names if f"hetero-{run.name}-" in name]
        assert not left, f"docker/up left {kind} {left}"
