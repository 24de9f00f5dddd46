"""What we read from SageMaker's files is what SageMaker's own toolkit reads from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HETEROGENEOUS = {
    "current_host": "algo-10",
    "current_instance_type": "ml.c5.18xlarge",
    "current_group_name": "data_group",
    "hosts": ["algo-1", "algo-10", "algo-2"],
    "instance_groups": [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.18xlarge", "hosts": ["algo-10", "algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1"]},
    ],
    "network_interface_name": "eth0",
}
HOMOGENEOUS = {
    "current_host": "algo-2",
    "current_instance_type": "ml.p3.2xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-1", "algo-2"],
    "instance_groups": [
        {"instance_group_name": "homogeneousCluster", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-1", "algo-2"]}
    ],
    "network_interface_name": "eth1",
}
OLD = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}
COMPARE = """
import os
from hetero.clusters import detect, sagemaker
from hetero.settings import Settings
topology = detect(os.environ, Settings(job="job.py:job"))
print(topology.current.name, topology.homogeneous)
print(*sagemaker.toolkit_differences(topology, os.environ), sep="\\n", end="")
"""


def read_by_both(
    base: Path,
    config: dict[str, object],
    compare: str = COMPARE,
    hyperparameters: dict[str, str] | None = None,
    **environ: str,
) -> list[str]:
    folder = base / "input" / "config"
    folder.mkdir(parents=True)
    channels = {"training": {"TrainingInputMode": "File"}, "Test": {"TrainingInputMode": "Pipe"}}
    for name, value in (
        ("resourceconfig", config),
        ("hyperparameters", hyperparameters or {}),
        ("inputdataconfig", channels),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SM_", "HETERO_"))}
    environment = inherited | {"SAGEMAKER_BASE_DIR": str(base), "SM_STUDIO_LOCAL_MODE": "true"} | environ
    command = [sys.executable, "-c", compare]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize(
    ("config", "expected"),
    [(HETEROGENEOUS, "algo-10 False"), (HOMOGENEOUS, "algo-2 True"), (OLD, "algo-1 True")],
    ids=["heterogeneous", "homogeneous", "without groups"],
)
def test_the_toolkit_reads_the_same(tmp_path, config, expected):
    assert read_by_both(tmp_path, config) == [expected]


def test_a_difference_would_be_seen(tmp_path):
    changed = COMPARE.replace("print(topology", "os.environ['SM_MODEL_DIR'] = '/other'\nprint(topology", 1)
    found = read_by_both(tmp_path, HETEROGENEOUS, changed)
    assert found == ["algo-10 False", f"the model directory: '/other' here, '{tmp_path}/model' there"]


COMPARE_MPI = """
import os
from hetero.clusters import sagemaker
from sagemaker_training import environment, mpi
theirs = environment.Environment()
print(f"{mpi.MPI_FINISHED_STATUS_FILE}.{theirs.master_hostname}", theirs.is_master)
print(sagemaker.mpi_done_file(os.environ))
"""


@pytest.mark.parametrize(("current", "awaited"), [("algo-10", False), ("algo-2", True)])
def test_the_file_that_mpi_hosts_wait_for_is_the_toolkits(tmp_path, current, awaited):
    groups = {"sagemaker_mpi_enabled": "true", "sagemaker_distribution_instance_groups": '["data_group"]'}
    config = {**HETEROGENEOUS, "current_host": current}  # mpirun is on the first host that its group lists: algo-10
    *_, theirs, ours = read_by_both(tmp_path, config, COMPARE_MPI, groups)
    assert theirs == f"/tmp/done.algo-10 {not awaited}"
    assert ours == ("/tmp/done.algo-10" if awaited else "None")
