from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.errors import SettingsError
from hetero.plan import Hardware, HostPlan, plan_cluster, plan_host
from hetero.settings import Settings
from hetero.spec import ProcessKind
from hetero.topology import Group, Role, Topology, build_topology


def cluster(data: int, trainers: int, *, address: str | None = None, control_port: int | None = None) -> Topology:
    names = {f"{kind}-{n}" for kind, count in (("d", data), ("t", trainers)) for n in range(1, count + 1)}
    groups = [
        Group("data_group", None, tuple(name for name in names if name[0] == "d")),
        Group("dnn_group", None, tuple(name for name in names if name[0] == "t")),
    ]
    return build_topology(
        [group for group in groups if group.hosts],
        "t-1",
        "data_group",
        "dnn_group",
        "eth0",
        "cluster.json",
        addresses=dict.fromkeys(names, address) if address else None,
        control_port=control_port,
    )


def planned(topology: Topology, engine: str = "tf_data", gpus: int = 0, **options: object) -> dict[str, HostPlan]:
    plans = plan_cluster(topology, Settings(job="j", **options), engine, Hardware(cpus=4, gpus=gpus))
    return {plan.host.name: plan for plan in plans}


def names(plan: HostPlan) -> list[str]:
    return [process.name for process in plan.processes]


def test_a_heterogeneous_job_has_services_on_data_hosts_and_ranks_on_trainers():
    plans = planned(cluster(2, 2), gpus=2, workers_per_host=2)
    assert list(plans) == ["d-1", "d-2", "t-1", "t-2"]
    assert names(plans["d-1"]) == ["coordinator", "dispatcher", "worker-0", "worker-1"]
    assert names(plans["d-2"]) == ["worker-0", "worker-1"]
    assert names(plans["t-1"]) == names(plans["t-2"]) == ["rank-0", "rank-1"]
    assert {plan.control_address for plan in plans.values()} == {"d-1:16000"}
    assert plans["d-1"].runs_coordinator
    assert not plans["t-1"].runs_coordinator


def test_a_homogeneous_job_has_ranks_and_the_coordinator_on_the_chief():
    plans = planned(cluster(0, 2), engine="local")
    assert names(plans["t-1"]) == ["coordinator", "rank-0"]
    assert names(plans["t-2"]) == ["rank-0"]
    assert plans["t-2"].control_address == "t-1:16000"


def test_the_settings_data_port_comes_before_that_of_the_cluster():
    topology = replace(cluster(1, 1), data_port=21_000)
    assert [process.port for process in planned(topology)["d-1"].processes] == [16000, 21000, 21001]
    assert [process.port for process in planned(topology, data_port=7000)["d-1"].processes] == [16000, 7000, 7001]


def test_ports_are_the_preferred_ones():
    plans = planned(cluster(2, 1), workers_per_host=2, data_port=7000, control_port=17000)
    assert [process.port for process in plans["d-1"].processes] == [17000, 7000, 7001, 7002]
    assert [process.port for process in plans["d-2"].processes] == [7001, 7002]
    assert [process.port for process in plans["t-1"].processes] == [None]


def test_virtual_hosts_at_one_address_do_not_share_ports():
    plans = planned(cluster(3, 1, address="127.0.0.1", control_port=20000), workers_per_host=2)
    ports = [process.port for plan in plans.values() for process in plan.processes if process.port]
    assert len(ports) == len(set(ports)) == 8
    assert plans["t-1"].control_address == "127.0.0.1:20000"


def test_under_grpc_each_data_host_has_a_feed_and_a_worker_for_each_cpu():
    plans = planned(cluster(2, 1), engine="grpc")
    workers = [f"worker-{index}" for index in range(4)]
    assert names(plans["d-1"]) == ["coordinator", "feed", *workers]
    assert names(plans["d-2"]) == ["feed", *workers]
    assert [process.port for process in plans["d-2"].processes] == [6000, None, None, None, None]
    assert plans["d-2"].processes[1].args == ("feed-worker", "4")
    assert names(planned(cluster(1, 1), engine="grpc", workers_per_host=1)["d-1"])[-1] == "worker-0"


def test_under_grpc_virtual_hosts_at_one_address_do_not_share_ports():
    plans = planned(cluster(3, 1, address="127.0.0.1", control_port=20000), engine="grpc", workers_per_host=9)
    assert [process.port for plan in plans.values() for process in plan.processes if process.port] == [
        20000, 6000, 6001, 6002,
    ]  # fmt: skip
    with pytest.raises(SettingsError, match=r"for 3 data hosts takes ports up to 65536; .* give --data-port 65533"):
        planned(cluster(3, 1, address="127.0.0.1"), engine="grpc", data_port=65534)


