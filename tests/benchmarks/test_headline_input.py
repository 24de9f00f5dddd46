"""The input of benchmarks/headline.py: its files, and the pipeline that is plain Python."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from headline_data import ROWS_A_FILE, write_records
from virtual_hosts import REPOSITORY

from hetero.errors import InputError
from hetero.job import InputContext
from hetero.job_file import load_job

ROWS = ROWS_A_FILE + 20


def write_idx(folder: Path, side: int = 28, labels: int = ROWS) -> None:
    """Write random pictures in the form of Fashion-MNIST."""
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (ROWS, side, side), np.uint8)
    head = b"\0\0\x08\x03" + struct.pack(">3I", *pictures.shape)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pictures.tobytes()))
    head = b"\0\0\x08\x01" + struct.pack(">I", labels)
    (folder / "train-labels-idx1-ubyte").write_bytes(head + bytes(number % 10 for number in range(labels)))


def test_records_hold_row_label_and_pixels(tmp_path: Path) -> None:
    write_idx(tmp_path)
    told = write_records(tmp_path, tmp_path / "records")
    files = sorted((tmp_path / "records").iterdir())
    assert told == {"name": tmp_path.name, "rows": ROWS}
    assert [file.stat().st_size // 789 for file in files] == [ROWS_A_FILE, 20]
    records = np.fromfile(files[1], np.uint8).reshape(-1, 789)
    assert records[:, :4].copy().view("<i4").ravel().tolist() == list(range(ROWS_A_FILE, ROWS))
    assert records[:3, 4].tolist() == [0, 1, 2]
    assert np.array_equal(records[0, 5:], np.random.default_rng(0).integers(0, 256, (ROWS, 784), np.uint8)[ROWS_A_FILE])


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has neither train-images-idx3-ubyte nor"):
        write_records(tmp_path, tmp_path / "records")


@pytest.mark.parametrize(("side", "labels"), [(32, ROWS), (28, ROWS - 1)])
def test_pictures_of_another_form_are_refused(tmp_path: Path, side: int, labels: int) -> None:
    write_idx(tmp_path, side, labels)
    with pytest.raises(InputError, match=r"they need to be \(rows, 28, 28\) and a label each"):
        write_records(tmp_path, tmp_path / "records")


def test_a_split_is_prepared_the_same_way_again_and_otherwise_in_the_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_idx(tmp_path)
    write_records(tmp_path, tmp_path / "records")
    job = load_job(f"{REPOSITORY}/benchmarks/jobs/headline_images.py:python")
    given = {"batch_size": 16, "channels": {"training": str(tmp_path / "records")}}
    splits = job.list_splits(InputContext(**given))
    files = len(list((tmp_path / "records").iterdir()))
    assert len(splits) * ROWS >= 1_000_000 * files
    assert splits[1][1] == splits[1 + files][1]
    assert job.inputs_function is not None
    first, again, later = (
        list(job.inputs_function(InputContext(splits=(splits[number],), **given))) for number in (1, 1, 1 + files)
    )
    assert [len(batch["label"]) for batch in first] == [16, 4]
    assert first[0]["picture"].shape == (16, 56, 56)
    assert first[0]["picture"].dtype == np.float32
    assert np.array_equal(first[0]["picture"], again[0]["picture"])
    assert not np.array_equal(first[0]["picture"], later[0]["picture"])
    assert np.array_equal(first[0]["label"], later[0]["label"])
