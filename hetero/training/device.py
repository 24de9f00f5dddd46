"""A stand-in for an accelerator (`--device-step-ms`): its step takes a given time and no CPU.

For measuring the data path where there is no GPU. The rank's loop meets it as it meets a GPU: a batch is handed over,
the loop does its own work, and where it asks for the next batch it waits for the device's step:

    batch 0   own code    asks               batch 1   own code    asks
       |---------------->|====== step ======|~~~~~~~~~|-----------|====== step ======|
                                            '------- idle --------'

What it did not do is counted by the clock: a step ends when its time is over, so a loop that wakes up late, waits for
input or has work of its own keeps the device idle. What was before the end of the run's first step is left out, as in
all figures (`hetero.training.meter`). No thread is started and nothing spins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

BatchT = TypeVar("BatchT")


class SimulatedDevice:
    """One rank's stand-in.

    Args:
        step_s: Seconds that a step takes, greater than 0.
        clock: Monotonic seconds.
        sleep: Called with seconds; returns when they are over, or earlier if the rank is to end.
    """

    def __init__(
        self,
        step_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.step_s = step_s
        self._clock, self._sleep = clock, sleep
        self._ends_s: float | None = None  # of the last step that was begun
        self._steps = 0
        self._idle_s = 0.0

    def drive(self, batches: Iterator[BatchT], log: Callable[..., None]) -> Iterator[BatchT]:
        """Hand batches on, and run a step on each when the next one is asked for.

        The step on a batch with which the loop leaves is only begun: the loop may have left because it failed, which
        must not wait. `finish` waits for it.

        Args:
            batches: What the loop is to get.
            log: Told `device_idle_ms` of each step but the first: how long the device was idle before it.

        Yields:
            Each batch unchanged.
        """
        for batch in batches:
            try:
                yield batch
            except GeneratorExit:
                self._begin(log)
                raise
            self._begin(log)
            self.finish()

    def finish(self) -> float:
        """Wait until no step is under way; return how many seconds that took."""
        asked_s = self._clock()
        if self._ends_s is None or self._ends_s <= asked_s:
            return 0.0
        self._sleep(self._ends_s - asked_s)
        return self._clock() - asked_s

    @property
    def busy_s(self) -> float:
        """Seconds of all steps but the first."""
        return self.step_s * max(0, self._steps - 1)

    @property
    def idle_s(self) -> float:
        """Seconds between the steps."""
        return self._idle_s

    def describe(self) -> str:
        """Return what a line of figures ends with."""
        part = stall(self.busy_s, self.idle_s)
        so_far = "" if part is None else f" simulated_stall={part:.4f}"
        return f"simulated_device_ms={1000 * self.step_s:g}{so_far}"

    def _begin(self, log: Callable[..., None]) -> None:
        """Begin a step now, or when the one under way is over."""
        now = self._clock()
        if self._ends_s is not None:
            idle_s = max(0.0, now - self._ends_s)
            self._idle_s += idle_s
            log(device_idle_ms=round(1000 * idle_s, 3))
        self._ends_s = max(now, self._ends_s or now) + self.step_s
        self._steps += 1


def stall(busy_s: float, idle_s: float) -> float | None:
    """Return the part of the time that a device was idle; None if there is no time to speak of."""
    return idle_s / (idle_s + busy_s) if idle_s + busy_s > 0 else None
