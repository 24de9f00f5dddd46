"""The output of a child: from its pipe, line by line, to a log file and to the console."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pathlib import Path

LineSink = Callable[[str], None]
"""Takes one line without its newline; called from several threads."""

MAX_LINE_BYTES = 64 * 1024
LAST_LINES = 40
_READ_BYTES = 64 * 1024


class ConsoleSink:
    """Write whole lines to a stream, one at a time, and survive the stream.

    A reader that went away (`launcher.py | head`) silences the console and nothing else; a full disk behind stdout
    loses lines, says so once on stderr, and is tried again with the next line.

    Args:
        stream: Where to write; default: `sys.stdout` as it is when a line comes.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.RLock()  # re-entrant: a signal handler may print while this thread does
        self._silent = False
        self._warned = False

    def __call__(self, line: str) -> None:
        """Write one line."""
        with self._lock:
            stream = self._stream or sys.stdout
            if self._silent or stream is None:
                return
            try:
                self._write(stream, line + "\n")
            except BrokenPipeError:
                self._silent = True
                self._point_to_devnull(stream)
            except ValueError:  # closed
                self._silent = True
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _complain(f"cannot write to the console: {error}; lines are lost here, the log files have them")

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()

    @staticmethod
    def _point_to_devnull(stream: TextIO) -> None:
        # What is left in the stream's buffer would fail again when the interpreter exits, and change its exit code.
        with contextlib.suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)


class OutputReader:
    """Read a child's pipe to its end in a thread of its own.

    Lines longer than 64 KiB are cut into pieces of at most that, bytes that are not UTF-8 become U+FFFD; nothing is
    dropped. Starts one daemon thread, which ends at the pipe's end or after `close`, and then closes the pipe.

    Args:
        name: Name of the child, for the thread and for warnings.
        fd: Read end of the pipe; owned by the reader from here on.
        log_path: File that the lines are appended to, None for none. If it cannot be written: one warning, all else
            goes on.
        prefix: Put before each line on its way to the sink.
        sink: Takes the lines.
    """

    def __init__(self, name: str, fd: int, log_path: Path | None, prefix: str, sink: LineSink) -> None:
        self._name = name
        self._fd = fd
        self._prefix = prefix
        self._sink = sink
        self._log_path = log_path
        self._log_fd = -1
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"output of {name}", daemon=True)
        self._thread.start()

    def last_lines(self) -> tuple[str, ...]:
        """Return the end of the output, at most 40 lines, oldest first."""
        with self._lock:
            return tuple(self._last)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the pipe; False if it did not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop reading though the pipe has not ended."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        self._open_log()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        rest = b""
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if self._fd in ready:
                    chunk = os.read(self._fd, _READ_BYTES)
                    if not chunk:
                        break
                    rest = self._take(rest + chunk)
                if self._wake_fd in ready:
                    break
        finally:
            if rest:
                self._emit([rest])
            with self._lock:
                for fd in (self._fd, self._wake_fd, self._log_fd):
                    if fd >= 0:
                        os.close(fd)
                self._fd = self._wake_fd = self._log_fd = -1

    def _take(self, data: bytes) -> bytes:
        """Hand on all whole lines in `data`; return what follows the last newline, never more than a line may have."""
        *whole, rest = data.split(b"\n")
        lines: list[bytes] = []
        for line in whole:
            last = line
            while len(last) > MAX_LINE_BYTES:
                piece, last = _cut(last)
                lines.append(piece)
            lines.append(last)
        while len(rest) > MAX_LINE_BYTES:
            piece, rest = _cut(rest)
            lines.append(piece)
        if lines:
            self._emit(lines)
        return rest

    def _emit(self, lines: list[bytes]) -> None:
        # Decoding all lines at once is safe: a newline ends even a broken sequence.
        text = b"\n".join(lines).decode("utf-8", "replace")
        self._log(text.encode() + b"\n")
        decoded = [line.rstrip("\r") for line in text.split("\n")]
        with self._lock:
            self._last.extend(decoded[-LAST_LINES:])
        for line in decoded:
            self._to_sink(self._prefix + line)

    def _to_sink(self, line: str) -> None:
        try:
            self._sink(line)
        except Exception as error:  # whatever a sink does, the pipe must be emptied or the child stops
            if "sink" not in self._warned:
                self._warned.add("sink")
                _complain(f"output of {self._name}: the sink failed ({error!r})")

    def _open_log(self) -> None:
        if self._log_path is None:
            return
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log_fd = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._warn_log(error)

    def _log(self, data: bytes) -> None:
        if self._log_fd < 0:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._log_fd, view) :]
        except OSError as error:
            self._warn_log(error)

    def _warn_log(self, error: OSError) -> None:
        if "log" not in self._warned:
            self._warned.add("log")
            self._to_sink(
                f"{self._prefix}cannot write {self._log_path}: {error.strerror or error}; the job goes on, "
                "this file is not complete"
            )


def _cut(line: bytes) -> tuple[bytes, bytes]:
    """Cut off the first piece of a line that is too long, not within a UTF-8 character."""
    end = MAX_LINE_BYTES
    while end > MAX_LINE_BYTES - 3 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end], line[end:]


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)
