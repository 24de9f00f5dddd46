"""The table of ends: each way in which a job can be hit, several times, with codes, times and causes.

    sudo .venv/bin/python benchmarks/ends.py --repeat 5 --jobs 3 --markdown ends.md --json ends.json

Runs the cells of `tests/e2e/ends/cells.py`: two trainer hosts and two data hosts (or one) as Linux namespaces,
SageMaker's own `train` in each, a lease of 5 s, one fault that is proven to have happened. Prints a Markdown table:
exit codes of the launchers (chief and other trainer host; first and second data host), whether `train` reports success
there, seconds from the fault until the last host was out or until training went on for good (least, median, most), and
the cause in `output/failure`. `--cells REGEX` chooses cells by name.

Needs what `benchmarks/chaos.py` needs. Exit status 1 if a host hung, or anything else was not as the table says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
_CAUSE_CHARS = 160


def table_of(outcomes: Mapping[str, Sequence[Any]], lease_s: float) -> str:
    """Return the outcomes by cell as a Markdown table."""
    head = (
        f"| what happens (lease {lease_s:g} s) | trainer hosts | data hosts | `train` reports | "
        "seconds until all are out, or training goes on | cause in `output/failure` | runs, hangs |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_line_of(name, runs) for name, runs in outcomes.items())])


def _line_of(name: str, runs: Sequence[Any]) -> str:
    first = next((run for run in runs if run.codes), runs[0])
    goes_on = [run.again_s for run in runs if run.again_s is not None]
    out = [max(run.out_s.values()) for run in runs if run.out_s and run.again_s is None]
    what, seconds = ("goes on: ", goes_on) if goes_on else ("", out)
    times = "-"
    if seconds:
        times = f"{what}{min(seconds):.1f} / {statistics.median(seconds):.1f} / {max(seconds):.1f}"
    hangs = sum(run.hang for run in runs)
    wrong = sum(bool(run.problems) for run in runs)
    note = f", {wrong} wrong" if wrong else ""
    cells = (
        name,
        _codes(runs, "chief", "other"),
        _codes(runs, "first", "second"),
        ", ".join("success" if first.success.get(part) else "failure" for part in first.codes),
        times,
        _causes(first.causes),
        f"{len(runs)}, {hangs}{note}",
    )
    return f"| {' | '.join(cells)} |"


def _codes(runs: Sequence[Any], *parts: str) -> str:
    """Return the codes of all runs: one figure a host where they agree, all that were seen where they do not."""
    texts = []
    for part in parts:
        seen = {"-" if run.codes[part] is None else str(run.codes[part]) for run in runs if part in run.codes}
        if seen:
            texts.append("/".join(sorted(seen)))
    return ", ".join(texts)


def _causes(causes: Mapping[str, str]) -> str:
    """Return each cause once, with the hosts that give it."""
    by_text: dict[str, list[str]] = {}
    for part, text in causes.items():
        line = " ".join(text.split("\nTraceback")[0].split())[:_CAUSE_CHARS].replace("|", "\\|")
        by_text.setdefault(line, []).append(part)
    return "; ".join(f"{', '.join(parts)}: {text}" for text, parts in by_text.items()) or "none"


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", default="", metavar="REGEX", help="those whose name matches; default: all")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each cell")
    parser.add_argument("--jobs", type=int, default=3, help="cells at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args()
    running = importlib.import_module("ends.running")
    cells = [cell for cell in importlib.import_module("ends.cells").CELLS if re.search(options.cells, cell.name)]
    if not cells or options.repeat < 1 or options.jobs < 1:
        parser.error(f"{len(cells)} cells match {options.cells!r}; --repeat and --jobs need 1 or more")
    started_s = time.monotonic()
    outcomes: dict[str, list[Any]] = {cell.name: [] for cell in cells}
    for round_ in range(options.repeat):
        with tempfile.TemporaryDirectory(prefix="hetero-ends-", ignore_cleanup_errors=True) as base:
            places = [(cell, Path(base) / str(number)) for number, cell in enumerate(cells)]
            for outcome in running.run_cells(places, options.jobs):
                outcomes[outcome.cell].append(outcome)
                state = "WRONG" if outcome.problems else "right"
                print(
                    f"round {round_ + 1}: {state}: {outcome.cell}; {outcome.proof}; {outcome.seconds:.0f} s", flush=True
                )
                for problem in outcome.problems:
                    print(f"  {problem}", flush=True)
            for _, folder in places:
                shutil.rmtree(folder, ignore_errors=True)
    table = table_of(outcomes, running.LEASE_S)
    print(table)
    every = [outcome for runs in outcomes.values() for outcome in runs]
    hangs, wrong = sum(outcome.hang for outcome in every), sum(bool(outcome.problems) for outcome in every)
    print(
        f"{len(every)} runs of {len(cells)} cells, {hangs} hangs, {wrong} wrong, {time.monotonic() - started_s:.0f} s"
    )
    if options.markdown is not None:
        options.markdown.write_text(table + "\n", encoding="utf-8")
    if options.json is not None:
        result = {"benchmark": "ends", "lease_s": running.LEASE_S, "hangs": hangs, "wrong": wrong}
        result["cells"] = {name: [asdict(run) for run in runs] for name, runs in outcomes.items()}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
