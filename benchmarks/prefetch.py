"""How far a rank has to read ahead: what it waits for an input that comes in bursts, by full batches read ahead.

    python benchmarks/prefetch.py [--seconds 4] [--json FILE]

The `InputStream` of one rank, without data hosts. Its source gives tiny batches as a data host does that has enough of
them finished and a CPU quota that stops all its processes: for 30 ms of each 100 ms as many as there is room for, then
none. A step takes its time and no CPU. Under `grpc` 32 batches, in the windows of all feeds, are read ahead beside
those of the stream, as far as `--prefetch-bytes` allows; a stream alone reads 4 ahead. Waiting that no reading ahead
can avoid is that of a source that gives steadily.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hetero.data.epoch import InputStream

PERIOD_S, PART = 0.1, 0.3
STEPS_MS = (0.5, 1.0, 2.0, 5.0, 20.0)
AHEAD = (1, 4, 16, 36, 128, 512)


class Bursts:
    """A source of tiny batches, in bursts or steadily."""

    def __init__(self, *, steady: bool) -> None:
        self._steady, self._closed = steady, False

    def __iter__(self) -> Iterator[Any]:
        began_s, batch = time.monotonic(), {"x": np.zeros((8, 4), np.float32)}
        while not self._closed:
            if self._steady or (time.monotonic() - began_s) % PERIOD_S < PART * PERIOD_S:
                yield batch
            else:
                time.sleep(0.0005)

    @staticmethod
    def is_stuck(*, ended_elsewhere: bool) -> bool:  # noqa: ARG004  as a source is asked
        """Return whether nothing will come any more."""
        return False

    def close(self) -> None:
        """Give no more."""
        self._closed = True


def waiting(step_ms: float, ahead: int, seconds: float, *, steady: bool = False) -> float:
    """Return the part of the time in which a rank waits, after a first second."""
    stream = InputStream(lambda _: Bursts(steady=steady), 8, prefetch_batches=ahead)
    waited_s, began_s = 0.0, time.monotonic()
    asked_s = began_s
    try:
        for _ in stream.batches(0):
            now_s = time.monotonic()
            if now_s - began_s > 1.0:
                waited_s += now_s - asked_s
            if now_s - began_s > 1.0 + seconds:
                return waited_s / seconds
            time.sleep(step_ms / 1000)
            asked_s = time.monotonic()
    finally:
        stream.close()
    raise RuntimeError("the source has no end")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each cell is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    table, found = Table(title="Part of the time that a rank waits"), []
    table.add_column("step", justify="right")
    for ahead in AHEAD:
        table.add_column(f"{ahead} ahead", justify="right")
    table.add_column("steady, 36 ahead", justify="right")
    for step_ms in STEPS_MS:
        parts = {str(ahead): waiting(step_ms, ahead, options.seconds) for ahead in AHEAD}
        steady = waiting(step_ms, 36, options.seconds, steady=True)
        found.append({"step_ms": step_ms, "waiting": parts, "steady": steady})
        table.add_row(f"{step_ms:g} ms", *(f"{part:.1%}" for part in parts.values()), f"{steady:.1%}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"benchmark": "prefetch", "steps": found}, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
