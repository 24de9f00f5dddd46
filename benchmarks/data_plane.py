"""How fast batches come from the process that makes them to numpy arrays in the process that trains, and for what CPU.

    python benchmarks/data_plane.py [--rounds 3] [--variants raw naive tf_data grpc] [--json FILE]

Four ways, each from a producing process to arrays in another one on the same machine (data_streams.py has them):

raw      TCP, `sendall` and `recv_into` of a prepared buffer: what the machine gives.
naive    Python gRPC as one writes it first: a message with a bytes field for each batch.
tf_data  the `tf_data` engine: tf.data service without compression, one worker, and a rank's InputStream.
grpc     the `grpc` engine: worker, feed and a rank's InputStream.

All are up for the whole run and read in turn, window by window, so that what else the machine does hits all alike;
what counts is the median over the rounds. A window is a fixed number of batches; the first eighth, while buffers fill,
is not counted. CPU seconds are those of all processes of a variant, user and system, as /proc has them (10 ms each).

Exit status 1 if a requirement does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from virtual_hosts import BenchmarkFailed, clean_environment

FOLDER = Path(__file__).resolve().parent
VARIANTS = ("raw", "naive", "tf_data", "grpc")
_START_S = 90.0


@dataclass(frozen=True)
class Size:
    """Batches of float32 (rows, 28, 28), and how many of them make a window."""

    name: str
    rows: int
    count: int


SIZES = (Size("25.7 MB", 8192, 192), Size("1 MB", 334, 4800), Size("16 KB", 5, 24_000))


@dataclass(frozen=True)
class Ratio:
    """One quotient that matters: `variant` over `reference` (None: `variant` itself), of one quantity at one size.

    Attributes:
        bound: What is required, None where nothing is.
        at_least: Whether the bound is a least or a greatest value.
    """

    name: str
    size: str
    quantity: str
    variant: str
    reference: str | None
    bound: float | None
    at_least: bool = True


RATIOS = (
    Ratio("grpc / naive, GB/s at 25.7 MB", "25.7 MB", "gb_per_s", "grpc", "naive", 2.5),
    Ratio("grpc / naive, CPU-s/GB at 25.7 MB", "25.7 MB", "cpu_s_per_gb", "grpc", "naive", 0.5, at_least=False),
    Ratio("grpc / tf_data, GB/s at 25.7 MB", "25.7 MB", "gb_per_s", "grpc", "tf_data", 1.0),
    Ratio("grpc / tf_data, GB/s at 1 MB", "1 MB", "gb_per_s", "grpc", "tf_data", 1.0),
    Ratio("grpc, batches/s at 16 KB", "16 KB", "batches_per_s", "grpc", None, 2000),
    Ratio("grpc / tf_data, batches/s at 16 KB", "16 KB", "batches_per_s", "grpc", "tf_data", None),
    Ratio("grpc / raw, GB/s at 25.7 MB", "25.7 MB", "gb_per_s", "grpc", "raw", None),
)


@dataclass(frozen=True)
class Window:
    """What one window of one variant came to."""

    variant: str
    size: str
    gb_per_s: float
    cpu_s_per_gb: float
    batches_per_s: float


class Consumer:
    """The consuming process of one variant; it starts and ends the others."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.variant = variant
        folder.mkdir()
        self._errors = folder / "errors.log"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(FOLDER / "data_streams.py"), variant, str(folder)],
                env=clean_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait for its first line."""
        self._answer()

    def measure(self, size: Size) -> Window:
        """Have it read one window."""
        assert self._process.stdin is not None
        asked = {"rows": size.rows, "count": size.count, "skip": size.count // 8}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        gb = found["bytes"] / 1e9
        return Window(
            variant=self.variant,
            size=size.name,
            gb_per_s=gb / found["took_s"],
            cpu_s_per_gb=found["cpu_s"] / gb,
            batches_per_s=found["batches"] / found["took_s"],
        )

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = self._errors.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise BenchmarkFailed(f"{self.variant} ended with exit code {self._process.returncode}\n{said}")
        return json.loads(line)

    def end(self) -> None:
        """End it by the end of its standard input, else by force: its producers die with it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20.0)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def consumers(variants: Sequence[str], folder: Path) -> Iterator[list[Consumer]]:
    """Start all variants at once; end them in any case."""
    started: list[Consumer] = []
    try:
        started.extend(Consumer(variant, folder / variant) for variant in variants)
        for consumer in started:
            consumer.wait_until_ready()
        yield started
    finally:
        for consumer in started:
            consumer.end()


