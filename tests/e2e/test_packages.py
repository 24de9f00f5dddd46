"""How the packages get onto SageMaker's hosts: wheels in the source directory, and the Dockerfile.

Needs root, and an index of packages for the machine itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import bare_image
import pytest
from local_job import REPOSITORY
from sagemaker_cluster import SageMakerCluster

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

DOCKER = REPOSITORY / "docker" / "sagemaker"
IMAGE = "/opt/ml/image"  # where the hosts see their own copy of it
TOKEN = "a-token-that-nobody-may-see"


def run(argv: list[str], environment: Mapping[str, str]) -> str:
    """Run a command with the image's Python, where no `hetero` lies about; return what it printed."""
    done = subprocess.run(
        argv,
        cwd="/",
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def give(cluster: SageMakerCluster, image: Path, gathered: Path) -> None:
    """Give every host a copy of the image, and what was gathered for it into the source directory."""
    for host in cluster.data_hosts + cluster.trainer_hosts:
        shutil.copytree(image, cluster.folder(host) / "image", symlinks=True)
        shutil.copytree(gathered, cluster.folder(host) / "input" / "source", dirs_exist_ok=True)


def test_hosts_without_a_network_install_hetero_from_the_wheels_in_the_source_directory(tmp_path: Path) -> None:
    image, gathered = tmp_path / "image", tmp_path / "gathered"
    there = bare_image.make(image, IMAGE)
    here = {"PATH": f"{image}/bin:{os.environ['PATH']}", "PYTHONPATH": ""}
    run([str(DOCKER / "wheels.sh"), str(gathered)], here)
    wheels = {path.name.partition("-")[0] for path in (gathered / "wheels").iterdir()}
    assert {"hetero", "typer"} <= wheels
    assert not wheels & {"grpcio", "numpy", "protobuf", "sagemaker_training"}  # the image has them
    there["HETERO_TOKEN"] = TOKEN
    with SageMakerCluster(tmp_path, hyperparameters={"lease-s": 5}, environment=there) as cluster:
        give(cluster, image, gathered)
        (data,) = cluster.data_hosts
        assert cluster.exec(data, ["python", "-c", "import hetero"]).returncode == 1
        cluster.start()
        ends = cluster.wait(120)
        for host, end in ends.items():
            assert (end.code, end.failure) == (0, None), cluster.logs()
            assert re.search("Successfully installed .*hetero-", cluster.log(host))
            assert TOKEN not in cluster.log(host)
            found = cluster.exec(host, ["python", "-c", "import hetero; print(hetero.__file__)"]).stdout
            assert found.startswith(f"{IMAGE}/lib/")
        assert cluster.rows(0) == dict.fromkeys(range(400), 1)


def test_a_wheel_that_is_not_there_ends_the_host_before_the_launcher(tmp_path: Path) -> None:
    gathered = tmp_path / "gathered"
    (gathered / "wheels").mkdir(parents=True)
    (gathered / "requirements.txt").write_text("--no-index\n--find-links wheels\nhetero==0.1.0\n")
    environment = bare_image.make(tmp_path / "image", IMAGE)
    with SageMakerCluster(tmp_path, data=0, environment=environment) as cluster:
        give(cluster, tmp_path / "image", gathered)
        cluster.start()
        (end,) = cluster.wait(60).values()
        assert end.code == 1
        assert end.failure is not None
        assert end.failure.startswith("InstallRequirementsError"), end.failure
        assert "No matching distribution found for hetero==0.1.0" in cluster.log(cluster.chief)
        assert not (cluster.folder(cluster.chief) / "output" / "data" / "hetero").exists()


def test_the_dockerfile_makes_an_image_with_hetero(tmp_path: Path) -> None:
    image = tmp_path / "image"
    environment = bare_image.make(image, str(image))
    text = re.sub(r"\\\n *", " ", (DOCKER / "Dockerfile").read_text())
    for place in ("/gathered", "/hetero"):
        text = re.sub(rf"(?<= ){place}\b", f"{tmp_path}{place}", text)
    done = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        done.append(word)
        if word == "COPY":
            *sources, target = rest.split()
            Path(target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                run(["cp", "-r", str(REPOSITORY / source) + ("/." if source == "hetero" else ""), target], {})
        elif word == "RUN":
            command = re.sub(r"^--mount=\S+ ", "", rest).replace("${REQUIREMENTS}", "")
            run(["sh", "-c", command], {**environment, "HOROVOD_GPU_OPERATIONS": "NCCL"})
        else:
            assert word in ("", "#", "ARG", "FROM"), line
    assert done.count("COPY") == 4
    assert done.count("RUN") == 2
    where = "import hetero, sys; print(hetero.__file__); from hetero.cli import main"
    assert run(["python", "-c", where], environment).startswith(f"{image}/lib/")
    assert run(["hetero", "--version"], environment).startswith("hetero ")
