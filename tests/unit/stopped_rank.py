"""A rank of the tests, without a job around it: `python stopped_rank.py FOLDER RANK GRACE_S MODE SAVE`.

FOLDER has what its launcher would leave there (`order.json`, `lost.json`), and gets what it leaves: `report.json`, a
line in `saves` for each save, `ready` once it may be signalled. MODE: what its train function does. SAVE: how it saves.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.errors import PeerFailed
from hetero.stopping import Stopping

folder, rank, grace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
mode, how_to_save = sys.argv[4:]
weights = [0, 0]


def save() -> None:
    with (folder / "saves").open("a") as saves:
        saves.write(json.dumps([threading.current_thread() is threading.main_thread(), *weights]) + "\n")
    if how_to_save == "badly":
        raise OSError(28, "No space left on device")
    if how_to_save == "slowly":
        time.sleep(0.3)


def read(name: str) -> Any:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def report(values: Any) -> None:
    (folder / "report.json").write_text(json.dumps(values))


stopping = Stopping(
    rank,
    grace_s,
    order=lambda: read("order.json"),
    lost=lambda: read("lost.json"),
    follows_from_a_peer=lambda error: isinstance(error, PeerFailed),
    report=report,
)


def ready() -> None:
    (folder / "ready").touch()


def steps(pause_s: float) -> None:
    for step in range(100_000):
        stopping.boundary(0, step)
        weights[0] += 1
        time.sleep(pause_s)
        weights[1] += 1
        if step == 3:
            ready()


def blocked() -> None:
    stopping.boundary(2, 7)
    ready()
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # comes back for no signal


def on_a_device() -> None:
    """Sleep through a step of a device that takes longer than any grace."""
    stopping.boundary(0, 0)
    ready()
    stopping.pause(1000)
    stopping.boundary(0, 1)
    raises()  # a rank other than 0: what it would wait for in its next step has gone


def ends_late() -> None:
    """End the step when the other thread has begun to save, which takes longer than that."""
    stopping.boundary(0, 0)
    ready()
    while not (folder / "saves").exists():
        time.sleep(0.01)
    (folder / "step_ended").touch()
    stopping.boundary(0, 1)
    raise AssertionError("a stopped rank took another step")


def returns() -> None:
    stopping.boundary(0, 0)
    ready()
    while not stopping._asked.is_set():
        time.sleep(0.01)


def until_told(then: Callable[[], None]) -> None:
    stopping.boundary(0, 0)
    ready()
    while not (folder / "go").exists():
        time.sleep(0.01)
    then()


def raises() -> None:
    raise PeerFailed("connection closed by peer")


def raises_its_own() -> None:
    raise ValueError("the loss is not a number")


def reads_ahead() -> None:
    """Take batches from a thread that asks for them, as a tf.data.Dataset does."""
    batches: queue.Queue[int] = queue.Queue(2)

    def ask() -> None:
        for step in range(100_000):
            stopping.boundary(0, step)
            batches.put(step)

    threading.Thread(target=ask, daemon=True).start()
    while True:
        batches.get()
        weights[0] += 1
        time.sleep(0.05)
        weights[1] += 1
        ready()


def with_a_fork() -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    (folder / "fork").write_text(str(child.pid))
    steps(0.02)


TRAIN: dict[str, Callable[[], None]] = {
    "steps": lambda: steps(0.02),
    "on_a_device": on_a_device,
    "ends_late": ends_late,
    "blocked": blocked,
    "returns": returns,
    "raises": lambda: until_told(raises),
    "raises_its_own": lambda: until_told(raises_its_own),
    "reads_ahead": reads_ahead,
    "with_a_fork": with_a_fork,
}

if how_to_save != "never":
    stopping.on_stop(save)
with stopping.training():
    if mode != "over":
        TRAIN[mode]()
ready()
if mode == "over":
    time.sleep(1000)
