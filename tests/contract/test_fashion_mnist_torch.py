"""The PyTorch example: its splits, its blur, and training on the digits with one rank and with two."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.job import InputContext, TrainContext
from hetero.structure import as_arrays
from hetero.training.torch_peers import free_port

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "fashion_mnist_torch" / "job.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("fashion_mnist_torch_job", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeFeed:
    """Runs `inputs` here, every `size`-th batch for this rank."""

    def __init__(self, job: Any, rank: int, size: int) -> None:
        self._job, self._rank, self._size = job, rank, size
        self.logged: list[dict[str, float]] = []

    def batches(self, epoch: int) -> Iterator[Any]:
        splits = tuple(self._job.list_splits(InputContext()))
        made = list(self._job.inputs_function(InputContext(splits=splits, epoch=epoch)))
        whole = len(made) // self._size * self._size
        for batch in made[self._rank : whole : self._size]:
            yield SimpleNamespace(data=as_arrays(batch), mask=None, rows=64)

    def log(self, values: Any) -> None:
        self.logged.append(dict(values))


def train(example: Any, folder: Path, rank: int, size: int, epochs: int) -> FakeFeed:
    feed = FakeFeed(example.job, rank, size)
    example.job.train_function(
        TrainContext(
            feed=feed,
            rank=rank,
            size=size,
            number_of_epochs=epochs,
            params={"lr": 1.0, "gamma": 0.7},
            model_dir=folder,
        )
    )
    return feed


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    threads = torch.get_num_threads()
    yield load_example()
    torch.set_num_threads(threads)


def test_the_splits_cover_every_row_once(example: Any) -> None:
    splits = example.job.list_splits(InputContext(batch_size=10))
    rows = [row for start, stop in splits for row in range(start, stop)]
    assert rows == list(range(1437))
    assert all((stop - start) % 10 == 0 for start, stop in splits[:-1])


def test_a_split_that_is_made_again_is_the_same_and_another_epoch_is_not(example: Any) -> None:
    def made(epoch: int) -> str:
        digest = hashlib.sha256()
        for images, labels in example.job.inputs_function(InputContext(splits=([100, 350],), epoch=epoch)):
            digest.update(images.numpy().tobytes() + labels.tobytes())
        return digest.hexdigest()

    assert made(0) == made(0)
    assert made(0) != made(1)


def test_batches_hold_each_row_of_the_split_once(example: Any) -> None:
    batches = list(example.job.inputs_function(InputContext(splits=([0, 100],), batch_size=64)))
    assert [tuple(images.shape) for images, _ in batches] == [(64, 1, 28, 28), (36, 1, 28, 28)]
    labels = np.sort(np.concatenate([labels for _, labels in batches]))
    np.testing.assert_array_equal(labels, np.sort(example.rows(None, "train")[1][:100]))


def test_the_blur_spreads_a_point_and_keeps_its_light(example: Any) -> None:
    point = np.zeros((2, 28, 28), np.uint8)
    point[:, 14, 14] = 255
    sharp, soft = example.prepared(point, np.array([0.1, 2.0], np.float32)) * example.STD + example.MEAN
    assert sharp[0, 14, 14] == pytest.approx(1.0, abs=1e-5)
    assert 0.02 < soft[0, 14, 14] < 0.06
    assert soft[0, 14, 12] == soft[0, 12, 14] == pytest.approx(float(soft[0, 14, 14]) * np.exp(-0.5), rel=1e-3)
    assert sharp.sum() == pytest.approx(1.0, abs=1e-4)
    assert soft.sum() == pytest.approx(1.0, abs=1e-4)


def test_a_channel_with_idx_files_is_read(example: Any, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (70, 28, 28)).astype(np.uint8)
    header = struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 70) + bytes(range(70))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    context = InputContext(channels={"training": str(tmp_path)}, batch_size=64)
    assert example.job.list_splits(context) == [[0, 70]]
    np.testing.assert_array_equal(example.rows(str(tmp_path), "train")[0], images)


@pytest.mark.slow
def test_one_rank_learns_the_digits_and_keeps_the_model(example: Any, tmp_path: Path) -> None:
    feed = train(example, tmp_path / "model", rank=0, size=1, epochs=3)
    assert [set(logged) for logged in feed.logged] == [{"loss", "accuracy"}] * 3
    assert feed.logged[-1]["accuracy"] > 0.9, feed.logged
    model = example.Network()
    model.load_state_dict(torch.load(tmp_path / "model" / "model.pt", weights_only=True))
    images, labels = example.rows(None, "t10k")
    assert example.accuracy(model, images, labels, torch.device("cpu")) == feed.logged[-1]["accuracy"]


@pytest.mark.slow
def test_two_ranks_train_one_model(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    processes = []
    for rank in range(2):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2, "PYTHONPATH": ROOT}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(tmp_path), str(rank)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
            )
        )
    try:
        said = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert len(said[0]["logged"]) == 2
    assert said[1]["logged"] == [], "only rank 0 tests"
    assert said[0]["logged"][-1]["accuracy"] > 0.5, said
    assert said[0]["weights"] == said[1]["weights"], "gradients are averaged"


if __name__ == "__main__":
    RANK = int(sys.argv[2])
    EXAMPLE = load_example()
    MADE: list[Any] = []

    class Network(EXAMPLE.Network):  # type: ignore[name-defined]
        """Remembers itself, to look at its weights after the training."""

        def __init__(self) -> None:
            super().__init__()
            MADE.append(self)

    EXAMPLE.Network = Network
    FEED = train(EXAMPLE, Path(sys.argv[1]) / str(RANK), RANK, size=2, epochs=2)
    WEIGHTS = hashlib.sha256(b"".join(value.numpy().tobytes() for value in MADE[0].state_dict().values())).hexdigest()
    print(json.dumps({"logged": FEED.logged, "weights": WEIGHTS}))
