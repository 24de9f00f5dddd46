"""Launchers as SageMaker starts them: resourceconfig.json below a base directory, options as hyperparameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_job import REPOSITORY, ROWS_JOB

from hetero.clusters.local import free_port

DATA, TRAINER = "127.0.0.2", "127.0.0.3"  # names that resolve on any Linux, each an address of its own


def start(base: Path, host: str, options: list[str]) -> subprocess.Popen[str]:
    groups = [("data_group", "ml.c5.xlarge", DATA), ("dnn_group", "ml.c5.2xlarge", TRAINER)]
    group = next(name for name, _, member in groups if member == host)
    config = {
        "current_host": host,
        "current_instance_type": "ml.c5.xlarge",
        "current_group_name": group,
        "hosts": [TRAINER, DATA],
        "instance_groups": [
            {"instance_group_name": name, "instance_type": kind, "hosts": [member]} for name, kind, member in groups
        ],
        "network_interface_name": "lo",
    }
    folder = base / host / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    (base / host / "output").mkdir(exist_ok=True)
    (folder / "resourceconfig.json").write_text(json.dumps(config))
    (folder / "hyperparameters.json").write_text("{}")
    (folder / "inputdataconfig.json").write_text("{}")
    environment = {**os.environ, "SAGEMAKER_BASE_DIR": str(base / host), "SM_MODEL_DIR": str(base / host / "model")}
    argv = [sys.executable, str(REPOSITORY / "launcher.py"), "--job", f"{ROWS_JOB}:job", "--model_dir", "s3://b/model"]
    with (base / f"{host}.out").open("w") as output:
        return subprocess.Popen([*argv, *options], env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def run(base: Path, *options: str) -> dict[str, int]:
    common = ["--control_port", str(free_port()), "--lease_s", "5", *options]
    hosts = {host: start(base, host, common) for host in (TRAINER, DATA)}
    try:
        return {host: launcher.wait(90) for host, launcher in hosts.items()}
    finally:
        for launcher in hosts.values():
            launcher.kill()


@pytest.mark.slow
def test_a_heterogeneous_job_trains_and_leaves_its_files_where_sagemaker_takes_them(tmp_path: Path) -> None:
    codes = run(tmp_path)
    assert codes == {DATA: 0, TRAINER: 0}, (tmp_path / f"{TRAINER}.out").read_text()
    summary = json.loads((tmp_path / TRAINER / "output" / "data" / "hetero" / "summary.json").read_text())
    assert summary["engine"] == "tf_data"
    assert summary["rows"] == 400
    assert (tmp_path / DATA / "output" / "data" / "hetero" / "logs" / DATA / "worker-0.log").exists()
    assert not (tmp_path / TRAINER / "output" / "failure").exists()


@pytest.mark.slow
def test_the_cause_of_a_failure_is_what_sagemaker_shows_until_the_containers_start_again(tmp_path: Path) -> None:
    codes = run(tmp_path, "--fail_epoch", "0", "--fail_step", "2")
    assert codes == {DATA: 0, TRAINER: 1}, (tmp_path / f"{TRAINER}.out").read_text()
    text = (tmp_path / TRAINER / "output" / "failure").read_text()
    assert text.startswith("ValueError: the loss is not a number")
    assert len(text) <= 1024
    assert not (tmp_path / DATA / "output" / "failure").exists()

    codes = run(tmp_path)  # the containers are started again, with the files that they had
    assert codes == {DATA: 0, TRAINER: 0}, (tmp_path / f"{TRAINER}.out").read_text()
    assert not (tmp_path / TRAINER / "output" / "failure").exists()
    assert not (tmp_path / TRAINER / "output" / "data" / "hetero" / "failure.json").exists()
