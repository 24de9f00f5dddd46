"""The consumer's side of the `tf_data` engine: registers an epoch's dataset and reads it from the data hosts.

With `tf_reader` (how elements are taken), `tf_server` (dispatcher and worker processes), `tf_retire` (ends what a lost
worker left open) and `tf_graph` (what the engine cannot run) this is the only place that knows tf.data service.
TensorFlow is imported when it is first used.

Memory of a rank: an element is one batch as `inputs` made it. The client holds at most `max_outstanding_requests` of
them (received or on their way), the worker one for each open epoch beside the dataset's own buffers.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hetero.data.tf_graph import check_dataset
from hetero.data.tf_reader import Ended, cancellation_manager, raise_ended, reader, tensorflow
from hetero.data.tf_retire import Dispatcher
from hetero.data.tf_server import serve_dispatcher, serve_worker
from hetero.errors import DataServiceLost, EngineError, HeteroError, InputError
from hetero.inputs import s3

__all__ = [
    "Dispatcher",
    "TfDataSource",
    "check_dataset",
    "open_epoch",
    "register_epoch",
    "serve_dispatcher",
    "serve_worker",
]

_OPEN_RETRY_S = 2.0
_OPEN_TRIES = 4
_STUCK_LATER_S = 2.0
"""How long nothing must have arrived once elements did: what workers tell of their open tasks is known by then. With a
host that vanished without a word every further epoch waits so long at its end."""
_T = TypeVar("_T")
_REFRESH_MS = 100
"""How often a client asks for new tasks and for the end of the epoch; TensorFlow's own value, 1 s, is felt at each
epoch's border."""


def register_epoch(dataset: Any, dispatcher: str, *, dataset_id: str | None = None, timeout_s: float = 60.0) -> str:
    """Ship a dataset to the dispatcher; rank 0 does this once an epoch and tells the other ranks the id.

    Args:
        dataset: The `tf.data.Dataset` of this epoch, its seeds included.
        dispatcher: "host:port".
        dataset_id: Name it so; a second registration under the same name changes nothing. Default: the dispatcher's.
        timeout_s: How long a dispatcher that is away (being replaced) is waited for.

    Returns:
        The id for `open_epoch`.

    Raises:
        DataServiceLost: No dispatcher answered in time.
        EngineError: The graph cannot be shipped.
    """
    service = tensorflow().data.experimental.service

    def register() -> str:
        with _translated("register the dataset with the tf.data dispatcher"):
            answer = service.register_dataset(f"grpc://{dispatcher}", dataset, compression=None, dataset_id=dataset_id)
            value = answer.numpy()
            return value.decode() if isinstance(value, bytes) else str(value)

    return _within(timeout_s, register, dispatcher)


def open_epoch(
    dispatcher: str,
    dataset_id: str,
    element_spec: Any = None,
    *,
    job_name: str,
    max_outstanding_requests: int = 8,
    service_idle: Callable[[], bool] | None = None,
    service_lost: Callable[[], bool] | None = None,
    stuck_after_s: float = 5.0,
    timeout_s: float = 60.0,
) -> TfDataSource:
    """Join an epoch that rank 0 registered; every split goes to exactly one of the ranks that use the same `job_name`.

    Args:
        dispatcher: "host:port".
        dataset_id: What `register_epoch` returned.
        element_spec: The dataset's `element_spec`; None: asked of the dispatcher.
        job_name: Unique for run and epoch: under a used name the epoch is over at once.
        max_outstanding_requests: Bound on the elements that this rank holds or has asked for. Fewer than the number
            of workers leaves some of them idle.
        service_idle: Tells whether a worker is gone for good, or this host's clock was set back, and no living worker
            has an open task.
        service_lost: Tells whether a worker is gone for good, or the clock was set back: then the epoch's end on
            another rank is its end here.
        stuck_after_s: How long nothing must have arrived, besides, before the source counts as stuck; 2 s suffice once
            elements came and the epoch has been open for that long.
        timeout_s: How long a dispatcher that is away is waited for when it is asked for the `element_spec`.

    Raises:
        DataServiceLost: No dispatcher answered in time.
    """
    tf = tensorflow()
    service = tf.data.experimental.service

    def from_id() -> Any:
        with _translated("open the epoch"):
            common: dict[str, Any] = {
                "processing_mode": service.ShardingPolicy.DYNAMIC,
                "service": f"grpc://{dispatcher}",
                "dataset_id": tf.constant(dataset_id),
                "element_spec": element_spec,
                "job_name": job_name,
                "max_outstanding_requests": max_outstanding_requests,
            }
            try:  # the same function with one more option, which the public one keeps to itself
                ops = importlib.import_module("tensorflow.python.data.experimental.ops.data_service_ops")
                distribute = ops._from_dataset_id  # noqa: SLF001
                dataset = distribute(**common, task_refresh_interval_hint_ms=_REFRESH_MS, target_workers="ANY")
            except (ImportError, AttributeError, TypeError):
                dataset = service.from_dataset_id(**common)
            return dataset

    if element_spec is None:
        element_spec = _within(timeout_s, from_id, dispatcher).element_spec
    return TfDataSource(from_id, service_idle=service_idle, service_lost=service_lost, stuck_after_s=stuck_after_s)


