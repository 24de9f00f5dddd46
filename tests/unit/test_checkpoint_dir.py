"""Where checkpoints go, and what a job says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.clusters import checkpoint_dir, ends_with_parent
from hetero.clusters.local import LocalCluster
from hetero.errors import InputError, SettingsError
from hetero.job import TrainContext
from hetero.launcher import prepare
from hetero.settings import Settings, resolve

JOB = "import hetero\njob = hetero.Job('digits')\n"


class NoFeed:
    """A TrainContext of which only the folder is asked for."""

    def batches(self, epoch: int) -> Any:
        raise AssertionError(epoch)

    def log(self, values: Any) -> None:
        raise AssertionError(values)


@pytest.fixture
def sagemaker(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    hosts = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    return {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}


def test_on_sagemaker_it_is_the_folder_that_is_copied_to_s3_and_elsewhere_one_in_the_run_folder(
    tmp_path: Path, sagemaker: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    silent, given = Settings(job="j"), Settings(job="j", checkpoint_dir="kept")
    assert checkpoint_dir(silent, sagemaker, Path("run")) == f"{tmp_path}/ml/checkpoints"
    assert checkpoint_dir(silent, {}, Path("run")) == f"{tmp_path}/run/checkpoints"
    for environ in (sagemaker, {}):
        assert checkpoint_dir(given, environ, Path("run")) == f"{tmp_path}/kept"
    assert (ends_with_parent(sagemaker), ends_with_parent({})) == (True, False)


def test_an_address_is_refused_with_what_to_do_instead(sagemaker: dict[str, str]) -> None:
    settings = resolve(["--job=j", "--checkpoint_dir", "s3://bucket/kept"], {})
    with pytest.raises(
        SettingsError, match=r"'s3://bucket/kept'; it needs a folder.*checkpoint_s3_uri.*ml/checkpoints"
    ):
        checkpoint_dir(settings, sagemaker, Path("run"))


def test_the_launcher_settles_it_for_its_children(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    cluster = LocalCluster.create(tmp_path / "cluster.json", data_hosts=0, trainer_hosts=1)
    argv = [f"--job={tmp_path}/job.py:job", f"--run-dir={tmp_path}/run"]
    config = prepare(argv, cluster.environ("trainer-1"), 0.0).config
    assert config.settings.checkpoint_dir == f"{tmp_path}/run/checkpoints"
    assert not (tmp_path / "run").exists()


def test_the_folder_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    context = TrainContext(feed=NoFeed(), checkpoint_folder=folder)
    assert not folder.exists()
    assert context.checkpoint_dir == folder
    assert folder.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Cannot make the checkpoint folder .*file/x.* Give a --checkpoint-dir"):
        _ = TrainContext(feed=NoFeed(), checkpoint_folder=tmp_path / "file" / "x").checkpoint_dir
    with pytest.raises(InputError, match="has no folder for checkpoints"):
        _ = TrainContext(feed=NoFeed()).checkpoint_dir


def test_a_function_to_save_is_handed_on_and_anything_else_refused() -> None:
    registered: list[Any] = []
    context = TrainContext(feed=NoFeed(), register_save=registered.append)
    context.on_stop(print)
    assert registered == [print]
    with pytest.raises(InputError, match="on_stop got 3; it needs a function"):
        context.on_stop(3)  # type: ignore[arg-type]
    TrainContext(feed=NoFeed()).on_stop(print)  # in a test of a job's own nobody stops it
