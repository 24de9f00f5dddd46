"""What a launcher works out before it starts anything, and how it says that it cannot."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hetero import launcher
from hetero.clusters.local import LocalCluster
from hetero.errors import EngineError, HeteroError, JobFileError, SettingsError, TopologyError
from hetero.launcher import _child_environment, hardware_of, prepare
from hetero.process.console import Console

RESOURCES = {
    "current_host": "algo-1",
    "hosts": ["algo-1", "algo-2"],
    "instance_groups": [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1"]},
    ],
}


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text('import hetero\njob = hetero.Job("digits", batch_size=8, width=3)\nraise RuntimeError("was run")\n')
    return f"--job={path}:job"


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a host that is in no cluster."""
    return {"SAGEMAKER_BASE_DIR": str(tmp_path / "no-sagemaker")}


@pytest.fixture
def sagemaker(tmp_path: Path) -> Path:
    """Return the base directory of a heterogeneous SageMaker job."""
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps(RESOURCES))
    (config / "inputdataconfig.json").write_text('{"training": {}}')
    (tmp_path / "ml" / "output").mkdir()
    return tmp_path / "ml"


@pytest.fixture
def here(sagemaker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process a host of the SageMaker job; return its base directory."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(sagemaker))
    return sagemaker


def local(tmp_path: Path, host: str, data_hosts: int = 1) -> dict[str, str]:
    return LocalCluster.create(tmp_path / "cluster.json", data_hosts=data_hosts, trainer_hosts=1).environ(host)


def refused(kind: type[HeteroError], argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(kind) as caught:
        prepare(argv, environ, 0.0)
    return str(caught.value)


def test_a_host_knows_its_part_without_running_the_job(tmp_path: Path, job: str) -> None:
    started_s = time.time()
    prepared = prepare([job, f"--run-dir={tmp_path}/run", "--epochs=2"], local(tmp_path, "data-1"), started_s)
    config = prepared.config
    assert (config.job_name, config.engine, config.host, config.started_s) == ("digits", "tf_data", "data-1", started_s)
    assert config.run_dir == f"{tmp_path}/run"
    assert config.settings.model_dir == f"{tmp_path}/run/model"
    assert (config.settings.batch_size, config.settings.epochs) == (8, 2)
    assert config.settings.params == {"width": 3, "epochs": 2}
    assert [process.name for process in prepared.plan.processes] == ["coordinator", "dispatcher", "worker-0"]
    assert config.control_address == prepared.plan.control_address
    assert not (tmp_path / "run").exists()


def test_two_runs_have_two_names(tmp_path: Path, job: str) -> None:
    environ = local(tmp_path, "trainer-1")
    ids = {prepare([job, f"--run-dir={tmp_path}/run"], environ, 0.0).config.run_id for _ in range(2)}
    assert len(ids) == 2


def test_a_relative_run_folder_is_handed_down_as_an_absolute_one(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare([job, "--run-dir=a"], local(tmp_path, "trainer-1"), 0.0).config.run_dir == f"{tmp_path}/a"
    assert prepare([job], local(tmp_path, "trainer-1"), 0.0).config.run_dir.startswith(f"{tmp_path}/runs/digits-")


def test_on_sagemaker_places_and_channels_are_those_of_the_platform(sagemaker: Path, job: str) -> None:
    argv = [job, "--model_dir=s3://bucket/model"]
    config = prepare(argv, {"SAGEMAKER_BASE_DIR": str(sagemaker)}, 0.0).config
    assert config.run_dir == f"{sagemaker}/output/data/hetero"
    assert config.settings.model_dir == f"{sagemaker}/model"
    assert config.settings.channels == {"training": f"{sagemaker}/input/data/training"}
    assert (config.host, config.engine, config.control_address) == ("algo-1", "tf_data", "algo-2:16000")


def test_children_are_told_which_channels_are_spread_over_the_hosts(sagemaker: Path, job: str) -> None:
    entry = {"S3DistributionType": "ShardedByS3Key", "TrainingInputMode": "Pipe"}
    (sagemaker / "input/config/inputdataconfig.json").write_text(json.dumps({"training": entry}))
    config = prepare([job], {"SAGEMAKER_BASE_DIR": str(sagemaker)}, 0.0).config
    assert (config.sharded_channels, config.piped_channels) == (("training",), ("training",))


# What cannot be


def mpirun(rank: int, local_rank: int, size: int = 4, local_size: int = 2) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def test_under_mpirun_a_launcher_starts_its_own_rank(tmp_path: Path, job: str) -> None:
    environ = {**local(tmp_path, "trainer-1"), **mpirun(rank=3, local_rank=1)}
    prepared = prepare([job, f"--run-dir={tmp_path}/run"], environ, 0.0)
    assert [process.name for process in prepared.plan.processes] == ["rank-1"]
    assert prepared.config.mpi is not None
    assert (prepared.config.mpi.rank, prepared.config.is_chief) == (3, False)


def test_mpirun_must_leave_data_hosts_alone(tmp_path: Path, job: str) -> None:
    argv, environ = [job, f"--run-dir={tmp_path}/run"], local(tmp_path, "data-1")
    message = refused(SettingsError, argv, {**environ, **mpirun(rank=0, local_rank=0)})
    assert "data host data-1 as one of 4 processes" in message
    assert "`instance_groups`" in message
    assert prepare(argv, {**environ, **mpirun(0, 0, size=1, local_size=1)}, 0.0).config.mpi is None


def test_under_mpirun_the_launchers_are_told_one_run_folder(tmp_path: Path, job: str, sagemaker: Path) -> None:
    assert "--run-dir is missing" in refused(SettingsError, [job], {**local(tmp_path, "trainer-1"), **mpirun(0, 0)})
    prepare([job], {"SAGEMAKER_BASE_DIR": str(sagemaker), **mpirun(0, 0)}, 0.0)
    prepare([job], {"SAGEMAKER_BASE_DIR": str(sagemaker), "OMPI_COMM_WORLD_SIZE": ""}, 0.0)


def test_what_mpirun_starts_draws_no_bar_on_a_terminal(tmp_path: Path) -> None:
    main, copy = os.openpty()
    with os.fdopen(copy, "w") as terminal, os.fdopen(main, "rb"):
        assert Console(terminal, {}).child_environment["HETERO_PROGRESS"] == "events"
        assert Console(terminal, {}, bar=False).child_environment["HETERO_PROGRESS"] == "plain"


def test_without_a_cluster_both_kinds_are_named(nowhere: dict[str, str], job: str) -> None:
    message = refused(TopologyError, [job], nowhere)
    assert "hetero run" in message
    assert f"{nowhere['SAGEMAKER_BASE_DIR']}/input/config/resourceconfig.json" in message


def test_all_wrong_settings_are_named_before_a_cluster_is_looked_for(nowhere: dict[str, str], job: str) -> None:
    message = refused(SettingsError, [job, "--batch-size=0", "--engine=magic"], nowhere | {"HETERO_LEASE_S": "x"})
    for part in ("3 wrong settings", "--batch-size is '0'", "--engine is 'magic'", "HETERO_LEASE_S is 'x'"):
        assert part in message


def test_a_job_is_needed_and_has_to_be_found(nowhere: dict[str, str]) -> None:
    assert "--job is missing" in refused(SettingsError, [], nowhere)
    assert "there is no file" in refused(JobFileError, ["--job=none.py:job"], nowhere)


def test_a_host_that_the_cluster_does_not_have_is_refused(tmp_path: Path, job: str) -> None:
    environ = local(tmp_path, "trainer-1")
    assert "trainer-9" in refused(TopologyError, [job], environ | {"HETERO_HOST": "trainer-9"})


@pytest.mark.parametrize(
    ("engine", "data_hosts", "said"),
    [("grpc", 0, "has no data hosts"), ("tf_data", 0, "has no data hosts"), ("local", 1, "has data hosts")],
)
def test_an_engine_that_cannot_run_here_is_refused(
    tmp_path: Path, job: str, engine: str, data_hosts: int, said: str
) -> None:
    environ = local(tmp_path, "trainer-1", data_hosts)
    assert said in refused(EngineError, [job, f"--engine={engine}"], environ)


# main


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (["--batch-size=0"], "SettingsError: Wrong settings: - --batch-size is '0'"),
        ([f"--{'x' * 5000}", "--epochs=0", "--seed=x"], "SettingsError: 2 wrong settings:"),
        (["--data-group=other"], "TopologyError: "),
        (["--engine=local"], "EngineError: --engine is local"),
    ],
)
def test_on_sagemaker_the_cause_is_left_where_it_is_looked_for(
    here: Path, job: str, argv: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.main([job, *argv]) == 2
    text = (here / "output" / "failure").read_text()
    assert text.startswith(cause)
    assert len(text) <= 1024
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err + captured.out


def test_a_failure_file_that_cannot_be_written_changes_nothing(here: Path, job: str) -> None:
    (here / "output").rmdir()
    assert launcher.main([job, "--batch-size=0"]) == 2


def test_elsewhere_the_cause_is_only_printed(
    nowhere: dict[str, str], job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", nowhere["SAGEMAKER_BASE_DIR"])
    assert launcher.main([job]) == 2
    assert capsys.readouterr().err.startswith("error: This host is in no cluster")


# What children get


@pytest.mark.parametrize(("host", "gpus"), [("data-1", "-1"), ("trainer-1", "0,1")])
def test_a_data_hosts_gpu_is_hidden_from_its_children(
    tmp_path: Path, job: str, host: str, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = prepare([job, f"--run-dir={tmp_path}/run"], local(tmp_path, host), 0.0).config
    environ = _child_environment(config, Console(environ={}))
    assert environ["CUDA_VISIBLE_DEVICES"] == gpus
    assert environ["HETERO_PROGRESS"] == "plain"
    assert str(Path(launcher.__file__).resolve().parents[1]) in environ["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize(("visible", "gpus"), [("0,1", 2), ("", 0), ("-1", 0), ("GPU-8a, GPU-9b", 2)])
def test_gpus_are_counted_as_far_as_they_are_visible(
    tmp_path: Path, job: str, visible: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    topology = prepare([job, f"--run-dir={tmp_path}/run"], local(tmp_path, "trainer-1"), 0.0).config.topology
    hardware = hardware_of(topology)
    assert hardware.gpus == gpus
    assert hardware.cpus == len(os.sched_getaffinity(0))


def test_a_pinned_host_has_the_cpus_that_it_is_pinned_to(tmp_path: Path, job: str) -> None:
    cluster = LocalCluster.create(tmp_path / "c.json", data_hosts=0, trainer_hosts=1, trainer_cpus=(0, 1, 2))
    prepared = prepare([job, f"--run-dir={tmp_path}/run"], cluster.environ("trainer-1"), 0.0)
    assert hardware_of(prepared.config.topology).cpus == 3
