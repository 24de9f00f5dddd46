"""The table of ends: every way in which a job can be hit, and what each host then does.

Codes are the launchers'; `train` makes 1 of every code but 0. Causes are what output/failure says.
"""

from __future__ import annotations

from ends import faults
from ends.faults import kill, kill_repeatedly, send
from ends.running import Cell

RAISED = r"^ValueError: the loss is not a number"
KILLED = r"^rank-0 on {host} was killed by SIGKILL, which its launcher did not send \(out of memory\?\)"
TRAINER_SILENT = r"trainer host {host} gave no sign of life for 5 s"
COORDINATOR_SILENT = r"^DataServiceLost: The coordinator at \S+ has not answered"
LAUNCHER_KILLED = r"ExitCode -9"
STOPPED = r"SIGTERM"


def _all(pattern: str, *parts: str) -> dict[str, str]:
    return dict.fromkeys(parts, pattern)


TRAINERS, DATA = ("chief", "other"), ("first", "second")
EVERYBODY = (*TRAINERS, *DATA)
FAILED = dict.fromkeys(TRAINERS, 1)
NO_INPUT = dict.fromkeys(EVERYBODY, 4)
NO_TRAINER = dict.fromkeys(EVERYBODY, 5)

# With two trainers and two data hosts algo-1 is the chief, algo-2 the first data host, algo-3 the other trainer, algo-4
# the second data host.
CELLS = [
    Cell(
        "training raises",
        faults.training_raises,
        "other",
        FAILED,
        _all(RAISED, *TRAINERS),
    ),
    Cell(
        "a rank is killed (SIGKILL)",
        kill("rank-0"),
        "other",
        FAILED,
        _all(KILLED.format(host="algo-3"), *TRAINERS),
    ),
    Cell(
        "a rank is killed (SIGKILL), tf_data",
        kill("rank-0"),
        "chief",
        FAILED,
        _all(KILLED.format(host="algo-1"), *TRAINERS),
        engine="tf_data",
    ),
    Cell(
        "a rank runs out of memory (control group)",
        faults.memory_runs_out_in_cgroup,
        "chief",
        FAILED,
        _all(KILLED.format(host="algo-1"), *TRAINERS),
    ),
    Cell(
        "a rank runs out of memory (ulimit -v)",
        faults.memory_runs_out_by_ulimit,
        "chief",
        FAILED,
        _all(r"MemoryError: Unable to allocate", *TRAINERS),
    ),
    Cell(
        "the chief's launcher is killed (SIGKILL)",
        kill("launcher"),
        "chief",
        NO_TRAINER | {"chief": -9},
        _all(TRAINER_SILENT.format(host="algo-1"), "other", *DATA) | {"chief": LAUNCHER_KILLED},
    ),
    Cell(
        "the chief's launcher is killed (SIGKILL), tf_data",
        kill("launcher"),
        "chief",
        NO_TRAINER | {"chief": -9},
        _all(TRAINER_SILENT.format(host="algo-1"), "other", *DATA) | {"chief": LAUNCHER_KILLED},
        engine="tf_data",
    ),
    Cell(
        "the chief is unplugged",
        faults.unplug,
        "chief",
        NO_TRAINER | {"chief": 4},
        _all(TRAINER_SILENT.format(host="algo-1"), "other", *DATA) | {"chief": COORDINATOR_SILENT},
    ),
    Cell(
        "the chief is unplugged, tf_data",
        faults.unplug,
        "chief",
        NO_TRAINER | {"chief": 4},
        _all(TRAINER_SILENT.format(host="algo-1"), "other", *DATA) | {"chief": COORDINATOR_SILENT},
        engine="tf_data",
    ),
    Cell(
        "the other trainer host loses its power",
        faults.power_cut,
        "other",
        NO_TRAINER | {"other": None},
        _all(TRAINER_SILENT.format(host="algo-3"), "chief", *DATA),
    ),
    Cell(
        "the first data host's launcher is killed (SIGKILL)",
        kill("launcher"),
        "first",
        NO_INPUT | {"first": -9},
        _all(COORDINATOR_SILENT, *TRAINERS, "second") | {"first": LAUNCHER_KILLED},
    ),
    Cell(
        "the second data host's launcher is killed (SIGKILL)",
        kill("launcher"),
        "second",
        {"second": -9},
        {"second": LAUNCHER_KILLED},
        goes_on=True,
    ),
    Cell(
        "the first data host is unplugged",
        faults.unplug,
        "first",
        NO_INPUT | {"first": 5},
        _all(COORDINATOR_SILENT, *TRAINERS, "second") | {"first": r"gave no sign of life for 5 s"},
    ),
    Cell(
        "the first data host is unplugged, tf_data",
        faults.unplug,
        "first",
        NO_INPUT | {"first": 5},
        _all(COORDINATOR_SILENT, *TRAINERS, "second") | {"first": r"gave no sign of life for 5 s"},
        engine="tf_data",
    ),
    Cell(
        "the second data host is unplugged",
        faults.unplug,
        "second",
        {"second": 4},
        {"second": COORDINATOR_SILENT},
        goes_on=True,
    ),
    Cell(
        "the second data host is unplugged, tf_data",
        faults.unplug,
        "second",
        {"second": 4},
        {"second": COORDINATOR_SILENT},
        goes_on=True,
        engine="tf_data",
        exact=False,
    ),
    Cell(
        "the only data host loses its power",
        faults.power_cut,
        "first",
        {"chief": 4, "other": 4, "first": None},
        _all(COORDINATOR_SILENT, *TRAINERS),
        data=1,
    ),
    Cell("the coordinator is killed (SIGKILL)", kill("coordinator"), "first", goes_on=True),
    Cell("the dispatcher is killed (SIGKILL), tf_data", kill("dispatcher"), "first", goes_on=True, engine="tf_data"),
    Cell("a feed is killed (SIGKILL)", kill("feed"), "first", goes_on=True),
    Cell("a worker is killed 6 times (SIGKILL)", kill_repeatedly("worker-0", 6, 0.7), "first", goes_on=True),
    Cell(
        "the only worker is killed again and again (SIGKILL), tf_data",
        kill_repeatedly("worker-0", 8, 0.2),
        "first",
        {"chief": 4, "other": 4, "first": 4},
        _all(r"^worker-0 on algo-2 was killed by SIGKILL", *TRAINERS, "first"),
        engine="tf_data",
        data=1,
        options={"rows": 800},
    ),
    Cell(
        "the disk of the first data host is full",
        faults.disk_full,
        "first",
        goes_on=True,
        small_disk=("first",),
    ),
    Cell(
        "the disk of the first data host is full, tf_data",
        faults.disk_full,
        "first",
        goes_on=True,
        engine="tf_data",
        small_disk=("first",),
    ),
]
for _seconds in (faults.CLOCK_JUMP_S, -faults.CLOCK_JUMP_S):
    for _part, _who in (("first", "first data host"), ("chief", "chief")):
        CELLS.append(
            Cell(
                f"the clock of the {_who} jumps by {_seconds // 3600:+d} h",
                faults.clock_jumps(_seconds),
                _part,
                goes_on=True,
                own_clock=(_part,),
            )
        )
