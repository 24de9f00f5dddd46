from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.clusters import (
    complete,
    detect,
    failure_file,
    from_file,
    model_dir,
    piped_channels,
    sagemaker,
    sharded_channels,
)
from hetero.errors import TopologyError
from hetero.settings import Settings

REAL = {
    "current_host": "algo-2",
    "current_instance_type": "ml.c5.18xlarge",
    "current_group_name": "data_group",
    "hosts": ["algo-1", "algo-2", "algo-3"],
    "instance_groups": [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.18xlarge", "hosts": ["algo-3", "algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1"]},
    ],
    "network_interface_name": "eth0",
}
SETTINGS = Settings(job="job.py:job")


def base(folder: Path, content: object = REAL) -> dict[str, str]:
    config = folder / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (config / "resourceconfig.json").write_text(text)
    return {"SAGEMAKER_BASE_DIR": str(folder)}


def test_a_real_jobs_file(tmp_path):
    topology = detect(base(tmp_path), SETTINGS)
    assert topology.current.name == "algo-2"
    assert [host.name for host in topology.data] == ["algo-2", "algo-3"]
    assert [host.address for host in topology.trainers] == ["algo-1"]
    assert topology.chief.instance_type == "ml.p4d.24xlarge"
    assert topology.interface == "eth0"
    assert topology.source == str(tmp_path / "input/config/resourceconfig.json")
    assert topology.container


def test_the_current_host_is_not_taken_from_the_environment(tmp_path):
    environ = base(tmp_path) | {"SM_CURRENT_HOST": "algo-1", "CURRENT_HOST": "algo-1"}
    assert detect(environ, SETTINGS).current.name == "algo-2"


@pytest.mark.parametrize("groups", [None, [], "absent", [{"instance_group_name": "homogeneousCluster"}]])
def test_a_homogeneous_job(tmp_path, groups):
    content = REAL | {"instance_groups": groups}
    if groups == "absent":
        del content["instance_groups"]
    elif groups:
        content["instance_groups"] = [groups[0] | {"instance_type": "ml.c5.18xlarge", "hosts": content["hosts"]}]
    topology = detect(base(tmp_path, content), SETTINGS)
    assert topology.homogeneous
    assert [host.name for host in topology.trainers] == ["algo-1", "algo-2", "algo-3"]
    assert topology.chief.instance_type == "ml.c5.18xlarge"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", "holds [1]; it needs one JSON object"),
        ("null", "holds null"),
        ({}, "neither instance_groups nor hosts"),
        (REAL | {"hosts": "algo-1"}, 'hosts is "algo-1"; it needs a list of host names'),
        (REAL | {"hosts": [1]}, "hosts is [1]"),
        (REAL | {"instance_groups": {"a": 1}}, 'instance_groups is {"a": 1}; it needs a list'),
        (REAL | {"instance_groups": ["a"]}, 'instance_groups[0] is "a"'),
        (REAL | {"instance_groups": [{"hosts": ["algo-1"]}]}, "instance_groups[0] has no instance_group_name"),
        (
            REAL | {"instance_groups": [{"instance_group_name": 7, "hosts": ["algo-1"]}]},
            "instance_groups[0].instance_group_name is 7",
        ),
        (REAL | {"instance_groups": [{"instance_group_name": "a"}]}, "hosts of group 'a' is null"),
        (REAL | {"instance_groups": [{"instance_group_name": "a", "hosts": []}], "hosts": []}, "'a' has no hosts"),
        (REAL | {"current_host": 3}, "current_host is 3; it needs a text"),
        (REAL | {"current_host": None}, "does not say which host"),
        (REAL | {"current_host": "algo-9"}, "'algo-9'"),
        (REAL | {"hosts": ["algo-1", "algo-2", "algo-3", "algo-4"]}, "host 'algo-4' under hosts but in none"),
        (REAL | {"network_interface_name": 1}, "network_interface_name is 1"),
    ],
)
def test_a_broken_file_is_named_with_value_and_need(tmp_path, content, part):
    with pytest.raises(TopologyError) as caught:
        detect(base(tmp_path, content), SETTINGS)
    assert part in str(caught.value)
    assert "resourceconfig.json" in str(caught.value)


def test_bytes_that_are_no_text_and_a_folder_are_refused(tmp_path):
    environ = base(tmp_path)
    path = sagemaker.resource_config_file(environ)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match="is not JSON"):
        detect(environ, SETTINGS)
    path.unlink()
    path.mkdir()
    with pytest.raises(TopologyError, match=r"Cannot read .*resourceconfig\.json: Is a directory"):
        detect(environ, SETTINGS)


