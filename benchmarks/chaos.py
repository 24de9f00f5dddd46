"""Random faults: one to three at random moments of a job, schedule after schedule, and a judge of each end.

    sudo .venv/bin/python benchmarks/chaos.py --schedules 200 --jobs 3

Each schedule is a job of its own, with two trainer hosts and two data hosts, each a set of Linux namespaces in which
SageMaker's own `train` runs `launcher.py`. What can happen: processes killed, told to end, launchers killed or told to
end, links cut for good or for 2 s, power cuts, ranks that raise or run out of memory, full disks, clocks set an hour
forward or back (`tests/e2e/ends/kinds.py`). Everything about a schedule follows from its seed, which is printed:
`--seed 17 --schedules 1` plays the schedule of seed 17 again.

A schedule is wrong where

    hang    a host still runs minutes later
    left    a process is left on a host after `train` has ended there
    code    a launcher ends with a code that none of the faults that happened brings
    cause   output/failure says something that none of them explains, or is missing
    rows    a row is seen twice in an epoch; or never, in a job that succeeded (under tf_data only if no worker was hit)
    late    the job ends, or trains again, later than the lease and 10 s after the last fault

Needs root, `ip`, `nsenter`, `unshare`, `setpriv`, a C compiler (for a wall clock that can be set) and the memory
controller of control groups. Exit status 1 if anything was wrong. On two cores a schedule takes about half a minute,
most of it spent waiting: three at once are a good number.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
MISTAKES = ("hang", "left", "code", "cause", "rows", "late")


def play(seed: int, engine: str, base: Path) -> Any:
    """Run one schedule; its scratch folder is gone afterwards. Returns an `ends.verdicts.Verdict`."""
    schedules = importlib.import_module("ends.schedules")
    folder = base / str(seed)
    try:
        return schedules.run_schedule(seed, folder, engine)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def line_of(verdict: Any) -> str:
    """Return one schedule as a line."""
    codes = " ".join(f"{part} {'-' if code is None else code}" for part, code in verdict.codes.items())
    end = f"again after {verdict.again_s} s" if verdict.again_s is not None else f"out after {verdict.out_s} s"
    state = "WRONG" if verdict.wrong else "right"
    return f"seed {verdict.seed}: {state}; {'; '.join(verdict.faults)}; {codes}; {end}; {verdict.seconds} s in all"


def details_of(verdict: Any) -> str:
    """Return what is wrong with a schedule, and what its hosts said."""
    wrong = "\n".join(f"  {kind}: {text}" for kind, texts in verdict.wrong.items() for text in texts)
    causes = "\n".join(f"  {part} says: {text[:300]}" for part, text in verdict.causes.items())
    return f"{wrong}\n{causes}\n{verdict.logs}"


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    parser.add_argument("--engine", choices=("grpc", "tf_data"), default="grpc")
    parser.add_argument("--jobs", type=int, default=3, help="schedules at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.schedules < 1 or options.jobs < 1:
        parser.error("--schedules and --jobs need 1 or more")
    seeds = range(options.seed, options.seed + options.schedules)
    started_s = time.monotonic()
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="hetero-chaos-") as base, ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda seed: play(seed, options.engine, Path(base)), seeds):
            verdicts.append(verdict)
            print(line_of(verdict), flush=True)
            if verdict.wrong:
                print(details_of(verdict), flush=True)
    mistakes = Counter(kind for verdict in verdicts for kind in verdict.wrong)
    seconds = [verdict.seconds for verdict in verdicts]
    again = [verdict.again_s for verdict in verdicts if verdict.again_s is not None]
    out = [verdict.out_s for verdict in verdicts if verdict.again_s is None and verdict.out_s is not None]
    print(
        f"{len(verdicts)} schedules, seeds {seeds[0]} to {seeds[-1]}, {options.engine}: "
        + ", ".join(f"{kind} {mistakes[kind]}" for kind in MISTAKES)
        + f". {len(again)} went on, again within {max(again, default=0)} s; {len(out)} ended, within "
        f"{max(out, default=0)} s of the last fault. {statistics.mean(seconds):.1f} s a schedule, "
        f"{time.monotonic() - started_s:.0f} s in all."
    )
    if options.json is not None:
        result = {"benchmark": "chaos", "engine": options.engine, "mistakes": dict(mistakes)}
        result["schedules"] = [asdict(verdict) for verdict in verdicts]
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
