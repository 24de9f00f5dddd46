"""Training under mpirun is the training that the launcher's own ranks do, whichever way Horovod's ranks meet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.clusters.local import LocalCluster

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = Path(__file__).parent / "jobs" / "weights.py"
MPI_PYTHON = REPOSITORY / ".venv" / "mpi-horovod" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin"),
    pytest.mark.skipif(not MPI_PYTHON.exists(), reason="needs a Horovod built for MPI: tests/e2e/mpi_horovod.sh"),
]


def start(folder: Path, python: str, *, mpirun: bool) -> subprocess.Popen[str]:
    """Start a homogeneous job of one host with two ranks."""
    cluster = LocalCluster.create(folder / "cluster.json", data_hosts=0, trainer_hosts=1)
    launcher = [str(REPOSITORY / "launcher.py"), "--job", f"{JOB}:job", "--run-dir", str(folder / "run")]
    if mpirun:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", python, "-m", "mpi4py", *launcher]
    else:
        command = [python, *launcher, "--ranks-per-host", "2"]
    environment = {**os.environ, **cluster.environ("trainer-1")}
    with (folder / "output").open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "run" / f"weights-{rank}.json").read_text()) for rank in range(2)]


def test_the_weights_are_the_same_however_the_ranks_meet(tmp_path: Path) -> None:
    ways = {
        "launcher": (sys.executable, False, "gloo"),
        "mpirun": (sys.executable, True, "gloo"),
        "mpirun, built for MPI": (str(MPI_PYTHON), True, "mpi"),
        "launcher, built for MPI": (str(MPI_PYTHON), False, "gloo"),
    }
    weights = {}
    for name, (python, mpirun, controller) in ways.items():
        folder = tmp_path / name
        folder.mkdir()
        job = start(folder, python, mpirun=mpirun)
        assert job.wait(120) == 0, (folder / "output").read_text()[-3000:]
        both = results(folder)
        assert [result["place"] for result in both] == [[0, 2, 0, 2], [1, 2, 1, 2]]
        assert {result["controller"] for result in both} == {controller}
        assert both[0]["weights"] == both[1]["weights"]
        weights[name] = both[0]["weights"]
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert (summary["outcome"], summary["ranks"], summary["rows"]) == ("succeeded", 2, 1024)
        assert summary["cpu_s"]["trainer"] > 2  # of both ranks: each one imports TensorFlow
        assert "hetero_rows_per_s=" in (folder / "output").read_text()  # and no bar, though mpirun gives a terminal
    assert all(value == weights["launcher"] for value in weights.values())
