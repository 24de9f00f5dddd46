"""What holds for every test: a clean environment, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator, Iterator
from typing import Any

import psutil
import pytest

PREFIXES = ("HETERO_", "SM_", "HOROVOD_", "OMPI_", "SAGEMAKER_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what the machine happens to have set."""
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup: processes that tests start would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

MARK = f"pytest-{os.getpid()}-{time.monotonic_ns()}"


def marked_processes() -> list[psutil.Process]:
    """Return every living process that a test started, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TEST_MARK") == MARK:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(autouse=True)
def no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test after which a process of its own still runs."""
    monkeypatch.setenv("TEST_MARK", MARK)
    yield
    deadline = time.monotonic() + 5
    while (left := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    said = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            said.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
    assert not said, f"processes left behind: {said}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Where everything has to run, a test that was skipped has failed."""
    del item, call
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although CI is set: {report.longrepr}"
    return report