class TfDataSource:
    """One rank's share of one epoch, as nested read-only numpy arrays on TensorFlow's own buffers.

    One thread iterates; `is_stuck` and `close` may be called from others.

    Args:
        make_dataset: Makes a dataset that reads from the service. Each dataset may be iterated once: for TensorFlow a
            second time is a second pass over the data under the same job name.
        service_idle, service_lost: See `open_epoch`.
        stuck_after_s: See `open_epoch`.
    """

    def __init__(
        self,
        make_dataset: Callable[[], Any],
        *,
        service_idle: Callable[[], bool] | None = None,
        service_lost: Callable[[], bool] | None = None,
        stuck_after_s: float = 5.0,
    ) -> None:
        self._make_dataset = make_dataset
        self._service_idle = service_idle or (lambda: False)
        self._service_lost = service_lost or (lambda: False)
        self._stuck_after_s = stuck_after_s
        self._waiting_since: float | None = None
        self._opened_s = time.monotonic()
        self._taken = 0
        self._closed = threading.Event()
        self._cancellation = cancellation_manager()
        self._joined: Callable[[], Any] | None = None

    def join(self) -> None:
        """Open the epoch now rather than when it is first read, so that the workers begin to prepare it.

        Raises:
            DataServiceLost: The dispatcher does not know the epoch any more.
        """
        with _translated("open the epoch"):
            self._joined = self._open()
        self._opened_s = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        """Yield elements until the epoch ends or `close` is called.

        Raises:
            InputError: The job's pipeline failed on a data host; its message says how.
            EngineError: A data host cannot run an op of the graph.
            DataServiceLost: The dispatcher does not know the epoch any more.
        """
        taking: list[Callable[[], Any]] = []
        try:
            yield from self._elements(taking)
        finally:  # an iterator waits for its threads to end, up to 10 s for one that has lost its worker: not here
            threading.Thread(target=taking.clear, name="tf-data-release", daemon=True).start()

    def _elements(self, taking: list[Callable[[], Any]]) -> Iterator[Any]:
        if self._joined is None:
            self.join()
        joined, self._joined = self._joined, None
        if joined is not None:
            taking.append(joined)
        while not self._closed.is_set():
            self._waiting_since = time.monotonic()
            try:
                with _translated("read from the data hosts"):
                    element = taking[0]()
            except Ended:
                return
            except HeteroError:
                if self._closed.is_set():
                    return
                raise
            finally:
                self._waiting_since = None
            self._taken += 1
            yield element

    def _open(self) -> Callable[[], Any]:
        """Join the epoch; asks again, as another consumer would, if there is no answer.

        The dispatcher answers who opens an epoch only after it has told every worker it knows, and one whose host
        vanished without a word never answers. By then the epoch exists, and whoever asks next is answered at once.
        """
        answers: queue.Queue[Callable[[], Any] | BaseException] = queue.Queue()

        def attempt() -> None:
            try:
                answers.put(reader(self._make_dataset(), self._cancellation))
            except BaseException as error:
                answers.put(error)

        tries = 0
        while not self._closed.is_set():
            if tries < _OPEN_TRIES:
                threading.Thread(target=attempt, name="tf-data-open", daemon=True).start()
                tries += 1
            try:
                answer = answers.get(timeout=_OPEN_RETRY_S)
            except queue.Empty:
                continue
            if not isinstance(answer, BaseException):
                return answer
            if not self._closed.is_set():
                raise answer
        return raise_ended

    def is_stuck(self, *, ended_elsewhere: bool = False) -> bool:
        """Tell whether nothing more can come although the epoch has not ended: a host that froze says nothing."""
        since, now_s = self._waiting_since, time.monotonic()
        begun = self._taken > 0 and now_s - self._opened_s >= self._stuck_after_s
        after_s = min(_STUCK_LATER_S, self._stuck_after_s) if begun else self._stuck_after_s
        if since is None or now_s - since < after_s:
            return False
        return self._service_idle() or (ended_elsewhere and self._service_lost())

    def close(self) -> None:
        """Leave the epoch; a thread that waits in the iterator is woken and its iteration ends. May be repeated."""
        if not self._closed.is_set():
            self._closed.set()
            if self._cancellation is not None:
                self._cancellation.start_cancel()


def _within(timeout_s: float, function: Callable[[], _T], dispatcher: str) -> _T:
    """Run a call that TensorFlow would retry for ever; after `timeout_s` its thread is left behind."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tf-data-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise DataServiceLost(
            f"The tf.data dispatcher at {dispatcher} gave no answer for {timeout_s:g} s. "
            "See the dispatcher's log on the first data host."
        )
    return results[0]


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn TensorFlow's errors into ours, most specific first."""
    errors = tensorflow().errors
    try:
        yield
    except errors.OpError as error:
        text = _first_line(error.message)
        if "Op type not registered" in text:
            raise EngineError(
                f"A data host cannot {doing}: {text}. Install the package that has this op on the data hosts "
                "(only tensorflow-io's ops are loaded there), or use --engine grpc."
            ) from error
        if hint := s3.hint(error.message):
            raise EngineError(f"A data host could not {doing}: {text}. {hint}") from error
        if isinstance(error, errors.CancelledError):
            raise DataServiceLost(f"Could not {doing}: the call was cancelled ({text}).") from error
        if isinstance(error, errors.UnavailableError | errors.DeadlineExceededError):
            raise DataServiceLost(
                f"Could not {doing}: {text}. See the logs of dispatcher and workers on the data hosts."
            ) from error
        if isinstance(error, errors.NotFoundError) and any(
            name in text.lower() for name in ("iteration client id", "dataset id")
        ):
            raise DataServiceLost(
                f"Could not {doing}: the dispatcher does not know this epoch ({text}); its work directory was lost."
            ) from error
        if isinstance(error, errors.FailedPreconditionError | errors.UnimplementedError):
            raise EngineError(
                f"Could not {doing}: {text}. Keep state (tables, variables) out of the dataset, or use --engine grpc."
            ) from error
        raise InputError(f"The job's input failed ({type(error).__name__}): {text}") from error


def _first_line(message: str) -> str:
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "no message")[:500]
