"""A stop under SageMaker's own toolkit, which passes no signal on: its launcher notices that it is an orphan."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from local_job import wait_until
from sagemaker_cluster import SageMakerCluster

pytestmark = pytest.mark.slow

GRACE_S = 5.0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_train_is_a_stop_with_a_checkpoint(tmp_path: Path, signum: signal.Signals) -> None:
    settings = {"engine": "grpc", "lease-s": 5, "grace-s": GRACE_S}
    with SageMakerCluster(tmp_path, 1, 2, "stops.py", settings, tensorflow=False) as cluster:
        cluster.start()
        cluster.wait_for_steps(5)
        chief, other = cluster.trainer_hosts
        cluster.signal(chief, "train", signum)
        wait_until("the end of all processes", lambda: not cluster.processes(chief), GRACE_S + 5)
        ends = cluster.wait(GRACE_S + 5)

        assert ends[chief].code == -signum, cluster.logs()
        why = "stopped by SIGTERM: the process that started this launcher has ended"
        said = f"{why}; a checkpoint was written at epoch 0"
        assert said in cluster.failure(chief)["message"]
        assert said in (cluster.folder(chief) / "output" / "failure").read_text()
        assert cluster.summary()["outcome"] == "stopped"
        first, second = json.loads((cluster.folder(chief) / "checkpoints" / "weights-0.json").read_text())
        assert first == second == len(cluster.seen(0))
        assert not ends[other].success
        assert "stopped by SIGTERM" in (ends[other].failure or "")
        (data,) = cluster.data_hosts
        assert (ends[data].code, ends[data].success) == (0, True), cluster.logs()


def test_a_launcher_that_is_told_to_stop_leaves_its_checkpoint_where_sagemaker_takes_it(tmp_path: Path) -> None:
    settings = {"engine": "grpc", "lease-s": 5, "grace-s": GRACE_S}
    with SageMakerCluster(tmp_path, 1, 2, "stops.py", settings, tensorflow=False) as cluster:
        cluster.start()
        cluster.wait_for_steps(5)
        chief, other = cluster.trainer_hosts
        cluster.signal(other, "launcher", signal.SIGTERM)
        ends = cluster.wait(GRACE_S + 10)
        for host in (chief, other):
            text = ends[host].failure or ""
            assert "stopped by SIGTERM" in text
            assert len(text) <= 1024
        assert "a checkpoint was written at epoch 0, step" in (ends[chief].failure or "")
        first, second = json.loads((cluster.folder(chief) / "checkpoints" / "weights-0.json").read_text())
        assert first == second
        assert not (cluster.folder(other) / "checkpoints").exists() or not list(
            (cluster.folder(other) / "checkpoints").iterdir()
        )
