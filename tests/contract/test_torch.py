"""`BatchStream` is the stream of `ctx.batches` as PyTorch tensors: the same values, types and order, once."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from hetero.errors import DataServiceLost, InputError
from hetero.job import TrainContext

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch.utils.data import DataLoader, default_collate  # noqa: E402

from hetero.torch import BatchStream  # noqa: E402

ROWS = 2


class Labelled(NamedTuple):
    image: Any
    label: Any


class Feed:
    """Gives the batches it was made of, then raises what it was told to."""

    def __init__(self, *batches: Any, error: Exception | None = None) -> None:
        self._batches, self._error = batches, error
        self.given = 0

    def batches(self, _epoch: int) -> Iterator[Any]:
        for data in self._batches:
            self.given += 1
            yield SimpleNamespace(data=data, mask=np.array([True, False]), rows=ROWS)
        if self._error is not None:
            raise self._error

    def log(self, values: Any) -> None:
        raise AssertionError(f"nothing is logged here, but {values}")


def floats(first: int) -> np.ndarray[Any, Any]:
    return np.arange(first, first + ROWS * 3, dtype=np.float32).reshape(ROWS, 3)


def stream(*batches: Any, **options: Any) -> BatchStream:
    return BatchStream(TrainContext(feed=Feed(*batches)), 4, **options)


def test_nests_come_back_as_they_were_over_the_same_memory() -> None:
    array, label = floats(0), np.array([3, 4])
    batch = {"a": [array, (label,)], "b": Labelled(array, None)}
    (given,) = stream(batch)
    assert type(given["b"]) is Labelled
    assert given["b"].label is None
    assert isinstance(given["a"], list)
    assert isinstance(given["a"][1], tuple)
    assert given["a"][0].dtype == torch.float32
    assert given["a"][1][0].tolist() == [3, 4]
    assert given["a"][0].data_ptr() == array.ctypes.data, "no copy"


def test_the_order_is_kept_and_nothing_is_read_ahead() -> None:
    feed = Feed(floats(0), floats(10))
    batches = iter(BatchStream(TrainContext(feed=feed), 0))
    assert feed.given == 0
    assert next(batches)[0, 0] == 0
    assert feed.given == 1
    assert next(batches)[0, 0] == 10


def test_the_mask_comes_with_the_batch() -> None:
    ((batch, mask),) = stream({"x": floats(0)}, with_mask=True)
    assert batch["x"].shape == (ROWS, 3)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [True, False]


def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = floats(0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (given,) = stream(array)
    given += 1
    assert array[0, 0] == 0, "what may not be written is not written through a tensor either"


@pytest.mark.parametrize(
    "array",
    [
        floats(0)[::-1],
        floats(0)[:, ::2],
        floats(0).astype(">f4"),
        np.frombuffer(bytearray(b"x" + floats(0).tobytes()), dtype="<f4", offset=1).reshape(ROWS, 3),
        np.array(1.5),
        np.empty((0, 3), np.int64),
        np.array([True, False]),
        np.array([1, 2], np.uint16),
        np.array([1 + 2j], np.complex64),
        floats(0).astype(np.float16),
    ],
    ids=["reversed", "strided", "big-endian", "unaligned", "0-d", "empty", "bool", "uint16", "complex", "float16"],
)
def test_every_array_that_numpy_can_make_keeps_its_values(array: Any) -> None:
    (given,) = stream(array)
    assert given.shape == array.shape
    np.testing.assert_array_equal(given.numpy(), array)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(ROWS, 3), (), (0, 2)])
def test_types_of_ml_dtypes_become_those_of_torch(name: str, shape: tuple[int, ...]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with TensorFlow: pip install ml_dtypes")
    array = np.full(shape, 1.5, dtype=getattr(ml_dtypes, name))
    (given,) = stream(array)
    assert given.dtype == getattr(torch, name)
    assert given.shape == shape
    assert (given.to(torch.float32) == 1.5).all()


def test_text_stays_what_it_is_also_through_a_data_loader() -> None:
    batch = {"text": np.array(["a", "b"]), "bytes": np.array([b"a\0", None], dtype=object), "x": floats(0)}
    (given,) = DataLoader(stream(batch), batch_size=None)
    assert given["text"].tolist() == ["a", "b"]
    assert given["bytes"].tolist() == [b"a\0", None]
    assert torch.equal(given["x"], torch.from_numpy(batch["x"]))


def test_a_type_that_torch_does_not_have_is_named_with_its_place() -> None:
    with pytest.raises(InputError, match=r"batch\['when'\] has the element type datetime64\[s\].*Cast it"):
        list(stream({"when": np.array([0, 1], "datetime64[s]"), "x": floats(0)}))


def test_a_data_loader_gives_the_batches_as_they_are() -> None:
    loader = DataLoader(stream((floats(0), np.array([1, 2])), (floats(10), np.array([3, 4]))), batch_size=None)
    labels = [label.tolist() for image, label in loader if image.shape == (ROWS, 3)]
    assert labels == [[1, 2], [3, 4]]


def test_a_data_loader_with_workers_is_refused_and_told_what_to_do() -> None:
    loader = DataLoader(stream(floats(0)), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork with threads
        with pytest.raises(InputError, match="Use num_workers=0: the data hosts do the work"):
            next(iter(loader))


def test_a_stream_cannot_be_sent_to_workers_that_are_no_forks() -> None:
    with pytest.raises(InputError, match="Use num_workers=0"):
        pickle.dumps(stream(floats(0)))


def test_a_stream_can_be_read_once() -> None:
    once = stream(floats(0))
    assert len(list(once)) == 1
    with pytest.raises(InputError, match="epoch 4 was read before"):
        iter(once)


def test_errors_of_the_stream_arrive_as_they_are() -> None:
    context = TrainContext(feed=Feed(floats(0), error=DataServiceLost("all gone")))
    given = []
    with pytest.raises(DataServiceLost, match="all gone"):
        given.extend(DataLoader(BatchStream(context, 0), batch_size=None))
    assert given == [] or len(given) == 1


def test_tensors_go_to_the_device_asked_for() -> None:
    ((given, text),) = stream((floats(0), np.array(["a"])), device="meta")
    assert given.device.type == "meta"
    assert text.tolist() == ["a"]


def test_batches_of_a_stream_can_be_collated_like_any_tensor() -> None:
    first, second = stream(floats(0), floats(10))
    assert default_collate([first, second]).shape == (2, ROWS, 3)


def test_hetero_itself_loads_no_torch() -> None:
    code = "import sys, hetero, hetero.job, hetero.data.epoch, hetero.control.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
