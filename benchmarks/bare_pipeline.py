"""A job's input pipeline and nothing else: what headline.py compares with. Run by it, in a control group.

    python benchmarks/bare_pipeline.py --job FILE.py:NAME --engine grpc --channel FOLDER --batch-size 128
        --share 0 --of 2 --parent PID --output FILE

Calls the job's `inputs` as a worker of that engine would: under `grpc` split by split, else once. Each batch is a line
of the output: when it was ready (monotonic seconds), its rows. Goes on until it is killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hetero.job import InputContext
from hetero.job_file import load_job
from hetero.process.child import die_with_parent


def batches(options: argparse.Namespace, epoch: int) -> Iterator[Any]:
    """Yield the batches of this process's share of an epoch, as NumPy arrays."""
    job = load_job(options.job)
    assert job.inputs_function is not None
    given = {"batch_size": options.batch_size, "channels": {"training": options.channel}, "epoch": epoch}
    share = job.list_splits(InputContext(**given))[options.share :: options.of]
    for splits in ((split,) for split in share) if options.engine == "grpc" else (tuple(share),):
        made: Iterable[Any] = job.inputs_function(InputContext(splits=splits, **given))
        yield from made.as_numpy_iterator() if hasattr(made, "as_numpy_iterator") else made


def main() -> None:
    """Prepare batches until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, kind in (("job", str), ("engine", str), ("channel", str), ("output", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("batch-size", "share", "of", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    with options.output.open("w", encoding="utf-8", buffering=1) as output:
        for epoch in itertools.count():
            for batch in batches(options, epoch):
                rows = len(next(iter(batch.values())))
                output.write(json.dumps({"at_s": time.monotonic(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
