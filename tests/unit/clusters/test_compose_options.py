"""Options of a cluster file: wrong ones are said where the file is, as a launcher would say them in its container."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_files import GOOD, write

from hetero.clusters import compose_options
from hetero.clusters.compose import ContainerCluster, container_cluster
from hetero.clusters.compose_file import read_cluster_file
from hetero.clusters.compose_options import hyperparameters
from hetero.clusters.hyperparameters import as_flags
from hetero.errors import SettingsError
from hetero.settings import resolve


def settled(tmp_path: Path, options: dict[str, Any], engine: str = "grpc", **change: Any) -> ContainerCluster:
    return container_cluster(read_cluster_file(write(tmp_path, {**GOOD, "options": options, **change}, engine=engine)))


def problems(tmp_path: Path, options: dict[str, Any], engine: str = "grpc", **change: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        settled(tmp_path, options, engine, **change)
    return error.value.problems


def test_options_are_settled_with_the_jobs_own_defaults(tmp_path: Path) -> None:
    cluster = settled(tmp_path, {"lease_s": 5, "my-own": {"a": [1]}})
    settings = cluster.settled.settings
    assert (settings.lease_s, settings.batch_size, settings.ranks_per_host) == (5.0, 8, 2)
    assert settings.params == {"my_own": {"a": [1]}, "depth": 3, "epochs": 1}
    assert cluster.settled.engine == "grpc"


def test_a_launcher_reads_the_hyperparameters_as_the_file_has_them(tmp_path: Path) -> None:
    own = {"epochs": 3, "words": "two words", "x": "--dash", "flag": True, "none": None, "table": {"a": [1, 0.5]}}
    groups = {"trainer": {"cpus": 1, "group": "gpu"}, "data": {"cpus": 1, "group": "cpu"}}
    file = read_cluster_file(write(tmp_path, {**GOOD, "options": own, **groups}))
    settings = resolve(as_flags(hyperparameters(file)), {})
    assert {name: settings.params[name] for name in own} == own
    assert (settings.epochs, settings.ranks_per_host) == (3, 1)
    assert (settings.job, settings.data_group, settings.trainer_group) == ("mine.py:job", "cpu", "gpu")


def test_the_environment_of_this_machine_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_BATCH_SIZE", "7")
    monkeypatch.setenv("HETERO_EPOCHS", "nonsense")
    assert settled(tmp_path, {}).settled.settings.batch_size == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch-size": "many"}, "--batch-size is 'many'; it needs a whole number"),
        ({"lease_s": 0}, "--lease-s is '0'; it needs a number from 0.2"),
        ({"engine": "spark"}, "--engine is 'spark'; it needs one of auto, tf_data, grpc, local"),
        ({"engine": "local"}, "--engine is local, but"),
        (
            {"batch_sise": 3},
            "options: --batch-sise is no option of the run and goes to the job; did you mean --batch-size?",
        ),
        ({"ranks-per-host": 2}, "options: ranks-per-host is not for this place; write it as trainer.ranks"),
        ({"data_group": "a"}, "write it as data.group"),
        ({"trainer_group": "a"}, "write it as trainer.group"),
        ({"run-dir": "/x"}, "a container leaves its run in /opt/ml/output/data/hetero"),
        ({"model-dir": "/x"}, "a container leaves its model in /opt/ml/model"),
        ({"job": "a.py:job"}, "the key job says it"),
        ({"channel": {"a": "/b"}}, "the key channels has them"),
        ({"token": "abc"}, "set HETERO_TOKEN where compose is started"),
        ({"sagemaker_region": "x"}, "is a name of SageMaker's toolkit"),
    ],
)
def test_a_wrong_option_is_said(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    (found,) = problems(tmp_path, options)
    assert found.startswith(f"{tmp_path / 'mine.yaml'}: ")
    assert says in found
    assert "abc" not in found


def test_a_name_that_looks_misspelt_is_the_jobs_if_it_declares_it(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "options": {"batch_sise": 3}})
    job = tmp_path / "src" / "mine.py"
    job.write_text(job.read_text().replace("depth=3", "batch_sise=1"))
    assert container_cluster(read_cluster_file(path)).settled.settings.params["batch_sise"] == 3


def test_an_engine_that_this_cluster_cannot_have_is_refused(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, {"engine": "grpc"}, data=None)
    assert "has no data hosts" in found
    (found,) = problems(tmp_path, {"deterministic": True}, engine="tf_data")
    assert "--deterministic is set, but under tf_data" in found


def test_a_job_that_is_not_there_is_said_beside_the_rest(tmp_path: Path) -> None:
    found = problems(tmp_path, {"epochs": 0, "token": "x"}, job="other.py:job")
    assert len(found) == 3
    assert any("there is no file" in problem for problem in found)


def test_a_job_in_a_module_is_looked_for_in_the_source_folder(tmp_path: Path) -> None:
    before = list(sys.path)
    assert settled(tmp_path, {}, job="mine:job").settled.settings.params["depth"] == 3
    assert "there is no Python module 'theirs'" in problems(tmp_path, {}, job="theirs:job")[0]
    assert sys.path == before


def test_without_a_checkout_the_source_folder_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose_options.hetero, "__file__", str(tmp_path / "site-packages" / "hetero" / "__init__.py"))
    (found,) = problems(tmp_path, {}, job="examples/digits/job.py:job", source=None)
    assert "the key source is missing" in found
