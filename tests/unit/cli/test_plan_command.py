from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from hetero.cli.plan_command import CONTEXT_SETTINGS, EPILOG, plan
from hetero.clusters.local import LocalCluster
from hetero.errors import EngineError, TopologyError

RESOURCES = {
    "hosts": ["algo-1", "algo-2"],
    "instance_groups": [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1"]},
    ],
}
app = typer.Typer()
app.command("plan", context_settings=CONTEXT_SETTINGS, epilog=EPILOG)(plan)


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("HETERO_CLUSTER", "HETERO_HOST", "HETERO_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def resources(tmp_path):
    path = tmp_path / "resourceconfig.json"
    path.write_text(json.dumps(RESOURCES))
    return path


def run(*argv: object) -> str:
    result = CliRunner().invoke(app, [str(value) for value in argv])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_json_has_every_host_and_keeps_its_keys(resources):
    values = json.loads(run("--topology", resources, "--json", "--ranks-per-host", 2, "--token", "hush"))
    keys = "version source homogeneous engine control_address interface expected_ranks settings hosts"
    assert list(values) == keys.split()
    assert "hush" not in json.dumps(values)
    assert [host["name"] for host in values["hosts"]] == ["algo-2", "algo-1"]
    assert values["control_address"] == "algo-2:16000"
    assert [process["name"] for process in values["hosts"][0]["processes"]] == ["coordinator", "dispatcher", "worker-0"]
    assert values["hosts"][1]["processes"][1] == {
        "name": "rank-1", "kind": "rank", "module": "hetero.children", "args": ["rank", "1"], "port": None,
        "restarts": 0, "restart_window_s": 60.0, "critical": True, "global_rank": 1, "local": False,
    }  # fmt: skip


def test_one_host_can_be_asked_for(resources):
    values = json.loads(run("--topology", resources, "--json", "--host", "algo-1"))
    assert [host["name"] for host in values["hosts"]] == ["algo-1"]
    with pytest.raises(TopologyError, match="no host 'x'"):
        run("--topology", resources, "--host", "x")


def test_the_table_names_processes_ports_and_fates(resources):
    text = run("--topology", resources, "--data-port=7000")
    for part in ("coordinator", "16000", "7001", "rank-0 (rank 0 of 1)", "job fails", "--ranks-per-host"):
        assert part in text


def test_what_looks_misspelt_is_said_beside_the_plan(resources):
    result = CliRunner().invoke(app, ["--topology", str(resources), "--batch_sise=20", "--json"])
    assert result.exit_code == 0
    assert (
        "warning: --batch-sise is no option of the run and goes to the job; did you mean --batch-size?" in result.stderr
    )
    assert json.loads(result.stdout)["engine"] == "tf_data"


def test_the_workers_of_other_machines_are_not_taken_for_known(resources):
    assert "as this machine has CPUs" in run("--topology", resources, "--engine=grpc")
    assert "as this machine has CPUs" not in run("--topology", resources, "--engine=grpc", "--workers-per-host=3")


def test_how_many_workers_a_data_host_may_come_to_have_is_said(resources, monkeypatch):
    monkeypatch.setattr("hetero.cli.plan_command.cpu_quota", lambda: 1.35)
    assert "16 at most with as many CPUs as here" in run("--topology", resources, "--engine=grpc")
    values = json.loads(run("--topology", resources, "--json", "--engine=grpc"))
    assert [host["most_workers"] for host in values["hosts"]] == [16, 0]


def test_local_workers_are_listed_and_what_auto_may_come_to(resources, monkeypatch):
    monkeypatch.setattr("hetero.cli.plan_command.cpu_quota", lambda: 4)
    text = run("--topology", resources, "--engine=grpc", "--local-workers=2")
    for part in ("feed (local)", "worker-1 (local)", "then done without"):
        assert part in text
    for engine, said in (("grpc", "3 at most"), ("tf_data", "one, which uses all idle CPUs")):
        text = run("--topology", resources, f"--engine={engine}", "--local-workers=auto")
        assert "(local)" not in text
        assert said in text
    values = json.loads(run("--topology", resources, "--json", "--engine=grpc", "--local-workers=auto"))
    assert [host["most_local_workers"] for host in values["hosts"]] == [0, 3]
    monkeypatch.setattr("hetero.cli.plan_command.cpu_quota", lambda: 1)
    assert "one at most with" in run("--topology", resources, "--engine=grpc", "--local-workers=auto")


def test_the_jobs_own_choice_and_options_count(resources, tmp_path):
    job = tmp_path / "job.py"
    job.write_text("import hetero\njob = hetero.Job('digits', engine='local', batch_size=7, width=3)\n")
    with pytest.raises(EngineError, match="the job's engine is local"):
        run("--topology", resources, "--job", f"{job}:job")
    argv = ("--job", f"{job}:job", "--engine", "tf_data", "--shift", "-3", "--augment")
    settings = json.loads(run("--topology", resources, "--json", *argv))["settings"]
    assert settings["batch_size"] == 7
    assert settings["params"] == {"width": 3, "shift": -3, "augment": True, "epochs": 1}


def test_a_local_clusters_file_and_environment_work_too(tmp_path, monkeypatch):
    cluster = LocalCluster.create(tmp_path / "c.json", data_hosts=1, trainer_hosts=1, data_cpus=(0, 1))
    values = json.loads(run("--topology", cluster.path, "--json"))
    assert values["hosts"][0]["cpus"] == [0, 1]
    for name, value in cluster.environ("trainer-1").items():
        monkeypatch.setenv(name, value)
    assert json.loads(run("--json"))["hosts"] == values["hosts"]


def test_without_a_cluster_the_next_step_is_said():
    with pytest.raises(TopologyError, match="hetero run"):
        run()


def test_help_lists_the_options_of_a_run():
    assert "--start-timeout-s" in run("--help")
