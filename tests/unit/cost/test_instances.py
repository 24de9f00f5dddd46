"""Training instance types and what they have."""

from __future__ import annotations

import pytest

from hetero.cost.instances import instance, instances, near, vcpus
from hetero.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("ml.p4d.24xlarge", (96, 1152, 8)),
        ("ml.c5.18xlarge", (72, 144, 0)),
        ("ml.p3.2xlarge", (8, 61, 1)),
        ("ml.c5.9xlarge", (36, 72, 0)),
    ],
)
def test_the_types_of_the_measured_shapes_are_known(name: str, has: tuple[int, float, int]) -> None:
    one = instance(name)
    assert (one.vcpus, one.memory_gib, one.gpus) == has
    assert vcpus(name) == has[0]


def test_every_type_has_vcpus_and_memory() -> None:
    assert len(instances()) > 200
    assert all(one.vcpus > 0 and one.memory_gib > 0 and one.gpus >= 0 for one in instances().values())


def test_an_unknown_size_is_answered_with_sizes_of_the_same_family() -> None:
    with pytest.raises(SettingsError, match=r"'ml.p4d.25xlarge' is not known.* ml.p4d.24xlarge"):
        vcpus("ml.p4d.25xlarge")


def test_a_name_of_ec2_is_answered_with_that_of_sagemaker() -> None:
    assert near("c5.xlarge") == "SageMaker's name for it, ml.c5.xlarge"


def test_a_name_like_no_other_is_answered_with_an_example() -> None:
    assert "such as ml.c5.18xlarge" in near("?" * 30)
