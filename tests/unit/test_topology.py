from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import TopologyError
from hetero.topology import Group, Role, Topology, build_topology, natural_key

CPU, GPU = "ml.c5.18xlarge", "ml.p4d.24xlarge"


def two_groups(**changes: object) -> Topology:
    arguments = {
        "groups": [Group("dnn_group", GPU, ("algo-1",)), Group("data_group", CPU, ("algo-10", "algo-2"))],
        "current_host": "algo-2",
        "data_group": "data_group",
        "trainer_group": "dnn_group",
        "interface": "eth0",
        "source": "cluster.json",
    }
    return build_topology(**{**arguments, **changes})


def test_roles_come_from_group_names_and_hosts_are_in_natural_order():
    topology = two_groups()
    assert [host.name for host in topology.data] == ["algo-2", "algo-10"]
    assert [host.name for host in topology.trainers] == ["algo-1"]
    assert [host.name for host in topology.hosts] == ["algo-2", "algo-10", "algo-1"]
    assert topology.current.role is Role.DATA
    assert topology.current.instance_type == CPU
    assert topology.coordinator_host.name == "algo-2"
    assert topology.chief.name == "algo-1"
    assert not topology.homogeneous


@pytest.mark.parametrize("name", ["homogeneousCluster", "data_group", "dnn_group"])
def test_one_group_trains_whatever_its_name(name):
    topology = two_groups(groups=[Group(name, GPU, ("algo-3", "algo-2"))])
    assert topology.homogeneous
    assert topology.coordinator_host is topology.chief
    assert topology.chief.name == "algo-2"
    assert {host.role for host in topology.hosts} == {Role.TRAINER}


def test_roles_can_have_other_group_names():
    groups = [Group("gpu", GPU, ("a",)), Group("cpu", CPU, ("b",))]
    topology = two_groups(groups=groups, current_host="a", data_group="cpu", trainer_group="gpu")
    assert topology.current.role is Role.TRAINER


def test_addresses_cpus_and_control_port_are_kept():
    topology = two_groups(addresses={"algo-1": "127.0.0.1"}, cpus={"algo-2": (0, 3)}, control_port=123)
    assert topology.chief.address == "127.0.0.1"
    assert topology.data[0].address == "algo-2"
    assert topology.data[0].cpus == (0, 3)
    assert topology.control_port == 123


def test_another_host_sees_the_same_cluster():
    topology = two_groups()
    assert topology.seen_from("algo-1").current.name == "algo-1"
    with pytest.raises(TopologyError, match=r"cluster\.json has no host 'algo-9'; it has algo-2, algo-10, algo-1"):
        topology.seen_from("algo-9")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"groups": []}, ["no instance group"]),
        (
            {"groups": [Group("a", CPU, ("h1",)), Group("b", None, ("h2",)), Group("c", GPU, ("h3",))]},
            ["3 instance groups", "a (ml.c5.18xlarge: h1)", "b (type unknown: h2)", "c (ml.p4d.24xlarge: h3)"],
        ),
        (
            {"groups": [Group("dnn_group", GPU, ("algo-1",)), Group("prep", CPU, ("algo-2",))]},
            ["no group 'data_group' (--data-group)", "prep (ml.c5.18xlarge: algo-2)", "Give --data-group prep."],
        ),
        (
            {"groups": [Group("gpus", GPU, ("algo-1",)), Group("data_group", CPU, ("algo-2",))]},
            ["no group 'dnn_group' (--trainer-group)", "Give --trainer-group gpus."],
        ),
        (
            {"groups": [Group("x", GPU, ("algo-1",)), Group("y", CPU, ("algo-2",))]},
            ["Give --data-group y --trainer-group x"],
        ),
        (
            {"groups": [Group("x", None, ("algo-1",)), Group("y", None, ("algo-2",))]},
            ["Give --data-group and --trainer-group, one of x and y each."],
        ),
        ({"data_group": "dnn_group"}, ["both 'dnn_group'", "two different names"]),
        (
            {"groups": [Group("data_group", CPU, ("algo-1", "algo-2")), Group("dnn_group", GPU, ("algo-1",))]},
            ["host 'algo-1' twice", "'data_group' and 'dnn_group'"],
        ),
        ({"groups": [Group("data_group", CPU, ("a", "a")), Group("dnn_group", GPU, ("b",))]}, ["host 'a' twice"]),
        ({"groups": [Group("g", CPU, ("a",)), Group("g", GPU, ("b",))]}, ["more than one group called 'g'"]),
        ({"groups": [Group("data_group", CPU, ()), Group("dnn_group", GPU, ("b",))]}, ["'data_group' has no hosts"]),
        ({"current_host": None}, ["does not say which host this is", "algo-1, algo-2, algo-10"]),
        ({"current_host": ""}, ["does not say which host this is"]),
        ({"current_host": "algo-7"}, ["'algo-7'", "none of its groups"]),
    ],
)
def test_a_wrong_description_is_refused_with_source_value_and_next_step(changes, parts):
    with pytest.raises(TopologyError) as caught:
        two_groups(**changes)
    message = str(caught.value)
    assert message.count("cluster.json") == 1
    for part in parts:
        assert part in message
    assert caught.value.exit_code == 2


@given(st.lists(st.text("ab0129-", max_size=6), unique=True), st.randoms(use_true_random=False))
def test_natural_order_does_not_depend_on_the_order_before(names: list[str], rng: random.Random):
    shuffled = rng.sample(names, len(names))
    assert sorted(shuffled, key=natural_key) == sorted(names, key=natural_key)


def test_natural_order_counts():
    assert sorted(["algo-10", "algo-2", "algo-1"], key=natural_key) == ["algo-1", "algo-2", "algo-10"]
