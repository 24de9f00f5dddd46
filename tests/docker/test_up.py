"""docker/up: what it refuses, how it is stopped, and that it cleans up."""

import signal
import subprocess

import pytest
from cluster_runs import CHECKOUT, SHIPPED, cluster_file, docker, own_environment, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def refused(*arguments, **environment):
    """Run docker/up where it must refuse at once, and return what it says."""
    said = subprocess.run(
        [CHECKOUT / "docker" / "up", *map(str, arguments)],
        env=own_environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert said.returncode == 2, said.stdout
    assert "Building" not in said.stdout
    return said.stdout


def test_a_wrong_cluster_file_is_told_before_anything_is_built(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("job: nowhere.py:job\ntrainer: {hosts: 0, cpus: 1}\nspeed: 7\n")
    said = refused(wrong, "--results", tmp_path / "results")
    assert str(wrong) in said
    assert "speed" in said
    assert "nothing was built or started" in said
    assert list((tmp_path / "results").iterdir()) == []


def test_a_cluster_file_that_is_not_there_is_named(tmp_path):
    assert str(tmp_path / "none.yaml") in refused(tmp_path / "none.yaml", "--results", tmp_path / "results")


def test_a_docker_that_does_not_answer_is_told(tmp_path):
    said = refused("--results", tmp_path / "results", DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert "Docker does not answer" in said


def test_an_image_that_is_not_there_is_named(tmp_path):
    assert "no image hetero-none here" in refused("--image", "hetero-none", "--results", tmp_path / "results")


def test_a_folder_that_cannot_be_written_to_is_named_with_the_option(tmp_path):
    (tmp_path / "file").touch()
    said = refused("--results", tmp_path / "file" / "results")
    assert f"Cannot write to {tmp_path}/file/results" in said
    assert "--results" in said


def test_a_disk_without_room_for_results_is_told(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        assert f"{small} has 1 MB free" in refused("--results", small)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_same_cluster_is_refused_while_it_runs_and_sigterm_stops_it_with_results(up, tmp_path):
    file = cluster_file(tmp_path, "twice", (1, 2), hold_step=3)
    run = up(file)
    run.wait_for("the job holds")
    said = refused(file, "--image", "hetero", "--results", tmp_path / "results")
    assert f"Cluster twice runs already (process {run.process.pid})" in said
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output[-6000:]
    assert run.codes() == [143, 143, 143]
    assert "SIGTERM" in run.result("failure.json")["message"]
    assert run.result("summary.json")["outcome"] == "stopped"
    assert "the job holds" in (run.folder / "logs" / "algo-1" / "rank-0.log").read_text()


def test_a_second_signal_kills_what_does_not_stop(up, tmp_path):
    run = up(cluster_file(tmp_path, "deaf", (1, 0), hold_step=3, deaf=True, **{"grace-s": 300}))
    run.wait_for("the job holds")
    container = run.container("algo-1")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("Stopping")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(timeout_s=60) == 137, run.output[-6000:]
    assert docker("ps", "-aq", "--filter", f"id={container}") == ""


def test_what_a_killed_docker_up_left_is_removed_by_the_next_one(up, tmp_path):
    file = cluster_file(tmp_path, "again", (1, 0), hold_step=3)
    first = up(file)
    first.wait_for("the job holds")
    old = first.container("algo-1")
    first.process.kill()
    first.process.wait()
    second = up(file)
    wait_until("end of the old container", lambda: not docker("ps", "-aq", "--filter", f"id={old}"), 60)
    second.wait_for("the job holds")
    second.go_on()
    assert second.wait() == 0, second.output[-6000:]


def test_help_shows_the_default_cluster_and_options():
    said = subprocess.run([CHECKOUT / "docker" / "up", "--help"], capture_output=True, text=True, check=True)
    assert {"--image", "--results"} <= set(said.stdout.split())
    assert (SHIPPED / "default.yaml").exists()