def medians(windows: Sequence[Window]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {variant: {size: {quantity: median over the rounds}}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for variant, size in dict.fromkeys((window.variant, window.size) for window in windows):
        mine = [window for window in windows if (window.variant, window.size) == (variant, size)]
        found.setdefault(variant, {})[size] = {
            quantity: statistics.median(getattr(window, quantity) for window in mine)
            for quantity in ("gb_per_s", "cpu_s_per_gb", "batches_per_s")
        }
    return found


def ratios_of(middle: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return the quotients whose variants were measured, and whether each is as required."""
    found = []
    for ratio in RATIOS:
        if ratio.variant in middle and (ratio.reference is None or ratio.reference in middle):
            value = middle[ratio.variant][ratio.size][ratio.quantity]
            if ratio.reference is not None:
                value /= middle[ratio.reference][ratio.size][ratio.quantity]
            kept = ratio.bound is None or (value >= ratio.bound if ratio.at_least else value <= ratio.bound)
            found.append({**asdict(ratio), "value": value, "kept": kept})
    return found


def table_of(middle: dict[str, dict[str, dict[str, float]]], rounds: int) -> Table:
    """Return the medians as a table."""
    table = Table(title=f"Medians of {rounds} rounds: GB/s, CPU-s/GB (all processes together), batches/s")
    table.add_column("")
    for size in SIZES:
        table.add_column(size.name, justify="right")
    for variant, by_size in middle.items():
        cells = (
            f"{values['gb_per_s']:.2f}  {values['cpu_s_per_gb']:.2f}  {values['batches_per_s']:,.0f}"
            for values in (by_size[size.name] for size in SIZES)
        )
        table.add_row(variant, *cells)
    return table


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it needs 1 or more")
    console = Console()
    windows: list[Window] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hetero-data-plane-") as folder:
        try:
            with consumers(options.variants, Path(folder)) as running:
                for number in range(options.rounds):
                    for size in SIZES:
                        turn = number % len(running)
                        windows += [consumer.measure(size) for consumer in (*running[turn:], *running[:turn])]
                    console.print(f"round {number + 1} of {options.rounds} after {time.monotonic() - began_s:.0f} s")
        except BenchmarkFailed as error:
            console.print(str(error), markup=False, highlight=False)
            return 1
    middle = medians(windows)
    ratios = ratios_of(middle)
    result = {
        "benchmark": "data_plane",
        "rounds": options.rounds,
        "cpus": len(os.sched_getaffinity(0)),
        "sizes": [asdict(size) for size in SIZES],
        "windows": [asdict(window) for window in windows],
        "medians": {name: middle[name] for name in options.variants},
        "ratios": ratios,
        "passed": all(ratio["kept"] for ratio in ratios),
    }
    console.print(table_of({name: middle[name] for name in options.variants}, options.rounds))
    for ratio in ratios:
        verdict = ""
        if ratio["bound"] is not None:
            bound = f"{'at least' if ratio['at_least'] else 'at most'} {ratio['bound']:g}"
            verdict = f"; required: {bound}: {'kept' if ratio['kept'] else 'NOT KEPT'}"
        console.print(f"{ratio['name']}: {ratio['value']:.2f}{verdict}", highlight=False)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
