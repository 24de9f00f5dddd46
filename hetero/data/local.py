"""The `local` engine: the rank itself runs what the job's `inputs` returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hetero.data.engine import Opener
from hetero.errors import InputError


class LocalSource:
    """Raw batches from a `tf.data.Dataset`, an iterable or a generator.

    Args:
        dataset: what `inputs` returned.

    Raises:
        InputError: it is none of these.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, (dict, str, bytes)) or not (
            hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
        ):
            raise InputError(
                f"`inputs` returned a {type(dataset).__qualname__}: it must return a tf.data.Dataset of batches, "
                "or an iterable of batches (a generator function will do)."
            )
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        """Give the batches as they come; TensorFlow's as numpy arrays that share its memory."""
        if hasattr(self._dataset, "as_numpy_iterator"):
            return iter(self._dataset.as_numpy_iterator())
        return iter(self._dataset)

    def close(self) -> None:
        """Run a generator's `finally` blocks."""
        close = getattr(self._dataset, "close", None)
        if close is None or not hasattr(self._dataset, "send"):
            return
        try:
            close()
        except ValueError:
            pass  # it runs just now in the reader's thread, which closes it when it comes back
        except Exception as error:
            print(f"hetero: closing the input raised {error!r}; the input had ended", flush=True)

    def is_stuck(self, *, ended_elsewhere: bool) -> bool:  # noqa: ARG002  part of the contract
        """Tell that it never is: what runs in this process either gives, ends or raises."""
        return False


def local_opener(inputs: Callable[[int], Any]) -> Opener:
    """An engine's `Opener` from a function of the epoch that calls the job's `inputs`."""

    def open_source(epoch: int) -> LocalSource:
        return LocalSource(checked_dataset(inputs(epoch), "local"))

    return open_source


def checked_dataset(dataset: Any, engine: str) -> Any:
    """Return what `inputs` gave; EngineError if it is a tf.data.Dataset that the engine cannot run."""
    if hasattr(dataset, "element_spec"):  # a job without TensorFlow never gets here
        from hetero.data.tf_graph import check_dataset

        check_dataset(dataset, engine)
    return dataset
