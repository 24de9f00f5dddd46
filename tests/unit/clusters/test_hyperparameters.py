"""Hyperparameters come to the job as they were written, although the toolkit prints them as Python does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero import clusters
from hetero.clusters.hyperparameters import as_written
from hetero.settings import resolve


def command_line(hyperparameters: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return what the toolkit makes of hyperparameters, and the file it makes it from."""
    from sagemaker_training import mapping, params

    encoded = {name: json.dumps(value) for name, value in hyperparameters.items()}
    split = mapping.split_by_criteria(
        hyperparameters, keys=params.SAGEMAKER_HYPERPARAMETERS, prefix=params.SAGEMAKER_PREFIX
    )
    return mapping.to_cmd_args(split.excluded), encoded


@pytest.mark.parametrize(
    "value",
    [
        7,
        -7,
        1e-05,
        True,
        None,
        "",
        "two words",
        'it\'s "quoted" $HOME `id` \\ *',
        "größe 大",
        "a\nb",
        "-x",
        "--epochs 7",
        "--epochs=7",
        ["a", "b c"],
        [1, "two", None, False],
        [["a"], {"b": True}],
        {"a": {"b": [1, 2]}, "c": "x=y,z"},
        {},
        [],
    ],
)
@pytest.mark.parametrize("name", ["some-value", "some_value", "x"])
def test_a_value_arrives_as_it_was_written(name: str, value: object) -> None:
    others = {"job": "jobs/some.py:job", "sagemaker_program": "launcher.py", "epochs": 3, "batch-size": 8}
    argv, file = command_line({**others, name: value})
    settings = resolve(as_written(argv, file), {})
    assert settings.params == {name.replace("-", "_"): value, "epochs": 3}
    assert (settings.job, settings.epochs, settings.batch_size) == ("jobs/some.py:job", 3, 8)


def test_options_of_the_run_take_the_same_values_as_before() -> None:
    written = {
        "job": "a.py:job",
        "lease-s": "5",
        "token": "123",
        "deterministic": True,
        "channel": {"a": "/x", "b": "/y"},
    }
    argv, file = command_line(written)
    settings = resolve(as_written(argv, file), {})
    assert (settings.lease_s, settings.token, settings.deterministic) == (5.0, "123", True)
    assert settings.channels == {"a": "/x", "b": "/y"}


def test_hyperparameters_that_are_not_encoded_are_taken_as_they_are() -> None:
    file = {"job": "a.py:job", "text": "two words", "number": "3", "sagemaker_program": "launcher.py"}
    argv = ["--job", "a.py:job", "--number", "3", "--text", "two words"]
    assert as_written(argv, file) == ["--job=a.py:job", "--number=3", "--text=two words"]


def test_a_command_line_of_somebody_else_stays_as_it_is() -> None:
    argv, file = command_line({"job": "a.py:job", "names": ["a"]})
    for other in ([*argv, "--more", "1"], argv[2:], ["--job=a.py:job"], []):
        assert as_written(other, file) == other


def test_a_launcher_without_arguments_takes_the_hyperparameters_of_its_host(tmp_path: Path) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    file = {"job": '"a.py:job"', "names": '["a", "b"]', "epochs": "3", "sagemaker_region": '"x"'}
    (config / "hyperparameters.json").write_text(json.dumps(file))
    assert clusters.arguments([], environ) == [], "this is no host of a job"
    (config / "resourceconfig.json").write_text("{}")
    assert clusters.arguments([], environ) == ["--epochs=3", "--job=a.py:job", '--names=["a", "b"]']
    assert clusters.arguments(["--epochs=1"], environ) == ["--epochs=1"]
    assert clusters.arguments([], {**environ, "HETERO_CLUSTER": "cluster.json"}) == []
