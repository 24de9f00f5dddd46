"""Local workers run when nobody else wants to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The file is missing where the kernel does not weigh sessions, and empty for the session that the system started with.
CODE = """
import os
from pathlib import Path
from hetero.process.priority import yield_to_others
AUTOGROUP = Path("/proc/self/autogroup")
yield_to_others()
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), open("/proc/self/oom_score_adj").read().strip())
print((AUTOGROUP.read_text() if AUTOGROUP.exists() else "").split()[-1:])
"""


def test_a_child_and_its_session_sink_to_the_lowest_priority() -> None:
    child = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, check=True,
                           start_new_session=True)  # fmt: skip
    first, weight = child.stdout.splitlines()
    assert first.split() == ["19", str(os.SCHED_BATCH), "500"]
    assert weight in ("['19']", "[]")


def test_what_the_system_does_not_have_is_left_out(tmp_path: Path) -> None:
    folder = f"Path({str(tmp_path / 'no')!r})"
    code = CODE.replace("yield_to_others()", f"yield_to_others({folder})")
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert child.stdout.startswith("19 ")


def test_others_of_the_same_session_keep_their_weight() -> None:
    own = Path("/proc/self/autogroup")
    before = own.read_text() if own.exists() else ""
    subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.DEVNULL, check=True)
    assert (own.read_text() if own.exists() else "") == before