def test_modules_and_arguments():
    plans = planned(cluster(1, 1))
    assert [(p.module, p.args) for p in (*plans["d-1"].processes, *plans["t-1"].processes)] == [
        ("hetero.children", ("coordinator",)),
        ("hetero.children", ("dispatcher",)),
        ("hetero.children", ("worker", "0")),
        ("hetero.children", ("rank", "0")),
    ]


def test_services_are_restarted_and_ranks_never():
    plans = planned(cluster(1, 1))
    for plan in plans.values():
        for process in plan.processes:
            assert (process.restarts.attempts > 1) == (process.kind is not ProcessKind.RANK)
    assert [process.critical for process in plans["d-1"].processes] == [True, True, False]
    assert plans["t-1"].processes[0].critical


@pytest.mark.parametrize(("gpus", "option", "ranks"), [(0, None, 1), (8, None, 8), (8, 2, 2), (0, 3, 3)])
def test_the_number_of_ranks(gpus, option, ranks):
    plans = planned(cluster(1, 2), gpus=gpus, ranks_per_host=option)
    second = plans["t-2"]
    assert len(second.processes) == ranks
    assert second.first_rank == ranks
    assert second.expected_ranks == 2 * ranks
    assert [second.global_rank(process) for process in second.processes] == list(range(ranks, 2 * ranks))
    assert plans["d-1"].first_rank is None
    assert plans["d-1"].global_rank(plans["d-1"].processes[0]) is None


def test_plan_host_is_about_the_current_host_and_always_the_same():
    topology, settings, hardware = cluster(1, 1), Settings(job="j"), Hardware(4, 0)
    plan = plan_host(topology, settings, "tf_data", hardware)
    assert plan.host.name == "t-1"
    assert plan.role is Role.TRAINER
    assert plan == plan_host(topology, settings, "tf_data", hardware)


@pytest.mark.parametrize("control_port", [6000, 6001, 6002])
def test_a_control_port_among_the_data_ports_is_refused(control_port):
    with pytest.raises(SettingsError, match=rf"--control-port is {control_port}, .*6000 to 6002 of host d-1.* 6003"):
        planned(cluster(1, 1), workers_per_host=2, control_port=control_port)


def test_a_control_port_among_another_machines_data_ports_is_fine():
    assert planned(cluster(1, 1), control_port=6002)
    assert planned(cluster(0, 1), engine="local", control_port=6000)


def test_data_ports_have_to_exist():
    with pytest.raises(SettingsError, match=r"--data-port is 65535, .*give --data-port 65534 or less"):
        planned(cluster(1, 1), data_port=65535)
    assert planned(cluster(1, 1), data_port=65534)


def test_an_unsettled_engine_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="auto"):
        planned(cluster(1, 1), engine="auto")


def test_local_workers_are_on_trainer_hosts_beside_the_ranks():
    plans = planned(cluster(2, 2), engine="grpc", local_workers=2, gpus=2)
    assert names(plans["t-1"]) == names(plans["t-2"]) == ["rank-0", "rank-1", "feed", "worker-0", "worker-1"]
    assert names(plans["d-2"]) == names(planned(cluster(2, 2), engine="grpc")["d-2"])
    feed, *workers = plans["t-2"].processes[2:]
    assert (feed.port, feed.args, feed.critical) == (6000, ("feed",), False)
    assert [(one.args, one.port, one.critical) for one in workers] == 2 * [(("feed-worker", "2"), None, False)]
    assert all(process.restarts.attempts for process in (feed, *workers))
    assert {process.env["CUDA_VISIBLE_DEVICES"] for process in (feed, *workers)} == {"-1"}
    assert [plans["t-1"].is_local(process) for process in plans["t-1"].processes] == [False, False, True, True, True]
    assert not any(plans["d-1"].is_local(process) for process in plans["d-1"].processes)
    assert plans["t-2"].first_rank == 2
    assert [plans["t-2"].global_rank(process) for process in plans["t-2"].processes] == [2, 3, None, None, None]


def test_local_workers_under_tf_data_need_no_feed():
    plan = planned(cluster(1, 1), local_workers=2)["t-1"]
    assert names(plan) == ["rank-0", "worker-0", "worker-1"]
    assert [process.port for process in plan.processes] == [None, 6000, 6001]
    assert plan.most_local_workers == 0


@pytest.mark.parametrize(
    ("engine", "cpus", "most", "processes"),
    [
        ("grpc", 4, 3, ["feed", "worker-0", "worker-1", "worker-2"]),
        ("grpc", 1, 1, ["feed", "worker-0"]),
        ("grpc", 0.4, 1, ["feed", "worker-0"]),
        ("tf_data", 4, 1, ["worker-0"]),
        ("tf_data", 1, 1, ["worker-0"]),
        ("tf_data", 0.3, 1, ["worker-0"]),
    ],
)
def test_auto_starts_none_and_says_how_many_it_may(engine, cpus, most, processes):
    settings = Settings(job="j", local_workers="auto")
    data, trainer = plan_cluster(cluster(1, 1), settings, engine, Hardware(cpus=cpus, gpus=0))
    assert names(trainer) == ["rank-0"]
    assert (data.most_local_workers, trainer.most_local_workers) == (0, most)
    assert [process.name for process in trainer.local_processes(most)] == processes


