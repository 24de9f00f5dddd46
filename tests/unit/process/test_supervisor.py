"""The group: events, restarts, root cause, stop, CPU seconds."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_probe import Lines, MakeSpec, is_alive, wait_until

from hetero.errors import ChildFailed
from hetero.process import ChildEnded, ChildRestarted, ChildState, GroupState, Supervisor
from hetero.spec import RestartPolicy

SLEEP = "import time; print('up'); time.sleep(60)"
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"


@pytest.fixture
def supervisor(lines: Lines) -> Iterator[Supervisor]:
    with Supervisor(grace_s=5.0, sink=lines, janitor=False, host="algo-1") as made:
        yield made


def ended(supervisor: Supervisor, timeout_s: float = 10.0) -> ChildEnded:
    event = supervisor.next_event(timeout_s)
    assert isinstance(event, ChildEnded), event
    return event


def test_child_that_exits_zero_is_a_success(supervisor: Supervisor, python: MakeSpec) -> None:
    states = [supervisor.state]
    pid = supervisor.start(python("", name="rank-0"))
    states.append(supervisor.state)
    assert [(c.name, c.pid, c.state) for c in supervisor.children()] == [("rank-0", pid, ChildState.RUNNING)]
    assert ended(supervisor) == ChildEnded("rank-0", 0, None, None, final=True)
    assert [*states, supervisor.state] == [GroupState.IDLE, GroupState.RUNNING, GroupState.SUCCEEDED]
    assert supervisor.root_cause is None


def test_failure_has_host_exit_code_and_last_lines(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python("print('before'); raise ValueError('bad label')", name="rank-0"))
    event = ended(supervisor)
    failure = event.failure
    assert failure is not None
    assert (failure.host, failure.process, failure.exit_code, event.final) == ("algo-1", "rank-0", 1, True)
    assert failure.last_lines[0] == "before"
    assert failure.last_lines[-1] == "ValueError: bad label"
    assert failure.describe() == "rank-0 on algo-1 ended with exit code 1, its last line: ValueError: bad label"
    assert supervisor.state == GroupState.FAILED
    assert supervisor.root_cause == failure


def test_exception_that_the_child_recorded_is_the_failure(supervisor: Supervisor, python: MakeSpec) -> None:
    spec = python("", name="rank-0")
    code = (
        "import pathlib, sys\nfrom hetero.errors import DataServiceLost\nfrom hetero.process import record_exception\n"
        f"record_exception(pathlib.Path({str(spec.error_path)!r}), DataServiceLost('none left'), "
        "host='h', process='p')\n"
        "print('bye'); sys.exit(4)"
    )
    supervisor.start(python(code, name="rank-0"))
    failure = ended(supervisor).failure
    assert failure is not None
    assert (failure.exception, failure.message, failure.suggested_exit_code) == ("DataServiceLost", "none left", 4)
    assert (failure.exit_code, failure.process, failure.last_lines) == (4, "rank-0", ("bye",))


def test_kill_from_elsewhere_is_a_failure(supervisor: Supervisor, python: MakeSpec) -> None:
    os.kill(supervisor.start(python(SLEEP, name="rank-0")), signal.SIGKILL)
    event = ended(supervisor)
    assert event.failure is not None
    assert (event.signal, event.exit_code, event.stopped) == ("SIGKILL", None, False)
    assert "killed by SIGKILL" in event.failure.describe()


def test_first_failure_in_time_is_the_root_cause_when_two_die(supervisor: Supervisor, python: MakeSpec) -> None:
    second = supervisor.start(python(SLEEP, name="rank-0"))
    first = supervisor.start(python(SLEEP, name="rank-1"))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first), "reaped")
    os.kill(second, signal.SIGSEGV)
    wait_until(lambda: not psutil.pid_exists(second), "reaped")
    assert [ended(supervisor).name, ended(supervisor).name] == ["rank-1", "rank-0"]
    assert supervisor.root_cause is not None
    assert (supervisor.root_cause.process, supervisor.root_cause.signal) == ("rank-1", "SIGKILL")


def test_failure_of_a_critical_child_goes_before_an_earlier_one(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python("raise SystemExit(3)", name="worker-0", critical=False))
    assert ended(supervisor).name == "worker-0"
    assert supervisor.root_cause is not None
    assert supervisor.root_cause.process == "worker-0"
    supervisor.start(python("raise SystemExit(4)", name="rank-0"))
    assert ended(supervisor).name == "rank-0"
    assert supervisor.root_cause.process == "rank-0"


def test_failed_child_is_restarted_with_growing_waits_until_attempts_are_used_up(
    supervisor: Supervisor, python: MakeSpec, lines: Lines
) -> None:
    policy = RestartPolicy(attempts=2, backoff_s=0.1, window_s=60)
    supervisor.start(python("raise SystemExit(9)", name="worker-0", restarts=policy))
    times: list[float] = []
    events: list[object] = []
    while not events or not (isinstance(events[-1], ChildEnded) and events[-1].final):
        events.append(supervisor.next_event(10.0))
        times.append(time.monotonic())
        if len(events) == 1:
            assert supervisor.state == GroupState.DEGRADED
            assert supervisor.root_cause is None
    kinds = [type(event) for event in events]
    assert kinds == [ChildEnded, ChildRestarted, ChildEnded, ChildRestarted, ChildEnded]
    assert [e.attempts_left for e in events if isinstance(e, ChildEnded)] == [1, 0, 0]
    assert [e.attempt for e in events if isinstance(e, ChildRestarted)] == [1, 2]
    assert [e.restart_in_s for e in events if isinstance(e, ChildEnded)] == [0.1, 0.2, None]
    assert times[1] - times[0] >= 0.09
    assert times[3] - times[2] >= 0.19
    assert [c.restarts for c in supervisor.children()] == [2]
    assert supervisor.root_cause is not None
    assert supervisor.root_cause.exit_code == 9
    assert "1 of 2 restarts left" in lines.wait_for("starting it again in 0.1 s")
    lines.wait_for("no restart left")


def test_attempts_come_back_when_the_window_has_passed(supervisor: Supervisor, python: MakeSpec) -> None:
    policy = RestartPolicy(attempts=1, backoff_s=0.0, window_s=0.05)
    supervisor.start(python("import time; time.sleep(0.1); raise SystemExit(1)", restarts=policy))
    restarts = 0
    while restarts < 3:
        event = supervisor.next_event(10.0)
        restarts += isinstance(event, ChildRestarted)
        assert not isinstance(event, ChildEnded) or not event.final


def test_child_that_ended_well_is_not_restarted(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python("", restarts=RestartPolicy(attempts=3)))
    assert ended(supervisor).final


def test_restart_that_cannot_start_is_a_failure(supervisor: Supervisor, python: MakeSpec, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 5\n")
    program.chmod(0o755)
    spec = python("", restarts=RestartPolicy(attempts=1, backoff_s=0.2))
    supervisor.start(type(spec)("worker-0", (str(program),), {}, restarts=spec.restarts))
    assert not ended(supervisor).final
    program.unlink()
    last = ended(supervisor)
    assert last.final
    assert last.failure is not None
    assert "Cannot start worker-0" in last.failure.describe()


def test_stop_sends_term_to_all_at_once_and_kill_after_one_shared_grace(
    supervisor: Supervisor, python: MakeSpec, lines: Lines
) -> None:
    polite = supervisor.start(python(SLEEP, name="polite"))
    deaf = [supervisor.start(python(IGNORE_TERM, name=f"deaf-{i}")) for i in range(3)]
    wait_until(lambda: len([x for x in lines if "deaf" in x]) == 3, "all deaf")
    started_s = time.monotonic()
    results = supervisor.stop(grace_s=0.4)
    took_s = time.monotonic() - started_s
    assert 0.4 <= took_s < 1.2
    assert not any(psutil.pid_exists(pid) for pid in [polite, *deaf])
    assert {r.name: r.signal for r in results} == {"polite": "SIGTERM"} | {f"deaf-{i}": "SIGKILL" for i in range(3)}
    assert all(r.stopped and r.final and r.failure is None for r in results)
    assert supervisor.state == GroupState.STOPPED
    assert supervisor.root_cause is None
    lines.wait_for("deaf-0, deaf-1, deaf-2: not ended 0.4 s after SIGTERM")
    with pytest.raises(ChildFailed, match="stopped"):
        supervisor.start(python(""))


def test_stop_of_some_leaves_the_others_and_their_events(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python(SLEEP, name="a"))
    b = supervisor.start(python(SLEEP, name="b"))
    supervisor.post("kept")
    assert [r.name for r in supervisor.stop(["a", "never started"])] == ["a"]
    assert is_alive(b)
    assert supervisor.next_event(0) == "kept"
    assert supervisor.next_event(0.01) is None
    os.kill(b, signal.SIGKILL)
    assert ended(supervisor).name == "b"


def test_stop_cancels_a_restart_that_is_pending(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python("raise SystemExit(1)", restarts=RestartPolicy(attempts=5, backoff_s=5.0)))
    assert not ended(supervisor).final
    started_s = time.monotonic()
    assert [(r.name, r.stopped, r.failure) for r in supervisor.stop()] == [("child", True, None)]
    assert time.monotonic() - started_s < 1
    assert supervisor.next_event(0) is None


def test_child_that_failed_before_the_stop_noticed_still_counts(supervisor: Supervisor, python: MakeSpec) -> None:
    pid = supervisor.start(python("raise SystemExit(6)", restarts=RestartPolicy(attempts=5)))
    wait_until(lambda: not psutil.pid_exists(pid), "reaped")
    (result,) = supervisor.stop()
    assert result.failure is not None
    assert (result.failure.exit_code, result.failure.secondary) == (6, False)
    assert supervisor.root_cause == result.failure


def test_bad_end_after_term_is_secondary(supervisor: Supervisor, python: MakeSpec, lines: Lines) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(1)); print('up'); time.sleep(60)"
    supervisor.start(python(code))
    lines.wait_for("up")
    (result,) = supervisor.stop()
    assert result.failure is not None
    assert result.failure.secondary


def test_hurry_cuts_the_grace_short(supervisor: Supervisor, python: MakeSpec, lines: Lines) -> None:
    supervisor.start(python(IGNORE_TERM))
    lines.wait_for("deaf")
    previous = signal.signal(signal.SIGUSR1, lambda *_: supervisor.hurry())
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        started_s = time.monotonic()
        supervisor.stop(grace_s=30)
        assert time.monotonic() - started_s < 3
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


def test_a_hurry_may_leave_some_time(supervisor: Supervisor, python: MakeSpec, lines: Lines) -> None:
    supervisor.start(python(IGNORE_TERM))
    lines.wait_for("deaf")
    started_s = time.monotonic()
    supervisor.hurry(within_s=0.4)
    supervisor.hurry(within_s=60)  # the earlier one counts
    (ended,) = supervisor.stop(grace_s=30)
    assert 0.4 <= time.monotonic() - started_s < 3
    assert ended.signal == "SIGKILL"
    lines.wait_for("not ended 0.4 s after SIGTERM")


def test_interrupt_during_stop_still_leaves_nothing_alive(
    supervisor: Supervisor, python: MakeSpec, lines: Lines
) -> None:
    pid = supervisor.start(python(IGNORE_TERM))
    lines.wait_for("deaf")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        supervisor.stop(grace_s=30)
    timer.join()
    assert not psutil.pid_exists(pid)


def test_post_from_a_signal_handler_wakes_the_loop(supervisor: Supervisor) -> None:
    previous = signal.signal(signal.SIGUSR1, lambda *_: supervisor.post(("signal", time.monotonic())))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        event = supervisor.next_event(10.0)
        assert isinstance(event, tuple)
        assert time.monotonic() - event[1] < 0.05
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


def test_posts_from_many_threads_and_signals_are_all_returned_in_order(supervisor: Supervisor) -> None:
    count = 2000
    posted: list[int] = []
    again_s = [0.001]

    def handler(*_: object) -> None:
        posted.append(len(posted))
        supervisor.post(("signal", posted[-1]))
        signal.setitimer(signal.ITIMER_REAL, again_s[0])  # not before: it would come between the two above

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, again_s[0])
    threads = [
        threading.Thread(target=lambda n: deque(map(supervisor.post, ((n, i) for i in range(count))), 0), args=(n,))
        for n in range(3)
    ]
    seen: dict[object, list[object]] = {}
    try:
        for thread in threads:
            thread.start()
        while sum(len(seen.get(n, ())) for n in range(3)) < 3 * count:
            event = supervisor.next_event(10.0)
            assert isinstance(event, tuple)
            seen.setdefault(event[0], []).append(event[1])
    finally:
        again_s[0] = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        for thread in threads:
            thread.join()
    while (event := supervisor.next_event(0)) is not None:
        assert isinstance(event, tuple)
        seen.setdefault(event[0], []).append(event[1])
    assert all(seen[n] == list(range(count)) for n in range(3))
    assert seen.get("signal", []) == posted
    assert posted


def test_end_of_a_child_is_known_within_milliseconds(supervisor: Supervisor, python: MakeSpec, lines: Lines) -> None:
    delays_s = []
    for i in range(5):
        pid = supervisor.start(python(f"import time; print('up{i}'); time.sleep(60)", name=f"rank-{i}"))
        lines.wait_for(f"up{i}")
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ended(supervisor)
        delays_s.append(time.monotonic() - killed_s)
    assert min(delays_s) < 0.01  # the fastest of five: the machine may be busy, a polling loop is always slow


def test_waiting_costs_next_to_no_cpu(supervisor: Supervisor, python: MakeSpec, lines: Lines) -> None:
    for i in range(8):
        supervisor.start(python(SLEEP, name=f"worker-{i}"))
    wait_until(lambda: len(lines) == 8, "all up")
    supervisor.cpu_s()
    before = resource.getrusage(resource.RUSAGE_SELF)
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        assert supervisor.next_event(0.5) is None
        supervisor.cpu_s()  # twice what a heartbeat asks for
        supervisor.children()
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s / 2.0 < 0.01


def test_cpu_seconds_count_grandchildren_and_never_fall(supervisor: Supervisor, python: MakeSpec, lines: Lines) -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass\n"
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {burn + 'time.sleep(60)'!r}])\n"
    supervisor.start(python(code + "print('grandchild', p.pid); time.sleep(60)"))
    grandchild = lines.pid("grandchild")
    wait_until(lambda: sum(psutil.Process(grandchild).cpu_times()[:2]) >= 0.3, "burnt")
    supervisor._meter._next_scan_s = 0.0
    living_s = supervisor.cpu_s()
    assert living_s >= 0.3
    supervisor.stop()
    assert supervisor.cpu_s() >= living_s


def test_cpu_seconds_of_ended_children_stay(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python("import time\nwhile time.process_time() < 0.2: pass"))
    ended(supervisor)
    assert 0.2 <= supervisor.cpu_s() < 2


def test_name_of_a_living_child_is_taken(supervisor: Supervisor, python: MakeSpec) -> None:
    supervisor.start(python(SLEEP, name="a"))
    with pytest.raises(ChildFailed, match="one of that name is running"):
        supervisor.start(python(SLEEP, name="a"))


def test_leaving_the_block_ends_all_even_sessions_of_their_own(python: MakeSpec, lines: Lines) -> None:
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nprint('away', p.pid); time.sleep(60)"
    )
    with pytest.raises(ValueError, match="in the block"), Supervisor(1.0, lines) as made:  # noqa: PT012
        child = made.start(python(code))
        away = lines.pid("away")
        raise ValueError("in the block")
    assert not psutil.pid_exists(child)
    assert not is_alive(away)


def test_import_is_light() -> None:
    code = (
        "import subprocess, json, dataclasses, pathlib, threading, queue, enum, time, sys, importlib, ast\n"
        "from hetero import spec\nt = time.process_time(); import hetero.process; t = time.process_time() - t\n"
        "heavy = {'grpc', 'numpy', 'tensorflow', 'horovod', 'rich', 'psutil'} & set(sys.modules)\nprint(t, heavy)"
    )
    best_s = 1.0
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        took, heavy = out.split(maxsplit=1)
        assert heavy.strip() == "set()"
        best_s = min(best_s, float(took))
    assert best_s < 0.05
