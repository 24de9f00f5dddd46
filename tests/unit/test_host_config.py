"""What a launcher hands down to its children comes out as it went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetero.host import HostConfig, open_tasks, worker_key
from hetero.mpi import MpiRank
from hetero.settings import Settings
from hetero.topology import Host, Role, Topology

DATA = Host("algo-2", Role.DATA, "data_group", "10.0.0.2", "ml.c5.xlarge", cpus=(0, 1))
TRAINER = Host("algo-1", Role.TRAINER, "dnn_group", "algo-1")
FULL = Settings(
    job="job.py:job",
    engine="tf_data",
    batch_size=8,
    ranks_per_host=2,
    lease_s=2.5,
    token="hush",
    run_dir=Path("/runs/a"),
    seed=2**40,
    channels={"training": "/data"},
    model_dir="/model",
    params={"sizes": [1, {"deep": None}], "text": 'é "quoted"', "epochs": 1},
)


def config(settings: Settings, topology: Topology) -> HostConfig:
    return HostConfig(
        settings=settings,
        topology=topology,
        engine="tf_data",
        job_name="dïgits",
        run_dir="/runs/a",
        run_id="0123456789ab",
        control_address="algo-2:16000",
        started_s=1700000000.123456,
    )


@pytest.mark.parametrize("settings", [FULL, Settings(job="job.py:job")], ids=["full", "defaults"])
@pytest.mark.parametrize(
    "topology",
    [
        Topology(DATA, (DATA,), (TRAINER,), "eth0", "/opt/ml/resourceconfig.json", container=True),
        Topology(TRAINER, (), (TRAINER,), None, "local", control_port=17000),
    ],
    ids=["heterogeneous", "homogeneous"],
)
def test_a_configuration_comes_out_as_it_went_in(settings: Settings, topology: Topology) -> None:
    original = replace(config(settings, topology), sharded_channels=("training", "b"), piped_channels=("c",))
    assert HostConfig.from_json(original.to_json()) == original
    under_mpirun = replace(original, mpi=MpiRank(5, 8, 1, 4, "2138898433", kill_after_s=60.0))
    assert HostConfig.from_json(under_mpirun.to_json()) == under_mpirun


def test_under_mpirun_the_chief_has_its_first_rank() -> None:
    others = (TRAINER, Host("algo-3", Role.TRAINER, "dnn_group", "algo-3"))
    first, second = (config(FULL, Topology(host, (DATA,), others, None, "")) for host in others)
    assert (first.is_chief, second.is_chief) == (True, False)
    first, second = replace(first, mpi=MpiRank(2, 4, 0, 2)), replace(second, mpi=MpiRank(0, 4, 0, 2))
    assert (first.is_chief, second.is_chief) == (False, True)
    assert not replace(second, mpi=MpiRank(1, 4, 1, 2)).is_chief  # the same host's other launcher


def test_roles_and_cpus_keep_their_types() -> None:
    back = HostConfig.from_json(config(FULL, Topology(DATA, (DATA,), (TRAINER,), None, "")).to_json())
    assert back.topology.current.role is Role.DATA
    assert isinstance(back.topology.current.cpus, tuple)
    assert isinstance(back.settings.run_dir, Path)
    assert back.topology.coordinator_host == back.topology.current


def test_channels_know_where_they_are_on_sagemaker_alone() -> None:
    topology = Topology(DATA, (DATA,), (TRAINER,), None, "", container=True)
    there = replace(config(FULL, topology), sharded_channels=("training",)).channels()
    assert "on host algo-2 of group 'data_group'" in there.missing("x")
    assert "instance_groups=['data_group', 'dnn_group']" in there.missing("x")
    assert there.sharded_channel("/data/a") == "training"
    assert "host" not in config(FULL, replace(topology, container=False)).channels().missing("x")


def test_the_token_stays_out_of_what_is_shown() -> None:
    assert "hush" not in repr(config(FULL, Topology(DATA, (DATA,), (TRAINER,), None, "")))


def test_a_configuration_knows_its_host_its_coordinator_and_its_folder() -> None:
    one = config(FULL, Topology(DATA, (DATA,), (TRAINER,), None, ""))
    assert one.host == "algo-2"
    assert one.run().path == Path("/runs/a")
    with one.connect() as client:
        assert (client.address, client.host, client.role) == ("algo-2:16000", "algo-2", "data")


def test_what_a_worker_publishes_is_understood() -> None:
    assert worker_key("algo-2", "worker-0") == "worker/algo-2/worker-0"
    assert open_tasks("10.0.0.2:6001 3") == 3
    assert open_tasks("[::1]:6001 0") == 0
    assert open_tasks(None) is None
