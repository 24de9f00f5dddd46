"""The pictures of headline.py as files of fixed-length records, which both of its pipelines read at next to no cost.

A record: the row's number (int32, little-endian), its label (uint8), 28 x 28 pixels (uint8).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import InputError
from hetero.inputs import idx

ROWS_A_FILE = 500
_SIDE = 28


def write_records(source: Path | None, folder: Path) -> dict[str, Any]:
    """Write the files of a data set.

    Args:
        source: Folder with the idx files of Fashion-MNIST or MNIST; None takes scikit-learn's digits, enlarged.
        folder: Where to write them; it is made.

    Returns:
        `name` of the data set and its number of `rows`.

    Raises:
        InputError: The data cannot be read; the message says what to do.
    """
    if source is None:
        name, pictures, labels = "digits of scikit-learn, enlarged to 28 x 28", *_digits()
    else:
        name = source.resolve().name
        pictures, labels = (_read(source, kind) for kind in ("images-idx3", "labels-idx1"))
    if pictures.shape[1:] != (_SIDE, _SIDE) or len(pictures) != len(labels):
        raise InputError(
            f"The pictures of {name} are {pictures.shape} with {len(labels)} labels; they need to be (rows, 28, 28) "
            "and a label each. Name the folder of Fashion-MNIST or MNIST."
        )
    numbers = np.arange(len(labels), dtype="<i4").view(np.uint8).reshape(-1, 4)
    pixels = pictures.reshape(len(labels), -1).astype(np.uint8)
    records = np.concatenate([numbers, labels.astype(np.uint8)[:, None], pixels], axis=1)
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(records), ROWS_A_FILE):
        records[first : first + ROWS_A_FILE].tofile(folder / f"rows-{first:06}.bin")
    return {"name": name, "rows": len(records)}


def _read(folder: Path, kind: str) -> Any:
    names = [f"train-{kind}-ubyte{end}" for end in ("", ".gz")]
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise InputError(f"{folder} has neither {' nor '.join(names)}. Give --data a folder that has, or leave it out.")
    return idx.read(found)


def _digits() -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"scikit-learn cannot be imported ({error}): pip install scikit-learn") from error
    found = load_digits()
    nearest = np.arange(_SIDE) * 8 // _SIDE
    return (found.images[:, nearest][:, :, nearest] * 255 // 16), found.target