CELLS += [
    Cell(
        "the clock of the first data host jumps by +1 h, tf_data",
        faults.clock_jumps(faults.CLOCK_JUMP_S),
        "first",
        goes_on=True,
        engine="tf_data",
        own_clock=("first",),
    ),
    Cell(
        "the clock of the chief jumps by -1 h, tf_data",
        faults.clock_jumps(-faults.CLOCK_JUMP_S),
        "chief",
        goes_on=True,
        engine="tf_data",
        own_clock=("chief",),
    ),
    Cell(
        "SIGTERM to the chief's launcher",
        send("launcher"),
        "chief",
        {"chief": 143, "other": 143},
        _all(STOPPED, *TRAINERS),
    ),
    Cell(
        "SIGTERM to the other trainer host's launcher",
        send("launcher"),
        "other",
        {"chief": 143, "other": 143},
        _all(STOPPED, *TRAINERS),
    ),
    Cell(
        "SIGTERM to the first data host's launcher",
        send("launcher"),
        "first",
        NO_INPUT | {"first": 143},
        _all(STOPPED, *EVERYBODY),
    ),
    Cell(
        "SIGTERM to the second data host's launcher",
        send("launcher"),
        "second",
        {"second": 143},
        {"second": STOPPED},
        goes_on=True,
    ),
    Cell(
        "SIGTERM to the chief's `train`, which does not pass it on",
        send("train"),
        "chief",
        {"chief": None, "other": 143},
        _all(STOPPED, *TRAINERS),
        train_code=-15,
    ),
    Cell("the first data host comes 60 s late", on="first", late_s=60, goes_on=True, options={"epochs": 1}),
    Cell("the second data host comes 60 s late", on="second", late_s=60, goes_on=True, options={"epochs": 12}),
    Cell("the chief comes 60 s late", on="chief", late_s=60, goes_on=True, options={"epochs": 1}),
    Cell("the other trainer host comes 60 s late", on="other", late_s=60, goes_on=True, options={"epochs": 1}),
    Cell(
        "the engine cannot run the job (a Python function under tf_data)",
        faults.engine_refuses,
        "chief",
        codes=dict.fromkeys(TRAINERS, 2),
        causes=_all(r"halve_it_in_python", *TRAINERS),
        at_start=True,
        engine="tf_data",
        options={"python": True},
    ),
    Cell("the coordinator's port is taken", on="first", ports=(16000,), goes_on=True, options={"epochs": 1}),
    Cell("the feed's port is taken", on="first", ports=(6000,), goes_on=True, options={"epochs": 1}),
    Cell(
        "the dispatcher's port and the worker's are taken, tf_data",
        on="first",
        ports=(6000, 6001),
        goes_on=True,
        engine="tf_data",
        options={"epochs": 1},
    ),
]
