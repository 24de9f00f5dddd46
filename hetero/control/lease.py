"""The lease: a thread that gives a sign of life at regular times."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

HELD_UP_S = 5.0
"""More than a beat and the pause before it take, even where nobody answers."""


def heartbeat_interval_s(lease_s: float) -> float:
    """Return how often a lease is renewed: ten times in its length, at least every other second."""
    return min(2.0, lease_s / 10)


class Lease:
    """Renews a lease until `stop`, in a daemon thread of its own.

    Args:
        interval_s: Time between two beats.
        beat: Renews once; any exception means that there was no answer.
        on_unreachable: Called in the thread after each failed beat with the seconds since the last answer. It decides
            when that is too long.
    """

    def __init__(self, interval_s: float, beat: Callable[[], None], on_unreachable: Callable[[float], None]) -> None:
        self._interval_s = interval_s
        self._beat = beat
        self._on_unreachable = on_unreachable
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="hetero-lease", daemon=True)

    def start(self) -> None:
        """Start; the first beat is given at once."""
        self._thread.start()

    def beat_now(self) -> None:
        """Give a beat without waiting for its time."""
        self._wake.set()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread; may be repeated and may be called from it."""
        self._stopped = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        answered_s = looked_s = time.monotonic()
        excused = False
        while not self._stopped:
            started_s = time.monotonic()
            try:
                self._beat()
                answered_s, excused = time.monotonic(), False
            except Exception as error:  # whatever it was: there was no answer, and the next beat must be given
                if self._stopped:
                    return
                logger.debug("no answer to a heartbeat: %s", error)
                if not excused and time.monotonic() - looked_s > HELD_UP_S:
                    # This process, or its machine, stood still: it did not ask. Once, so that it cannot go on for ever.
                    answered_s, excused = time.monotonic(), True
                self._tell(time.monotonic() - answered_s)
            looked_s = time.monotonic()
            self._wake.wait(max(0.0, started_s + self._interval_s - time.monotonic()))
            self._wake.clear()

    def _tell(self, silent_s: float) -> None:
        try:
            self._on_unreachable(silent_s)
        except Exception:  # the owner's mistake must not end the lease
            logger.exception("on_unreachable failed")
