"""The compose file: shapes, what each container sees, and that it is what docker-compose reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_files import GOOD, write
from hypothesis import given
from hypothesis import strategies as st

from hetero import clusters as host_clusters
from hetero.clusters import LEAVE_AFTER_CHIEF_ENV, compose_folder
from hetero.clusters.compose import ContainerCluster, compose_text, config_files, container_cluster, scale
from hetero.clusters.compose_file import ClusterFile, HostGroup, read_cluster_file
from hetero.errors import SettingsError
from hetero.launcher import prepare
from hetero.topology import Role

SHAPE_A = {
    "trainer": {"instance_type": "ml.p4d.24xlarge"},
    "data": {"hosts": 2, "instance_type": "ml.c5.18xlarge"},
}
SHAPE_B = {"trainer": {"instance_type": "ml.p3.2xlarge"}, "data": {"instance_type": "ml.c5.9xlarge"}}


def cluster(tmp_path: Path, **change: Any) -> ContainerCluster:
    return container_cluster(read_cluster_file(write(tmp_path, {**GOOD, **change})))


def composed(tmp_path: Path, *made: ContainerCluster, image: str = "hetero") -> dict[str, Any]:
    return yaml.safe_load(compose_text(made, image, tmp_path / "out"))


@pytest.mark.parametrize(
    ("shape", "cpus", "figures"),
    [(SHAPE_A, 1.0, [0.4, 0.3, 0.3]), (SHAPE_B, 1.65, [0.3, 1.35]), (SHAPE_A, None, [96, 72, 72])],
)
def test_instance_types_are_scaled_by_one_factor(
    tmp_path: Path, shape: dict[str, Any], cpus: float | None, figures: list[float]
) -> None:
    made = cluster(tmp_path, **shape, cpus=cpus)
    assert [host.cpus for host in made.hosts] == figures
    assert made.factor == pytest.approx(figures[0] / made.hosts[0].real_cpus)


def file_of(trainer: HostGroup, data: HostGroup | None, cpus: float | None) -> ClusterFile:
    return ClusterFile(Path("x.yaml"), "x", "x.py:job", None, {}, {}, cpus, trainer, 1, data)


GROUPS = st.builds(HostGroup, st.integers(1, 50), st.just("g"), st.none(), st.floats(0.05, 1000))


@given(GROUPS, st.none() | GROUPS, st.floats(0.05, 1000))
def test_scaled_hosts_sum_up_to_the_figure_and_keep_their_ratio(
    trainer: HostGroup, data: HostGroup | None, cpus: float
) -> None:
    file = file_of(trainer, data, cpus)
    assert sum(group.hosts * group.real_cpus * scale(file) for group in file.groups) == pytest.approx(cpus)
    assert scale(file_of(trainer, data, None)) == 1.0


def test_a_host_that_would_be_too_small_to_start_is_refused_with_what_would_do(tmp_path: Path) -> None:
    shape = {"trainer": {"instance_type": "ml.p4d.24xlarge"}, "data": {"instance_type": "ml.c5.xlarge"}}
    with pytest.raises(SettingsError, match=r"ml.c5.xlarge of group data_group gets 0.04 CPU of the 1 of all") as error:
        cluster(tmp_path, **shape, cpus=1)
    least = float(str(error.value).partition("Give cpus: ")[2].split()[0])
    assert least == pytest.approx(1.25)
    assert min(host.cpus for host in cluster(tmp_path, **shape, cpus=least).hosts) == 0.05


def test_every_container_is_a_host_that_its_launcher_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows").mkdir()
    made = cluster(tmp_path, options={"epochs": 3}, channels={"training": "rows"})
    seen = {}
    monkeypatch.chdir(tmp_path / "src")
    for host in made.hosts:
        base = tmp_path / host.name
        (base / "input" / "config").mkdir(parents=True)
        for path, text in config_files(made).items():
            if path.startswith(f"mine/{host.name}/"):
                (base / "input" / "config" / Path(path).name).write_text(text)
        environ = {"SAGEMAKER_BASE_DIR": str(base)}
        prepared = prepare(host_clusters.arguments([], environ), environ, 0.0)
        seen[host.name] = (prepared.plan.role, prepared.config.is_chief, prepared.plan.ranks)
        assert prepared.config.settings.epochs == 3
        assert prepared.config.settings.channels == {"training": str(base / "input" / "data" / "training")}
        assert prepared.config.control_address == "algo-2:16000"
        assert prepared.config.engine == made.settled.engine
    data = (Role.DATA, False, 0)
    assert seen == {"algo-1": (Role.TRAINER, True, 2), "algo-2": data, "algo-3": data}


def test_a_service_is_a_host_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    made = cluster(tmp_path, channels={"training": "rows"}, options={"lease-s": 6, "grace-s": 4})
    content = composed(tmp_path, made, image="mine:1")
    assert list(content["services"]) == ["mine-algo-1", "mine-algo-2", "mine-algo-3"]
    chief, data = content["services"]["mine-algo-1"], content["services"]["mine-algo-2"]
    assert (chief["hostname"], chief["cpus"], chief["image"]) == ("algo-1", 1.2, "mine:1")
    assert (data["hostname"], data["cpus"], data["profiles"]) == ("algo-2", 0.6, ["mine"])
    assert data["networks"] == {"mine": {"aliases": ["algo-2"]}}
    assert (data["init"], data["stop_signal"], data["stop_grace_period"]) == (False, "SIGTERM", "20s")
    assert data["command"] == ["python", "/opt/ml/code/launcher.py"]
    assert data["working_dir"] == "/opt/ml/source"
    assert data["environment"] == ["HETERO_TOKEN", f"{LEAVE_AFTER_CHIEF_ENV}=1", "PYTHONPATH=/opt/ml/source"]
    bound = {one["target"]: one["source"] for one in data["volumes"] if one["type"] == "bind" and one["read_only"]}
    assert bound == {
        "/opt/ml/input/config": "./config/mine/algo-2",
        "/opt/ml/source": "../src",
        "/opt/ml/input/data/training": "../rows",
    }
    kept = {one["target"]: one["source"] for one in chief["volumes"] if one["type"] == "volume"}
    assert kept == {"/opt/ml/output": "mine-output", "/opt/ml/model": "mine-model"}
    assert len(data["volumes"]) == len(bound)
    assert set(kept.values()) == set(content["volumes"])


def test_examples_run_from_the_images_own_copy(tmp_path: Path) -> None:
    made = cluster(tmp_path, job="examples/digits/job.py:job", source=None)
    service = composed(tmp_path, made)["services"]["mine-algo-1"]
    assert service["working_dir"] == "/opt/ml/code"
    assert not any("source" in one["target"] for one in service["volumes"])


def test_a_whole_path_stays_whole_and_dollars_are_no_variables(tmp_path: Path) -> None:
    rows = tmp_path / "${HOME} $x"
    rows.mkdir()
    made = cluster(tmp_path, channels={"training": str(rows)})
    text = compose_text([made], "hetero", tmp_path / "out")
    assert str(rows).replace("$", "$$") in text
    assert "$" not in text.replace("$$", "")


def health(tmp_path: Path, made: ContainerCluster) -> str:
    test = composed(tmp_path, made)["services"]["mine-algo-1"]["healthcheck"]["test"]
    assert test[0] == "CMD-SHELL"
    return test[1].replace("$$", "$")


@pytest.mark.parametrize(("age_s", "code"), [(0, 0), (5, 0), (60, 1), (None, 1)])
def test_a_host_is_healthy_while_the_coordinator_has_answered_within_a_lease(
    tmp_path: Path, age_s: float | None, code: int
) -> None:
    base = tmp_path / "ml"
    command = health(tmp_path, cluster(tmp_path)).replace("/opt/ml", str(base))
    pulse = base / "output" / "data" / "hetero" / "work" / "algo-1" / "launcher.pulse"
    pulse.parent.mkdir(parents=True)
    if age_s is not None:
        pulse.touch()
        os.utime(pulse, (pulse.stat().st_mtime - age_s,) * 2)
    assert subprocess.run(["sh", "-c", command], check=False, capture_output=True).returncode == code


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_reads_the_file(tmp_path: Path) -> None:
    rows = tmp_path / "$rows"
    rows.mkdir()
    made = cluster(tmp_path, channels={"training": str(rows)})
    other = container_cluster(read_cluster_file(write(tmp_path, {**GOOD, "data": None}, "other.yaml")))
    out = tmp_path / "out"
    files = {**config_files(made), **config_files(other)}
    compose_folder.write(out, compose_text([made, other], "hetero", out), files)
    argv = ["docker-compose", "-f", str(out / "compose.yaml"), "--profile", "mine", "config"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout.replace("$$", "$"))["services"]
    named = {name: one["profiles"] for name, one in services.items()}
    assert named == {**{f"mine-algo-{n}": ["mine"] for n in (1, 2, 3)}, "other-algo-1": ["other"]}
    bound = {one["target"]: one["source"] for one in services["mine-algo-2"]["volumes"]}
    assert bound["/opt/ml/input/data/training"] == str(rows)
    assert json.loads((Path(bound["/opt/ml/input/config"]) / "resourceconfig.json").read_text())["current_host"]
    assert services["mine-algo-2"]["cpus"] == 0.6