def test_no_cluster_at_all_says_what_was_looked_for_and_what_to_do(tmp_path):
    with pytest.raises(TopologyError) as caught:
        detect({"SAGEMAKER_BASE_DIR": str(tmp_path)}, SETTINGS)
    for part in ("HETERO_CLUSTER", str(tmp_path / "input/config/resourceconfig.json"), "hetero run"):
        assert part in str(caught.value)


def test_a_file_can_be_looked_at_from_elsewhere(tmp_path):
    content = {key: value for key, value in REAL.items() if key != "current_host"}
    base(tmp_path, content)
    path = tmp_path / "input/config/resourceconfig.json"
    assert from_file(path, SETTINGS).hosts
    assert from_file(path, SETTINGS, "algo-1").current.name == "algo-1"
    with pytest.raises(TopologyError, match="no host 'x'"):
        from_file(path, SETTINGS, "x")


def test_channels_have_the_users_names(tmp_path):
    environ = base(tmp_path) | {"SM_CHANNEL_TRAINING": "/elsewhere", "SM_CHANNEL_LATE": "/late", "SM_CHANNELS": "[]"}
    (tmp_path / "input/config/inputdataconfig.json").write_text(
        '{"Training": {}, "test": {"TrainingInputMode": "Pipe"}}'
    )
    expected = {"Training": "/elsewhere", "test": str(tmp_path / "input/data/test"), "late": "/late"}
    assert sagemaker.channels(environ) == expected


CHANNELS = {
    "Training": {"TrainingInputMode": "File", "S3DistributionType": "ShardedByS3Key", "RecordWrapperType": "None"},
    "whole": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"},
    "stream": {"TrainingInputMode": "Pipe", "S3DistributionType": "ShardedByS3Key"},
    "silent": {},
    "new": {"TrainingInputMode": "Beam", "S3DistributionType": "ByMoon"},
    "odd": None,
    "odder": {"S3DistributionType": ["ShardedByS3Key"]},
}


def test_channels_that_are_spread_over_the_hosts_or_come_as_streams_are_known(tmp_path):
    environ = base(tmp_path)
    assert sharded_channels(complete(SETTINGS, environ), environ) == ()  # there is no file
    (tmp_path / "input/config/inputdataconfig.json").write_text(json.dumps(CHANNELS))
    settings = complete(SETTINGS, environ)
    assert sharded_channels(settings, environ) == ("Training", "stream")
    assert piped_channels(settings, environ) == ("stream",)


def test_a_channel_given_by_flag_is_not_sagemakers_and_elsewhere_there_are_none(tmp_path):
    environ = base(tmp_path)
    (tmp_path / "input/config/inputdataconfig.json").write_text(json.dumps(CHANNELS))
    settings = complete(Settings(job="j", channels={"Training": "/given"}), environ)
    assert sharded_channels(settings, environ) == ("stream",)
    elsewhere = environ | {"HETERO_CLUSTER": "cluster.json"}
    assert sharded_channels(SETTINGS, elsewhere) == piped_channels(SETTINGS, elsewhere) == ()


def test_places_on_sagemaker(tmp_path):
    environ = base(tmp_path) | {"SM_CHANNEL_TRAINING": "/t", "SM_CHANNEL_TEST": "/sm"}
    asked = Settings(job="j", channels={"test": "/given"}, model_dir="s3://bucket/model")
    settings = complete(asked, environ)
    assert settings.run_dir == tmp_path / "output/data/hetero"
    assert settings.channels == {"training": "/t", "test": "/given"}
    assert model_dir(settings, environ, settings.run_dir) == str(tmp_path / "model")
    assert model_dir(settings, environ | {"SM_MODEL_DIR": "/m"}, settings.run_dir) == "/m"
    assert failure_file(environ) == tmp_path / "output/failure"
    assert complete(Settings(job="j", run_dir=Path("r")), environ).run_dir == Path("r")


def test_places_elsewhere(tmp_path):
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SM_CHANNEL_TRAINING": "/t"}
    assert complete(SETTINGS, environ) == SETTINGS
    assert model_dir(SETTINGS, environ, Path("run")) == "run/model"
    assert model_dir(Settings(job="j", model_dir="/m"), environ, Path("run")) == "/m"
    assert failure_file(environ) is None
