"""Take a worker that will not come back out of its epochs, so that they end.

The dispatcher of tf.data service never gives up on a worker: an epoch is over only when every worker that was ever
given a task of it has finished that task, so a lost host holds all consumers for ever, in this epoch and in each later
one (a new epoch gives a task to every worker known). No setting changes that. But a worker's own messages do: asked
as the lost worker, the dispatcher names the tasks it still expects of it, and told that they are done, it believes it.
The splits that nobody has taken yet go to the workers that live; what is lost is what the dead one had in its hands.

The three messages are spoken directly (gRPC, protobuf fields by number: they are the same in TensorFlow 2.15 to 2.18,
`tensorflow/core/data/service/dispatcher.proto`), without importing TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grpc

from hetero.errors import DataServiceLost

_SERVICE = "/tensorflow.data.DispatcherService/"
_VARINT, _BYTES = 0, 2


class Dispatcher:
    """A connection to the dispatcher, for what only the wire protocol offers; no TensorFlow needed.

    Args:
        address: "host:port".
        timeout_s: How long one call may take.
    """

    def __init__(self, address: str, *, timeout_s: float = 5.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(
            address,
            options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )

    def workers(self) -> tuple[str, ...]:
        """Return the addresses of all workers that ever registered, lost ones included.

        Raises:
            DataServiceLost: The dispatcher did not answer in time.
        """
        found = []
        for number, value in _fields(self._call("GetWorkers", b"")):
            if number == 1 and isinstance(value, bytes):
                found += [text.decode() for inner, text in _fields(value) if inner == 1 and isinstance(text, bytes)]
        return tuple(found)

    def retire(self, worker: str) -> int:
        """Tell the dispatcher that a lost worker's open tasks are done.

        Call it about once a second for as long as the run lasts: each new epoch gives the lost worker a task again.
        Never for a worker that lives or is being replaced at the same address: the rest of its task would be lost.

        Args:
            worker: "host:port" as it was registered; an address that never was is left alone.

        Returns:
            The number of tasks that were ended.

        Raises:
            DataServiceLost: The dispatcher did not answer in time.
        """
        if worker not in self.workers():
            return 0
        name = _field(1, worker.encode())
        expected = [
            task_id
            for number, task in _fields(self._call("WorkerHeartbeat", name))
            if number == 1 and isinstance(task, bytes)
            for inner, task_id in _fields(task)
            if inner == 4 and isinstance(task_id, int)
        ]
        if expected:
            done = b"".join(_field(2, _field(1, task_id) + _field(2, 1)) for task_id in expected)
            self._call("WorkerUpdate", name + done)
        return len(expected)

    def retire_all(self, workers: Iterable[str]) -> int:
        """`retire` each of them; returns the number of tasks that were ended."""
        return sum(self.retire(worker) for worker in workers)

    def close(self) -> None:
        """End the connection; may be repeated."""
        self._channel.close()

    def _call(self, method: str, request: bytes) -> bytes:
        try:
            answer: bytes = self._channel.unary_unary(_SERVICE + method)(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            raise DataServiceLost(
                f"The tf.data dispatcher at {self.address} did not answer {method} in {self._timeout_s:g} s "
                f"({code}). See its log on the first data host."
            ) from error
        return answer


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | bytes) -> bytes:
    """Encode one protobuf field."""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of every top-level field of a protobuf message; fixed-width fields are skipped."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, at = _read_varint(message, at)
            yield tag >> 3, value
        elif wire_type == _BYTES:
            size, at = _read_varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            at += 8 if wire_type == 1 else 4
