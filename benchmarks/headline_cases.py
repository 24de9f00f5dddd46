"""What headline.py compares, and what it sees of a run: cases, shapes, the window that is measured.

Three cases. `homogeneous`: the trainer host alone. `heterogeneous`: data hosts beside it, and a local worker on it.
`control`: one host with the CPUs of all of them, which only prepares the same input, without hetero; in as many
processes as it takes to use them, where the pipeline is Python (a TensorFlow graph has threads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_groups import GroupUsage
from virtual_hosts import REPOSITORY, BenchmarkFailed

HOMOGENEOUS, HETEROGENEOUS, CONTROL = "homogeneous", "heterogeneous", "control"
BATCH_ROWS = 128
START_S, END_S = 240.0, 120.0
LEAST_STEPS = 3
_FILE = REPOSITORY / "benchmarks" / "jobs" / "headline_images.py"
JOBS = {"tf_data": f"{_FILE}:graph", "grpc": f"{_FILE}:python"}


@dataclass(frozen=True)
class Shape:
    """Quotas that stand for instances, in the ratio of their vCPUs.

    Attributes:
        name: `A` or `B`.
        says: The public figures' clusters.
        trainer_cpus: CPUs of the trainer host.
        data_cpus: CPUs of each data host.
        workers: Workers on each data host.
        trainer, data: Instances whose prices count.
    """

    name: str
    says: str
    trainer_cpus: float
    data_cpus: tuple[float, ...]
    workers: int
    trainer: Mapping[str, int]
    data: Mapping[str, int]

    @property
    def budget_cpus(self) -> float:
        """CPUs of all hosts together."""
        return round(self.trainer_cpus + sum(self.data_cpus), 6)


SHAPES = {
    "A": Shape(
        "A",
        "p4d.24xlarge + 2 x c5.18xlarge, 96 + 144 vCPUs",
        0.4,
        (0.3, 0.3),
        1,
        {"ml.p4d.24xlarge": 1},
        {"ml.c5.18xlarge": 2},
    ),
    "B": Shape(
        "B",
        "p3.2xlarge + c5.9xlarge, 8 + 36 vCPUs",
        0.3,
        (1.35,),
        2,
        {"ml.p3.2xlarge": 1},
        {"ml.c5.9xlarge": 1},
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all runs of a benchmark share.

    Attributes:
        records: Folder of the pictures.
        seconds: How long is measured.
        warm_up_s: How long the quotas hold before that.
        workers: `--workers-per-host`, None for the shape's.
        local_workers: `--local-workers` of heterogeneous jobs.
        options: More options of heterogeneous jobs.
    """

    records: Path
    seconds: float
    warm_up_s: float
    workers: str | None = None
    local_workers: str = "1"
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What one run came to, within the seconds that were measured.

    Attributes:
        case: See the module.
        rows_per_s: Rows trained on.
        step_ms: Median step, and `step_ms_p95`; None for the control, which has no steps.
        input_wait: Part of the steps in which the loop waited for input.
        cpu_s_per_1000_rows: CPU seconds by `trainer` and `data` hosts; the control's are its trainer's.
        cpus: CPUs used, of those that the hosts have.
        throttled: Part of the quotas' periods in which they were used up.
        receiving_cpu_s_per_1000_rows: CPU seconds of the trainer host's ranks and launcher, local workers left out.
        stall: Part of the time in which the simulated accelerator was idle; None without one.
        late: The part of that in which it did not wait for input: the loop woke up late, or ran its own code.
        stall_of_summary: `stall` in `simulated_device` of summary.json, over the whole run, start-up included.
        local_workers: What the summary says of them.
    """

    case: str
    rows_per_s: float
    step_ms: float | None
    step_ms_p95: float | None
    input_wait: float | None
    cpu_s_per_1000_rows: Mapping[str, float]
    cpus: float
    throttled: float
    receiving_cpu_s_per_1000_rows: float | None = None
    stall: float | None = None
    late: float | None = None
    stall_of_summary: float | None = None
    local_workers: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Window:
    """The seconds that are measured: what the hosts had used at their begin and what since.

    Attributes:
        began_s, ended_s: Monotonic seconds.
        used: By host, what it used between.
        process_cpu_s: By process of the trainer host, CPU seconds between.
    """

    began_s: float
    ended_s: float
    used: Mapping[str, GroupUsage]
    process_cpu_s: Mapping[str, float]

    def lines(self, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return those of a run's lines whose batch came in these seconds.

        Raises:
            BenchmarkFailed: They are too few.
        """
        found = [line for line in lines if self.began_s <= line.get("at_s", 0.0) < self.ended_s]
        if len(found) < LEAST_STEPS:
            seconds = self.ended_s - self.began_s
            raise BenchmarkFailed(f"only {len(found)} steps in {seconds:.1f} s, {LEAST_STEPS} needed: raise --seconds")
        return found

    def cpu_s(self, kind: str) -> float:
        """Return the CPU seconds of the hosts whose name begins so."""
        return sum(used.cpu_s for host, used in self.used.items() if host.startswith(kind))

    @property
    def throttled(self) -> float:
        """Part of the periods in which a quota was used up."""
        periods = sum(used.periods for used in self.used.values())
        return sum(used.throttled for used in self.used.values()) / periods if periods else 0.0


def rate_of(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return rows/s from the first line's batch to the last's: what came after the first, over the time between."""
    rows = sum(int(line["rows"]) for line in lines[1:])
    return float(rows / (lines[-1]["at_s"] - lines[0]["at_s"]))
