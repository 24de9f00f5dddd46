from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.clusters import detect, from_file, local
from hetero.clusters.local import LocalCluster, parse_cpus
from hetero.errors import SettingsError, TopologyError
from hetero.settings import Settings

SETTINGS = Settings(job="job.py:job")


def create(folder: Path, data: int = 2, trainers: int = 1, **options: object) -> LocalCluster:
    return LocalCluster.create(folder / "sub" / "cluster.json", data_hosts=data, trainer_hosts=trainers, **options)


def test_every_virtual_host_reads_its_part(tmp_path):
    cluster = create(tmp_path, 2, 2, data_cpus=(1,), trainer_cpus=(0,))
    assert cluster.hosts == ("data-1", "data-2", "trainer-1", "trainer-2")
    for name in cluster.hosts:
        topology = detect(cluster.environ(name), SETTINGS)
        assert topology.current.name == name
        assert topology.current.address == "127.0.0.1"
        assert topology.current.cpus == ((1,) if name.startswith("data") else (0,))
        assert topology.control_port == cluster.control_port
        assert topology.data_port == cluster.data_port
        assert topology.interface == "lo"
        assert not topology.container
        assert topology.coordinator_host.name == "data-1"
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["cluster.json"]


def test_no_data_hosts_is_a_homogeneous_job(tmp_path):
    topology = detect(create(tmp_path, 0, 12).environ("trainer-3"), SETTINGS)
    assert topology.homogeneous
    assert [host.name for host in topology.trainers] == [f"trainer-{n}" for n in range(1, 13)]
    assert topology.current.cpus is None


def test_the_settings_group_names_are_used(tmp_path):
    cluster = create(tmp_path, data_group="cpu", trainer_group="gpu")
    settings = Settings(job="j", data_group="cpu", trainer_group="gpu")
    assert detect(cluster.environ("data-1"), settings).current.group == "cpu"
    with pytest.raises(TopologyError, match="no group 'data_group'"):
        detect(cluster.environ("data-1"), SETTINGS)


def test_a_local_cluster_wins_over_sagemaker(tmp_path):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text("{}")
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path)} | create(tmp_path).environ("data-2")
    assert detect(environ, SETTINGS).current.name == "data-2"


def test_the_file_can_be_looked_at_from_elsewhere(tmp_path):
    cluster = create(tmp_path)
    assert from_file(cluster.path, SETTINGS).current.name == "data-1"
    assert from_file(cluster.path, SETTINGS, "trainer-1").current.name == "trainer-1"


def test_a_missing_or_unknown_host_is_named(tmp_path):
    cluster = create(tmp_path)
    with pytest.raises(TopologyError, match=r"HETERO_HOST is not set; it needs one of data-1, data-2, trainer-1"):
        detect({local.CLUSTER_ENV: str(cluster.path)}, SETTINGS)
    with pytest.raises(TopologyError, match="no host 'x'"):
        detect(cluster.environ("x"), SETTINGS)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"kind": "x"}, "kind 'x'"),
        ({"control_port": 0}, "control_port is 0"),
        ({"control_port": True}, "control_port is True"),
        ({"data_port": 65536}, "data_port is 65536"),
        ({"network_interface_name": 1}, "network_interface_name is 1"),
        ({"instance_groups": {}}, "instance_groups is {}"),
        ({"instance_groups": []}, "no instance group"),
        ({"instance_groups": [{"instance_group_name": "a"}]}, "needs an object with instance_group_name and hosts"),
        ({"instance_groups": [{"hosts": []}]}, "instance_group_name None"),
        ({"instance_groups": [{"instance_group_name": "a", "hosts": ["h"]}]}, "host 'h' needs a name, an address"),
        (
            {"instance_groups": [{"instance_group_name": "a", "hosts": [{"name": "h", "address": "a", "cpus": [-1]}]}]},
            "cpus as a list of numbers",
        ),
    ],
)
def test_a_broken_file_is_named_with_value_and_need(tmp_path, change, part):
    cluster = create(tmp_path)
    cluster.path.write_text(json.dumps(json.loads(cluster.path.read_text()) | change))
    with pytest.raises(TopologyError) as caught:
        detect(cluster.environ("data-1"), SETTINGS)
    assert part in str(caught.value)
    assert "cluster.json" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TopologyError, match=r"Cannot read .*none\.json: No such file"):
        detect({local.CLUSTER_ENV: str(tmp_path / "none.json"), local.HOST_ENV: "data-1"}, SETTINGS)


def test_wrong_numbers_of_hosts_are_reported_together(tmp_path):
    with pytest.raises(SettingsError) as caught:
        create(tmp_path, -1, 0)
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "sub").exists()


def test_the_control_port_is_free_or_the_one_given(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", create(tmp_path).control_port))
    assert create(tmp_path, control_port=17).control_port == 17


def test_clusters_of_one_machine_keep_their_data_ports_apart(tmp_path):
    clusters = [create(tmp_path / str(number), control_port=20_500) for number in range(5)]
    assert len({cluster.data_port for cluster in clusters}) == 5
    for cluster in clusters:
        assert not cluster.data_port <= 20_500 < cluster.data_port + 500
        assert cluster.data_port < 32_768 - 500, "where the system takes ports of outgoing connections from"


def test_a_file_without_a_data_port_leaves_it_to_the_settings(tmp_path):
    cluster = create(tmp_path)
    content = json.loads(cluster.path.read_text())
    del content["data_port"]
    cluster.path.write_text(json.dumps(content))
    assert detect(cluster.environ("data-1"), SETTINGS).data_port is None


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0,2-3", (0, 2, 3)), (" 3 , 1-1,1", (1, 3)), ("0-4095", None)]
)
def test_cpu_lists(text, cpus):
    assert parse_cpus(text) == (cpus or tuple(range(4096)))


@pytest.mark.parametrize("text", ["", ",", "a", "3-1", "-1", "1-", "0-4096", "1.5", "9" * 20, "٣"])
def test_wrong_cpu_lists_are_named(text):
    with pytest.raises(SettingsError, match=r"--data-cpus is .*0,2-3"):
        parse_cpus(text, "--data-cpus")


def test_pinning_reaches_the_children():
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import subprocess, sys; from hetero.clusters.local import pin; print(pin(None), pin((%d,)), flush=True);"
        "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'])"
    )
    run = subprocess.run([sys.executable, "-c", code % cpu], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["None None", f"{{{cpu}}}"]


def test_a_cpu_that_is_not_there_is_said_and_tolerated():
    before = os.sched_getaffinity(0)
    said = local.pin((4000,))
    assert said is not None
    assert "4000" in said
    assert os.sched_getaffinity(0) == before


def test_a_file_that_cannot_be_written_is_named_with_the_next_step(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "cluster.json").mkdir()  # what no file can replace
    with pytest.raises(SettingsError) as caught:
        create(tmp_path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"cannot write {tmp_path / 'sub' / 'cluster.json'}: ")
    assert "--run-dir" in problem
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["cluster.json"]
