"""TFRecord files for job files: write shards, read them so that a data service can share them out, parse records.

spec = {"image": tfrecord.raw("uint8", (28, 28)), "label": tfrecord.scalar("int64")}
rows = tfrecord.read(ctx.files).map(lambda record: tfrecord.parse(record, spec))
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import InputError
from hetero.inputs import s3

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Feature:
    """One feature of a record.

    Attributes:
        dtype: Type that `parse` returns, a numpy name such as "uint8", or "string".
        shape: Shape that `parse` returns.
        raw: Whether the record holds the bytes of the array, as against a list of numbers.
    """

    dtype: str
    shape: Shape = ()
    raw: bool = False


def raw(dtype: str, shape: Shape) -> Feature:
    """Describe an array stored as its bytes (C order, little-endian), the compact form for images."""
    return Feature(dtype, shape, raw=True)


def scalar(dtype: str) -> Feature:
    """Describe one number ("int64", "float32" and what is cast from these) or one byte string ("string")."""
    return Feature(dtype)


def numbers(dtype: str, shape: Shape) -> Feature:
    """Describe a fixed number of numbers stored as a list."""
    return Feature(dtype, shape)


def read(files: Sequence[str], *, open_files: int = 2) -> Any:
    """Read records of TFRecord files.

    The dataset starts with the list of files, so that a data service hands the files out to its workers one by one
    (DYNAMIC sharding) and each record is read once.

    Args:
        files: Paths, or addresses such as `s3://bucket/key`.
        open_files: Files read in turn by one worker. TensorFlow reads from S3 in blocks of up to 127 MB, one for each.

    Returns:
        tf.data.Dataset of serialised records (scalar strings).

    Raises:
        InputError: There are no files.
    """
    import tensorflow as tf

    if not files:
        raise InputError("there are no TFRecord files to read; check the channel's folder or the job's splits")
    if any(s3.is_address(path) for path in files):
        s3.register()
    paths = tf.data.Dataset.from_tensor_slices([str(path) for path in files])
    return paths.interleave(tf.data.TFRecordDataset, cycle_length=min(open_files, len(files)), block_length=16)


def parse(record: Any, spec: Mapping[str, Feature]) -> dict[str, Any]:
    """Parse one serialised record, in the graph.

    Args:
        record: Scalar string tensor.
        spec: What it holds.

    Returns:
        Tensor of the stated type and shape by name.
    """
    import tensorflow as tf

    found = tf.io.parse_single_example(record, {name: _fixed_length(feature) for name, feature in spec.items()})
    return {name: _decode(found[name], feature) for name, feature in spec.items()}


def write_tfrecords(
    examples: Iterable[Mapping[str, Any]], folder: str | os.PathLike[str], shards: int, *, prefix: str = "part"
) -> list[Path] | list[str]:
    """Write examples to TFRecord shards, in turn; the folder appears with all of its files or not at all.

    In S3 they appear one by one, each of them whole.

    Args:
        examples: Values by feature name. Bytes, strings and uint8 arrays are stored as bytes; integers, floats and
            other arrays as lists of numbers.
        folder: Folder to create. If it exists already, it is left as it is and its files are returned: many processes
            may write the same data at once. Or an address such as `s3://bucket/prefix`, which exists if all shards do.
        shards: Number of files, at least 1.
        prefix: Files are named `<prefix>-00000-of-00008.tfrecord`.

    Returns:
        Paths of the shards, sorted; addresses, as text, of those in S3.

    Raises:
        ValueError: `shards` is less than 1.
        InputError: A value cannot be stored.
    """
    if shards < 1:
        raise ValueError(f"shards is {shards}; it must be at least 1")
    names = [f"{prefix}-{number:05d}-of-{shards:05d}.tfrecord" for number in range(shards)]
    if s3.is_address(folder):
        return _write_to_s3(examples, str(folder), names)
    target = Path(folder)
    if target.is_dir():
        return _shards_in(target, names)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(examples, [str(aside / name) for name in names])
        aside.chmod(0o755)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, and wrote the same
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _shards_in(target, names)


def _write_to_s3(examples: Iterable[Mapping[str, Any]], address: str, names: Sequence[str]) -> list[str]:
    s3.register()
    import tensorflow as tf

    paths = [f"{address.rstrip('/')}/{name}" for name in names]
    with s3.translated(f"{address} cannot be written", address):
        if not all(tf.io.gfile.exists(path) for path in paths):
            _write(examples, paths)
    return paths


def _write(examples: Iterable[Mapping[str, Any]], paths: Sequence[str]) -> None:
    import tensorflow as tf

    writers = [tf.io.TFRecordWriter(path) for path in paths]
    for number, example in enumerate(examples):
        features = {name: _feature(name, value) for name, value in example.items()}
        message = tf.train.Example(features=tf.train.Features(feature=features))
        writers[number % len(writers)].write(message.SerializeToString())
    for writer in writers:
        writer.close()


def _shards_in(folder: Path, names: Sequence[str]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} exists but {missing[0]} is not in it; remove the folder or name another one")
    return [folder / name for name in names]


def _feature(name: str, value: Any) -> Any:
    import tensorflow as tf

    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    array = np.asarray(value)
    if array.dtype == np.uint8:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[array.tobytes()]))
    if array.dtype.kind in "iub":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=array.reshape(-1).tolist()))
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array.reshape(-1).tolist()))
    raise InputError(
        f"feature {name!r} is a {type(value).__name__} of {array.dtype}; a TFRecord holds bytes, integers or floats"
    )


def _fixed_length(feature: Feature) -> Any:
    import tensorflow as tf

    if feature.raw or feature.dtype == "string":
        return tf.io.FixedLenFeature([] if feature.raw else list(feature.shape), tf.string)
    stored = tf.float32 if np.dtype(feature.dtype).kind == "f" else tf.int64
    return tf.io.FixedLenFeature(list(feature.shape), stored)


def _decode(value: Any, feature: Feature) -> Any:
    import tensorflow as tf

    if feature.raw:
        return tf.reshape(tf.io.decode_raw(value, tf.as_dtype(feature.dtype)), feature.shape)
    return value if feature.dtype == "string" else tf.cast(value, tf.as_dtype(feature.dtype))
