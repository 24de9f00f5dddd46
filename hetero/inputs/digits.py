"""The 1,797 handwritten digits of scikit-learn as TFRecord shards: real data on any machine, without a network.

E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998; CC BY 4.0.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero.errors import InputError
from hetero.inputs import tfrecord

ROWS = {"train": 1437, "test": 360}
SPEC = {"image": tfrecord.raw("uint8", (8, 8)), "label": tfrecord.scalar("int64"), "row": tfrecord.scalar("int64")}
"""`image`: 0 (paper) to 16 (ink); `label`: 0 to 9; `row`: number of the row in the whole data set, 0 to 1796."""


def files(split: str, *, shards: int = 16, folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the paths of one part's shards, written on first use; any number of processes may call this at once.

    Every fifth row is for testing, so both parts hold every writer and every digit.

    Args:
        split: "train" (1,437 rows) or "test" (360 rows).
        shards: Number of files.
        folder: Where to write; None: a folder of this user's in the system's folder for temporary files.

    Returns:
        Sorted paths.

    Raises:
        ValueError: There is no such part.
        InputError: scikit-learn is not installed.
    """
    if split not in ROWS:
        raise ValueError(f'split is {split!r}; it must be "train" or "test"')
    base = Path(folder) if folder is not None else Path(tempfile.gettempdir()) / f"hetero-{_user()}"
    base.mkdir(parents=True, exist_ok=True)
    if folder is None and hasattr(os, "getuid") and base.stat().st_uid != os.getuid():
        raise InputError(f"{base} belongs to another user; set TMPDIR to a folder of your own")
    paths = tfrecord.write_tfrecords(_rows(split), base / f"digits-{split}-{shards}", shards, prefix="digits")
    return [str(path) for path in paths]


def _rows(split: str) -> Iterator[dict[str, Any]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            f"the digits come with scikit-learn, which cannot be imported ({error}): pip install scikit-learn"
        ) from error
    found = load_digits()
    for row, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        if (row % 5 == 0) == (split == "test"):
            yield {"image": image.astype("uint8"), "label": int(label), "row": row}


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
