"""The clusters that the repository ships, on the image as it is built, and compose without docker/up."""

import json
import shutil
import subprocess
import sys

import pytest
from cluster_runs import CHECKOUT, SHIPPED, cluster_file, compose_command, docker, own_environment

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "image", "hosts", "ranks", "accuracy"),
    [
        ("default", "hetero", 3, 2, "test_accuracy"),
        ("homogeneous", "hetero", 1, 2, "test_accuracy"),
        ("torch", "hetero-torch", 3, 1, "accuracy"),
    ],
)
def test_a_shipped_cluster_trains_on_real_data_and_every_container_ends_well(  # noqa: PLR0917
    name, image, hosts, ranks, accuracy, up
):
    run = up(SHIPPED / f"{name}.yaml", image)
    assert run.wait(timeout_s=170) == 0, run.output[-6000:]
    assert run.codes() == [0] * hosts
    summary = run.result("summary.json")
    assert (summary["outcome"], summary["ranks"]) == ("succeeded", ranks)
    assert summary["results"][accuracy] > 0.5  # of ten digits
    (line,) = [line for line in run.output.splitlines() if line.startswith("[trainer algo-1] summary: succeeded")]
    assert f"{summary['steps']} steps, {summary['rows']} rows" in line
    assert (run.folder / "logs" / "algo-1" / "rank-0.log").stat().st_size > 0
    assert not list(run.folder.glob("failure*.json"))
    if image == "hetero":
        assert (run.folder / "model" / "model.keras").stat().st_size > 0


@pytest.fixture
def plain_compose():
    """Run `compose up --abort-on-container-exit` on a compose file, as one does without docker/up."""
    started = []

    def run(compose_file, profile, project, timeout_s=170):
        command = [*compose_command(), "-p", project, "-f", str(compose_file), "--profile", profile]
        started.append(command)
        said = subprocess.run(
            [*command, "up", "--no-color", "--abort-on-container-exit"],
            env=own_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        ids = docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={project}").split()
        found = [json.loads(docker("inspect", "--format", "{{json .}}", each)) for each in ids]
        codes = {each["Config"]["Labels"]["hetero.host"]: each["State"]["ExitCode"] for each in found}
        return said.returncode, [codes[host] for host in sorted(codes)], said.stdout

    yield run
    for command in started:
        down = [*command, "down", "--volumes", "--timeout", "0"]
        subprocess.run(down, env=own_environment(), capture_output=True, check=True)


def test_plain_compose_trains_on_the_file_that_is_committed(plain_compose, tmp_path):
    shutil.copytree(CHECKOUT / "docker" / "config", tmp_path / "config")
    shutil.copy(CHECKOUT / "docker" / "compose.yaml", tmp_path)
    code, codes, output = plain_compose(tmp_path / "compose.yaml", "two-trainers", "hetero-plain-two")
    assert (code, codes) == (0, [0, 0, 0, 0]), output[-6000:]
    assert "[trainer algo-1] summary: succeeded" in output


def test_plain_compose_ends_with_the_code_of_the_chief_of_a_job_that_fails(plain_compose, tmp_path):
    command = [sys.executable, "-m", "hetero", "compose-config", "--output", str(tmp_path / "out")]
    subprocess.run([*command, str(cluster_file(tmp_path, "fails", (1, 2), fails=True))], check=True)
    code, codes, output = plain_compose(tmp_path / "out" / "compose.yaml", "fails", "hetero-plain-fails")
    assert (code, codes) == (1, [1, 0, 0]), output[-6000:]
    assert "training has failed on purpose" in output
