"""`hetero compose-config`, and that the clusters that come with the checkout are what it makes of their files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from hetero.cli.compose_command import compose_config
from hetero.errors import SettingsError

ROOT = Path(__file__).parents[3]
SHIPPED = ("default", "homogeneous", "two-trainers", "torch")
app = typer.Typer()
app.command("compose-config")(compose_config)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def run(*argv: object) -> str:
    result = CliRunner().invoke(app, [str(value) for value in argv])
    if result.exception is not None:
        raise result.exception
    return result.output


def cluster_file(folder: Path, name: str, extra: str = "") -> Path:
    path = folder / f"{name}.yaml"
    shape = "trainer: {instance_type: ml.p4d.24xlarge}\ndata: {hosts: 2, instance_type: ml.c5.18xlarge}\n"
    path.write_text(f"job: examples/digits/job.py:job\n{shape}{extra}")
    return path


def test_the_table_has_real_and_scaled_cpus(tmp_path: Path) -> None:
    output = run(cluster_file(tmp_path, "shape-a", "cpus: 1\n"), "--output", tmp_path / "out")
    assert "shape-a: examples/digits/job.py:job, engine tf_data, all hosts' CPUs x 0.004167" in output
    assert re.search(r"shape-a-algo-1 .* trainer .* ml.p4d.24xlarge .* 1 .* 96 .* 0.4 ", output)
    assert re.search(r"shape-a-algo-3 .* data .* ml.c5.18xlarge .* 72 .* 0.3 ", output)
    assert re.search(r"all .* 240 .* 1 ", output)
    assert "--profile shape-a up --abort-on-container-exit" in output


def test_json_has_every_host_and_keeps_its_keys(tmp_path: Path) -> None:
    argv = (cluster_file(tmp_path, "shape-a", "cpus: 1\n"), "--output", tmp_path / "out", "--json", "--image", "mine:2")
    values = json.loads(run(*argv))
    (cluster,) = values.pop("clusters")
    assert values == {"version": 1, "compose_file": str(tmp_path / "out" / "compose.yaml"), "image": "mine:2"}
    assert list(cluster) == ["name", "file", "job", "engine", "ranks_per_host", "factor", "hosts"]
    assert cluster["hosts"][1] == {
        "name": "algo-2", "service": "shape-a-algo-2", "role": "data", "group": "data_group",
        "instance_type": "ml.c5.18xlarge", "real_cpus": 72.0, "cpus": 0.3,
    }  # fmt: skip
    assert (tmp_path / "out" / "config" / "shape-a" / "algo-3" / "hyperparameters.json").is_file()


def test_several_files_are_profiles_of_one(tmp_path: Path) -> None:
    files = [cluster_file(tmp_path, name, "cpus: 1\n") for name in ("one", "two")]
    run(*files, "--output", tmp_path / "out")
    services = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())["services"]
    assert {tuple(one["profiles"]) for one in services.values()} == {("one",), ("two",)}
    assert len(services) == 6


def test_mistakes_in_all_files_are_said_together_and_nothing_is_written(tmp_path: Path) -> None:
    one = cluster_file(tmp_path, "one", "cpus: -1\n")
    two = cluster_file(tmp_path, "two", "options: {epochs: 0}\n")
    with pytest.raises(SettingsError) as error:
        run(one, two, tmp_path / "nothing.yaml", "--output", tmp_path / "out")
    assert len(error.value.problems) == 3
    assert not (tmp_path / "out").exists()


def test_two_clusters_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [cluster_file(tmp_path, name, "cpus: 1\nname: same\n") for name in ("one", "two")]
    with pytest.raises(SettingsError, match="are both named same; give them different names"):
        run(*files, "--output", tmp_path / "out")


@pytest.mark.parametrize("image", ["", "a b", "-x"])
def test_an_image_that_is_no_name_is_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(SettingsError, match="it needs the name of an image"):
        run(cluster_file(tmp_path, "one", "cpus: 1\n"), "--output", tmp_path / "out", f"--image={image}")


def test_more_cpus_than_this_machine_has_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    output = run(cluster_file(tmp_path, "one"), "--output", tmp_path / "out")
    assert "algo-1 gets 96 CPUs, and this machine has 2: Docker refuses that. Scale the cluster down" in output


def test_the_shipped_clusters_are_up_to_date(tmp_path: Path) -> None:
    """Else: hetero compose-config docker/clusters/{default,homogeneous,two-trainers,torch}.yaml --output docker."""
    files = [ROOT / "docker" / "clusters" / f"{name}.yaml" for name in SHIPPED]
    run(*files, "--output", tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    there = {path: (ROOT / "docker" / path).read_text() for path in made if (ROOT / "docker" / path).is_file()}
    assert there == made
    assert {path.name for path in (ROOT / "docker" / "config").iterdir() if path.is_dir()} == set(SHIPPED)


def test_the_shipped_clusters_have_two_cpus_at_most_and_no_path_of_a_machine() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for name in SHIPPED:
        own = [one for one in services.values() if one["profiles"] == [name]]
        assert sum(one["cpus"] for one in own) == pytest.approx(2.0)
    bound = [mount["source"] for one in services.values() for mount in one["volumes"] if mount["type"] == "bind"]
    assert all(source.startswith("./config/") for source in bound)
    assert "COMPOSE_PROFILES=default" in (ROOT / "docker" / ".env").read_text().splitlines()