@pytest.mark.parametrize(
    ("engine", "cpus", "workers", "most"),
    [
        ("grpc", 0.3, 1, 8),
        ("grpc", 1.0, 1, 8),
        ("grpc", 1.04, 1, 8),  # hardly another CPU
        ("grpc", 1.35, 2, 16),
        ("grpc", 4.0, 4, 32),
        ("grpc", 96.0, 96, 96),
        ("tf_data", 0.3, 1, 0),
        ("tf_data", 1.0, 1, 0),
        ("tf_data", 1.35, 2, 0),
        ("tf_data", 2.0, 1, 0),
        ("tf_data", 7.5, 2, 0),
        ("tf_data", 96.0, 1, 0),
    ],
)
def test_a_data_host_begins_with_a_worker_for_each_cpu_begun_or_as_many_as_tf_data_can_use(engine, cpus, workers, most):
    data, trainer = plan_cluster(cluster(1, 1), Settings(job="j"), engine, Hardware(cpus=cpus, gpus=0))
    assert len(data.of_kind(ProcessKind.WORKER)) == workers
    assert (data.most_workers, trainer.most_workers) == (most, 0)
    assert [spec.name for spec in data.more_workers(most)] == [f"worker-{index}" for index in range(workers, most)]
    assert data.later_processes == data.more_workers(most)


def test_a_number_of_workers_is_kept():
    settings = Settings(job="j", workers_per_host=3)
    data, _ = plan_cluster(cluster(1, 1), settings, "grpc", Hardware(cpus=8.0, gpus=0))
    assert (len(data.of_kind(ProcessKind.WORKER)), data.most_workers, data.later_processes) == (3, 0, ())
    assert data.of_kind(ProcessKind.FEED)[0].args == ("feed",)


def test_workers_that_are_added_share_the_hosts_memory_for_batches_with_those_that_are_there():
    data, _ = plan_cluster(cluster(1, 1), Settings(job="j"), "grpc", Hardware(cpus=2.0, gpus=0))
    assert data.of_kind(ProcessKind.FEED)[0].args == ("feed", "2")
    assert [(spec.name, spec.args) for spec in data.more_workers(4)] == [
        ("worker-2", ("feed-worker", "4")),
        ("worker-3", ("feed-worker", "4")),
    ]


@pytest.mark.parametrize(
    ("engine", "cpus", "quota", "cap", "most"),
    [
        ("grpc", 1, 0.4, None, 1),
        ("tf_data", 1, 0.4, None, 1),
        ("grpc", 2, 2.5, None, 3),
        ("tf_data", 2, 2.5, None, 1),
        ("grpc", 1, None, 0.5, 1),
        ("grpc", 8, None, 2.5, 3),
        ("grpc", 2, 2.5, 0.5, 1),
    ],
)
def test_paced_ones_may_be_as_many_as_can_use_up_what_they_are_kept_to(engine, cpus, quota, cap, most):
    settings = Settings(job="j", local_workers="auto", local_workers_cpus=cap)
    plans = plan_cluster(cluster(1, 1), settings, engine, Hardware(cpus, 0, quota))
    assert [plan.most_local_workers for plan in plans] == [0, most]


@pytest.mark.parametrize(
    ("engine", "local_workers", "taken"),
    [
        ("grpc", 3, 1 + 2 + 2),
        ("grpc", "auto", 1 + 2 + 2),
        ("tf_data", 3, 1 + 1 + 2 * 3 + 2 * 3),
        ("tf_data", "auto", 1 + 1 + 2 * 3 + 2),  # one local worker uses all CPUs
    ],
)
def test_virtual_hosts_at_one_address_do_not_share_ports_with_local_workers(engine, local_workers, taken):
    options = {"workers_per_host": 3, "local_workers": local_workers}
    plans = planned(cluster(2, 2, address="127.0.0.1", control_port=20000), engine=engine, **options)
    processes = [process for plan in plans.values() for process in plan.processes]
    processes += [process for plan in plans.values() for process in plan.local_processes(plan.most_local_workers)]
    ports = [process.port for process in processes if process.port]
    assert len(ports) == len(set(ports)) == taken


def test_ports_of_local_workers_have_to_exist_and_to_be_no_others():
    with pytest.raises(SettingsError, match=r"and --local-workers 3 takes ports up to 65536"):
        planned(cluster(1, 1), data_port=65534, local_workers=3)
    with pytest.raises(SettingsError, match=r"--control-port is 6003, .*6002 to 6004 of host t-1"):
        planned(cluster(1, 1, address="127.0.0.1"), control_port=6003, local_workers=3)
