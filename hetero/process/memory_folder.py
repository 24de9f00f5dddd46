"""A folder in memory, for what a process has to write though the disk is full.

The dispatcher of tf.data service is such a process: it journals each change before it answers, and what cannot be
written ends the job's next epoch. Its journal is only for a successor on the same host, so memory will do.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108 - the folder's name has the run's random id
LEAST_FREE_BYTES = 2**30
"""With less than this free the disk is the better place: a journal has some 50 bytes for each element that is read."""


def path_of(run_id: str) -> Path:
    """Return where the folder of a run's launcher is, if it has one."""
    return MEMORY / f"hetero-{run_id}"


def make(run_id: str) -> Path | None:
    """Make a launcher's folder; None if the system has no memory for one. The caller removes it."""
    folder = path_of(run_id)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY).free >= LEAST_FREE_BYTES:
            folder.mkdir(mode=0o700)
            return folder
    return None
