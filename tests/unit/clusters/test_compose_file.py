"""The cluster file: what it means, and that all mistakes are said together."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from cluster_files import GOOD, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.clusters.compose_file import HostGroup, read_cluster_file
from hetero.errors import SettingsError


def problems(tmp_path: Path, content: dict[str, Any] | str, name: str = "mine.yaml") -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        read_cluster_file(write(tmp_path, content, name))
    return error.value.problems


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    content = {**GOOD, "name": "quick", "options": {"epochs": 3, "my_own": [1]}, "channels": {"training": "rows"}}
    file = read_cluster_file(write(tmp_path, {**content, "cpus": 2}))
    assert (file.name, file.job, file.cpus, file.ranks) == ("quick", "mine.py:job", 2.0, 2)
    assert file.options == {"epochs": 3, "my_own": [1]}
    assert file.trainer == HostGroup(1, "dnn_group", None, 1.2)
    assert file.data == HostGroup(2, "data_group", None, 0.6)
    assert file.source is not None
    assert file.source.path == tmp_path / "src"
    assert file.channels["training"].path == tmp_path / "rows"


def test_the_name_is_that_of_the_file_unless_one_is_given(tmp_path: Path) -> None:
    assert read_cluster_file(write(tmp_path, GOOD, "two-trainers.yaml")).name == "two-trainers"
    assert "the file's name" in problems(tmp_path, GOOD, "Two_Trainers.yaml")[0]


def test_no_data_hosts_are_a_homogeneous_cluster(tmp_path: Path) -> None:
    for data in (None, {"hosts": 0}, {"hosts": 0, "instance_type": "ml.c5.xlarge"}):
        assert read_cluster_file(write(tmp_path, {**GOOD, "data": data})).data is None


def test_instance_types_bring_their_vcpus(tmp_path: Path) -> None:
    types = {
        "trainer": {"instance_type": "ml.p4d.24xlarge"},
        "data": {"hosts": 2, "instance_type": "ml.c5.18xlarge", "group": "cpu"},
    }
    file = read_cluster_file(write(tmp_path, {**GOOD, **types}))
    assert file.trainer == HostGroup(1, "dnn_group", "ml.p4d.24xlarge", 96.0)
    assert file.data == HostGroup(2, "cpu", "ml.c5.18xlarge", 72.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nme": "x"}, "nme is no key of a cluster file; did you mean name?"),
        ({"zzz": "x"}, "zzz is no key of a cluster file; known are name, job"),
        ({"trainer": {"cpus": 1, "rank": 2}}, "trainer.rank is no key of a cluster file; did you mean trainer.ranks?"),
        ({"data": {"cpus": 1, "ranks": 2}}, "data.ranks is no key of a cluster file"),
        ({"name": "Big"}, "name is 'Big'; it needs 2 to 40 lower-case letters"),
        ({"name": "a"}, "name is 'a'"),
        ({"name": "-ab"}, "name is '-ab'"),
        ({"name": 12}, "name is 12"),
        ({"job": None}, "job is nothing; it needs path/to/job.py:name"),
        ({"job": "mine.py"}, "job is 'mine.py'"),
        ({"job": "/etc/mine.py:job"}, "it needs a path below the source folder"),
        ({"job": "../mine.py:job"}, "it needs a path below the source folder"),
        ({"source": None}, "it needs one of the image's own examples/, or the key source"),
        ({"source": "nowhere"}, "source is 'nowhere'; it needs a folder that is there"),
        ({"source": "mine.yaml"}, "source is 'mine.yaml'; it needs a folder that is there"),
        ({"source": "x" * 5000}, "source is 'xxxx"),
        ({"options": [1]}, "options is [1]; it needs lines such as `epochs: 3`"),
        ({"options": {"a b": 1}}, "options is 'a b'; it needs names of letters"),
        ({"options": {"batch-size": 1, "batch_size": 2}}, "options has both batch-size and batch_size; leave one out"),
        ({"channels": {"a/b": "src"}}, "channels is 'a/b'"),
        ({"channels": {"..": "src"}}, "channels is '..'"),
        ({"channels": {"a": "s3://bucket/rows"}}, "a container mounts no addresses"),
        ({"channels": {"a": 7}}, "channels.a is 7; it needs a folder of this machine"),
        ({"cpus": 0}, "cpus is 0; it needs a number of CPUs from 0.05 to 10000"),
        ({"cpus": True}, "cpus is True"),
        ({"cpus": 1e300}, "cpus is 1e+300"),
        ({"trainer": None}, "trainer is nothing; it needs {hosts: 1, cpus: 0.6}"),
        ({"trainer": {"hosts": 0, "cpus": 1}}, "trainer.hosts is 0; it needs a whole number from 1 to 100"),
        ({"trainer": {"hosts": True, "cpus": 1}}, "trainer.hosts is True"),
        ({"trainer": {"cpus": 1, "ranks": 65}}, "trainer.ranks is 65; it needs a whole number from 1 to 64"),
        ({"trainer": {"cpus": 0.01}}, "trainer.cpus is 0.01; it needs a number of CPUs from 0.05"),
        ({"trainer": {}}, "trainer has neither instance_type nor cpus"),
        ({"trainer": {"cpus": 1, "instance_type": "ml.c5.xlarge"}}, "trainer has both instance_type and cpus"),
        ({"trainer": {"instance_type": "ml.c5.4xlarg"}, "data": None}, "such as ml.c5.4xlarge"),
        ({"trainer": {"instance_type": "ml.c5.xlarge"}}, "which have no common measure; give both an instance_type"),
        ({"data": {"cpus": 1, "group": "dnn_group"}}, "the group of both trainer and data is 'dnn_group'"),
        ({"data": {"cpus": 1, "group": "a b"}}, "data.group is 'a b'"),
        ({"data": {"cpus": 1, "hosts": 100}}, "the number of all hosts is 101; it needs 100 at most"),
    ],
)
def test_a_mistake_is_said_with_file_key_value_and_what_is_needed(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    (found,) = problems(tmp_path, {**GOOD, **change})
    assert found.startswith(f"{tmp_path / 'mine.yaml'}: ")
    assert says in found


def test_all_mistakes_are_said_together(tmp_path: Path) -> None:
    assert len(problems(tmp_path, {"nme": 1, "job": 2, "cpus": -1, "trainer": {"hosts": -1}, "data": 3})) == 6


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("ml.c5.xlarge"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["hosts", "cpus", "instance_type", "ranks", "group", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["name", "job", "source", "options", "channels", "cpus", "trainer", "data", "other"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_the_values_are_they_are_a_cluster_or_a_settings_error(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = write(tmp_path, json.dumps({**GOOD, **change}))
    with contextlib.suppress(SettingsError):
        file = read_cluster_file(path)
        assert all(group.hosts >= 1 and group.real_cpus >= 0.05 for group in file.groups)
        assert 1 <= file.ranks <= 64
