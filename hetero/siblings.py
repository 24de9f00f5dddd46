"""The launchers that mpirun started on one host, as each sees the others: by a small file that each keeps of itself.

The first of them stands for the host. From the files it learns what the others' ranks are and have used; and when
mpirun ends them all, each sees whether one of them is gone without a word, which is why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from hetero.control.state import HostReport, ProcessReport, report_from_json, report_to_json
from hetero.mpi import MpiRank
from hetero.rundir import RunDir, read_json, write_json_atomic


@dataclass(frozen=True)
class Sibling:
    """One launcher of the host.

    Args:
        local_rank: Number of its rank on the host.
        pid: Its process.
        report: What it runs.
        done: Whether it is about to end by itself.
    """

    local_rank: int
    pid: int
    report: HostReport
    done: bool

    @property
    def vanished(self) -> bool:
        """Whether it is gone without a word."""
        if self.done:
            return False
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        return True


class Siblings:
    """This launcher's file, and those of the others.

    Args:
        run: The run's folder.
        host: Name of this host.
        mpi: Which launcher this is.
    """

    def __init__(self, run: RunDir, host: str, mpi: MpiRank) -> None:
        self._run, self._host, self._mpi = run, host, mpi

    def tell(self, report: HostReport, *, done: bool = False) -> None:
        """Write this launcher's file; a full disk changes nothing about how the job goes."""
        value = {"job": self._mpi.job, "pid": os.getpid(), "done": done, "report": report_to_json(report)}
        with contextlib.suppress(OSError):
            write_json_atomic(self._run.launcher(self._host, self._mpi.local_rank), value)

    def others(self) -> list[Sibling]:
        """Return the others that have said something, in order of their ranks."""
        ranks = [rank for rank in range(self._mpi.local_size) if rank != self._mpi.local_rank]
        found = [self._read(rank) for rank in ranks]
        return [sibling for sibling in found if sibling is not None]

    def with_others(self, report: HostReport) -> HostReport:
        """Return this launcher's report with what the others run and have used; it is the host's."""
        others = [sibling.report for sibling in self.others()]
        processes: tuple[ProcessReport, ...] = sum((other.processes for other in others), ())
        return dataclasses.replace(
            report,
            cpu_s=report.cpu_s + sum(other.cpu_s for other in others),
            processes=report.processes + processes,
        )

    def _read(self, local_rank: int) -> Sibling | None:
        try:
            value: dict[str, Any] | None = read_json(self._run.launcher(self._host, local_rank))
            if value is None or value["job"] != self._mpi.job:
                return None  # it has not started yet; the file is an earlier run's
            return Sibling(local_rank, int(value["pid"]), report_from_json(value["report"]), bool(value["done"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
