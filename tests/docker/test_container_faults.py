"""Containers that are killed, cut off, stopped or started again: every end is as docs/failures.md says."""

import json

import pytest
from cluster_runs import cluster_file, docker

pytestmark = [pytest.mark.docker, pytest.mark.slow]

LEASE_S = 5
ONE, TWO = (1, 2), (2, 2)  # trainer and data hosts; with one trainer the data hosts are algo-2 and algo-3


def kill(run, host):
    docker("kill", run.container(host))
    state = json.loads(docker("inspect", "--format", "{{json .State}}", run.container(host)))
    assert (state["Running"], state["ExitCode"]) == (False, 137)


def disconnect(run, host):
    container = run.container(host)
    (network,) = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", container))
    docker("network", "disconnect", network, container)
    assert (
        docker("inspect", "--format", "{{json .NetworkSettings.Networks}} {{.State.Running}}", container) == "{} true"
    )


@pytest.mark.parametrize(
    ("hosts", "fault", "victim", "codes", "cause"),
    [
        pytest.param(ONE, kill, "algo-1", [137, 5, 5], {"algo-2": "algo-1", "algo-3": "algo-1"}, id="kill-chief"),
        pytest.param(TWO, kill, "algo-2", [5, 137, 5, 5], {"algo-1": "algo-2", "algo-3": "algo-2"}, id="kill-other"),
        pytest.param(ONE, kill, "algo-2", [4, 137, 4], {"algo-1": "algo-2", "algo-3": "algo-2"}, id="kill-first"),
        pytest.param(ONE, disconnect, "algo-1", [4, 5, 5], {"algo-1": "cut off", "algo-2": "algo-1"}, id="cut-chief"),
        pytest.param(ONE, disconnect, "algo-2", [4, 5, 4], {"algo-1": "algo-2", "algo-2": "algo-1"}, id="cut-first"),
    ],
)
def test_the_job_ends_within_a_lease(hosts, fault, victim, codes, cause, up, tmp_path, request):  # noqa: PLR0917
    run = up(cluster_file(tmp_path, request.node.callspec.id, hosts, hold_step=3))
    run.wait_for("the job holds")
    fault(run, victim)
    code = run.wait(timeout_s=LEASE_S + 60)
    assert run.codes() == codes, run.output[-6000:]
    assert code == codes[0]
    for host, words in cause.items():
        failure = run.result("failure.json" if host == "algo-1" else f"failure-{host}.json")
        assert words in failure["message"], failure


@pytest.mark.parametrize(("name", "fault", "code"), [("kill-second", kill, 137), ("cut-second", disconnect, 4)])
def test_training_goes_on_without_the_second_data_host_and_sees_every_row(name, fault, code, up, tmp_path):
    run = up(cluster_file(tmp_path, name, ONE, hold_step=3))
    run.wait_for("the job holds")
    fault(run, "algo-3")
    run.go_on()
    assert run.wait() == 0, run.output[-6000:]
    assert run.codes() == [0, 0, code]
    assert run.result("summary.json")["results"]["sum_of_rows"] == sum(range(400))
    assert not (run.folder / "failure.json").exists()


def test_docker_stop_of_the_chief_stops_the_job_in_order(up, tmp_path):
    run = up(cluster_file(tmp_path, "stop-chief", ONE, hold_step=3))
    run.wait_for("the job holds")
    docker("stop", run.container("algo-1"))
    assert run.wait() == 143, run.output[-6000:]
    assert run.codes() == [143, 0, 0]
    assert "SIGTERM" in run.result("failure.json")["message"]
    assert run.result("summary.json")["outcome"] == "stopped"


def test_a_data_host_that_is_restarted_comes_back_and_no_row_is_lost(up, tmp_path):
    run = up(cluster_file(tmp_path, "restart", ONE, hold_step=3))
    run.wait_for("the job holds")
    before = docker("inspect", "--format", "{{.State.StartedAt}}", run.container("algo-3"))
    docker("restart", run.container("algo-3"))
    assert docker("inspect", "--format", "{{.State.StartedAt}} {{.State.Running}}", run.container("algo-3")) not in (
        f"{before} true",
        f"{before} false",
    )
    run.go_on()
    assert run.wait() == 0, run.output[-6000:]
    assert run.codes() == [0, 0, 0]
    assert run.result("summary.json")["results"]["sum_of_rows"] == sum(range(400))
