"""One child: output, signals, groups, reaping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from process_probe import Lines, MakeSpec, is_alive, wait_until

from hetero.errors import ChildFailed
from hetero.process import Child, ChildExit, ChildSpec
from hetero.process.child import PARENT_PID
from hetero.process.output import MAX_LINE_BYTES

IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"
GRANDCHILD = (
    "import os, subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session={session})\n"
    "print('grandchild', p.pid); {then}"
)


def start(spec: ChildSpec, sink: Lines) -> Child:
    return Child(spec, sink, lambda: None, None, os.urandom(8).hex())


def run(spec: ChildSpec, sink: Lines, timeout_s: float = 10.0) -> ChildExit:
    child = start(spec, sink)
    end = child.wait(timeout_s)
    if end is None:
        child.kill()
        child.wait()
        pytest.fail("the child did not end in time")
    return end


def test_each_line_of_both_streams_gets_the_prefix_and_goes_to_the_log(python: MakeSpec, lines: Lines) -> None:
    spec = python("import sys; print('out'); print('err', file=sys.stderr); print('no newline', end='')")
    end = run(spec, lines)
    assert (end.exit_code, end.signal, end.stopped) == (0, None, False)
    assert lines == ["[child] out", "[child] err", "[child] no newline"]
    assert spec.log_path is not None
    assert spec.log_path.read_text() == "out\nerr\nno newline\n"


def test_lines_come_while_the_child_runs(python: MakeSpec, lines: Lines) -> None:
    child = start(python("import time; print('early'); time.sleep(60)"), lines)
    lines.wait_for("early")
    assert child.exit is None
    child.kill()
    child.wait()


def test_stdin_is_empty(python: MakeSpec, lines: Lines) -> None:
    run(python("import sys; print(repr(sys.stdin.read()))"), lines)
    assert lines == ["[child] ''"]


def test_line_of_a_megabyte_without_newline_is_cut_and_complete(python: MakeSpec, lines: Lines) -> None:
    spec = python("import sys; sys.stdout.write('\\u00e4' * 500_000 + 'end')")
    run(spec, lines)
    texts = [line.removeprefix("[child] ") for line in lines]
    assert "".join(texts) == "ä" * 500_000 + "end"
    assert max(len(text.encode()) for text in texts) <= MAX_LINE_BYTES


def test_bytes_that_are_not_utf8_are_replaced(python: MakeSpec, lines: Lines) -> None:
    run(python(r"import os; os.write(1, b'\xff\xfe ok \xc3\nnext\r\n\0\n')"), lines)
    assert lines == ["[child] \ufffd\ufffd ok \ufffd", "[child] next", "[child] \0"]


def test_many_lines_a_second_arrive_all_and_in_order(python: MakeSpec, lines: Lines) -> None:
    started_s = time.monotonic()
    spec = python("import sys; sys.stdout.writelines(f'{i}\\n' for i in range(100_000))", PYTHONUNBUFFERED="")
    run(spec, lines)
    assert lines == [f"[child] {i}" for i in range(100_000)]
    assert time.monotonic() - started_s < 5
    assert spec.log_path is not None
    assert spec.log_path.read_text().count("\n") == 100_000


@pytest.mark.parametrize("log", ["/dev/full", "/dev/null/no/such.log"])
def test_log_that_cannot_be_written_is_said_once_and_the_child_goes_on(
    python: MakeSpec, lines: Lines, log: str
) -> None:
    code = "import time\nfor i in range(3): print('line', i); time.sleep(0.02)"
    end = run(replace(python(code), log_path=Path(log)), lines)
    assert end.exit_code == 0
    assert [line for line in lines if "line" in line] == ["[child] line 0", "[child] line 1", "[child] line 2"]
    assert len([line for line in lines if "cannot write" in line and log in line]) == 1


def test_sink_that_raises_does_not_stop_the_child(python: MakeSpec, capsys: pytest.CaptureFixture[str]) -> None:
    def sink(_line: str) -> None:
        raise ValueError("no")

    child = Child(python("print('x\\n' * 200_000)"), sink, lambda: None, None, "t")
    end = child.wait(10)
    assert end is not None
    assert end.exit_code == 0
    assert capsys.readouterr().err.count("the sink failed") == 1


def test_last_forty_lines_are_kept(python: MakeSpec, lines: Lines) -> None:
    child = start(python("for i in range(100): print(i)"), lines)
    child.wait(10)
    assert child.last_lines() == tuple(str(i) for i in range(60, 100))


def test_program_that_is_missing_is_said_with_its_name(python: MakeSpec, lines: Lines) -> None:
    with pytest.raises(ChildFailed, match=r"Cannot start child \(/no/such\)"):
        start(replace(python(""), argv=("/no/such",)), lines)


def test_term_ends_the_whole_group(python: MakeSpec, lines: Lines) -> None:
    child = start(python(GRANDCHILD.format(session=False, then="time.sleep(60)")), lines)
    grandchild = lines.pid("grandchild")
    assert child.terminate()
    end = child.wait(10)
    assert end is not None
    assert (end.exit_code, end.signal, end.stopped) == (None, "SIGTERM", True)
    wait_until(lambda: not is_alive(grandchild), "the grandchild is gone")


def test_child_that_ignores_term_ends_by_kill(python: MakeSpec, lines: Lines) -> None:
    child = start(python(IGNORE_TERM), lines)
    lines.wait_for("ready")
    child.terminate()
    assert child.wait(0.1) is None
    child.kill()
    end = child.wait(10)
    assert end is not None
    assert (end.signal, end.stopped) == ("SIGKILL", True)
    assert list(end.sent) == ["SIGTERM", "SIGKILL"]


def test_signal_that_nobody_here_sent_is_not_a_stop(python: MakeSpec, lines: Lines) -> None:
    child = start(python("import time; time.sleep(60)"), lines)
    os.kill(child.pid, signal.SIGKILL)
    end = child.wait(10)
    assert end is not None
    assert (end.exit_code, end.signal, end.stopped) == (None, "SIGKILL", False)


def test_foreign_kill_after_our_term_is_not_a_stop(python: MakeSpec, lines: Lines) -> None:
    child = start(python(IGNORE_TERM), lines)
    lines.wait_for("ready")
    child.terminate()
    os.kill(child.pid, signal.SIGKILL)
    end = child.wait(10)
    assert end is not None
    assert not end.stopped


@pytest.mark.parametrize("session", [False, True], ids=["same group", "own session"])
def test_grandchild_that_holds_the_pipe_delays_nothing_and_is_ended(
    python: MakeSpec, lines: Lines, session: bool
) -> None:
    started_s = time.monotonic()
    end = run(python(GRANDCHILD.format(session=session, then="os._exit(3)")), lines)
    assert end.exit_code == 3
    assert time.monotonic() - started_s < 2
    wait_until(lambda: not is_alive(lines.pid("grandchild")), "the grandchild is gone")


def test_pipe_held_by_a_process_that_cannot_be_found_is_let_go(python: MakeSpec, lines: Lines) -> None:
    code = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True, env={})\n"
        "print('grandchild', p.pid); os._exit(0)"
    )
    started_s = time.monotonic()
    end = run(python(code), lines)
    assert end.exit_code == 0
    assert time.monotonic() - started_s < 2
    os.kill(lines.pid("grandchild"), signal.SIGKILL)
    wait_until(lambda: not is_alive(lines.pid("grandchild")), "the grandchild is gone")


def test_nothing_is_signalled_once_the_leader_has_ended(
    python: MakeSpec, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(python(""), lines)
    child.wait(10)
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda _pgid, signum: sent.append(signum))
    assert not child.terminate()
    assert not child.kill()
    assert sent == []
    assert repr(child) == f"<Child child pid {child.pid} exited 0>"


def test_zombie_is_not_signalled_so_its_own_end_is_what_counts(
    python: MakeSpec, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), os.waitid

    def slow_waitid(kind: int, pid: int, options: int) -> object:
        result = real(kind, pid, options)
        if not options & os.WNOHANG:
            gate.wait(10)  # the reaper is late
        return result

    monkeypatch.setattr(os, "waitid", slow_waitid)
    child = start(python("raise SystemExit(7)"), lines)
    wait_until(lambda: not is_alive(child.pid), "a zombie")
    assert not child.kill()
    gate.set()
    end = child.wait(10)
    assert end is not None
    assert (end.exit_code, dict(end.sent)) == (7, {})


def test_status_taken_by_somebody_else_is_an_unknown_end(
    python: MakeSpec, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_child(*_args: object) -> object:
        raise ChildProcessError

    child = start(python("import time; print('up'); time.sleep(60)"), lines)
    lines.wait_for("up")
    with monkeypatch.context() as patch:
        patch.setattr(os, "waitid", no_child)
        other = start(python("", name="other"), lines)
        end = other.wait(10)
    assert end is not None
    assert (end.exit_code, end.signal, end.stopped) == (None, None, False)
    os.waitpid(other.pid, 0)
    child.kill()
    child.wait()


def test_stale_error_file_is_removed_before_the_start(python: MakeSpec, lines: Lines) -> None:
    spec = python("")
    assert spec.error_path is not None
    spec.error_path.write_text("old")
    run(spec, lines)
    assert not spec.error_path.exists()


DIE = "from hetero.process.child import die_with_parent; "


def test_child_dies_with_the_process_that_started_it(python: MakeSpec, lines: Lines) -> None:
    inner = DIE + "die_with_parent(); import os, time; print('inner', os.getpid(), flush=True); time.sleep(60)"
    outer = (
        "import os, subprocess, sys, time\n"
        f"env = {{**os.environ, {PARENT_PID!r}: str(os.getpid())}}\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}], env=env, start_new_session=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", outer], env=dict(python("").env), stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        inner_pid = int(process.stdout.readline().split()[1])
        assert is_alive(inner_pid)
        process.kill()
    wait_until(lambda: not is_alive(inner_pid), "the inner process is gone")


def test_child_whose_parent_is_gone_before_it_could_ask_ends_at_once(python: MakeSpec) -> None:
    code = DIE + "die_with_parent(); print('survived')"
    env = {**python("").env, PARENT_PID: "1"}  # as if reparented between fork and prctl
    if os.getpid() == 1:
        pytest.skip("this process is pid 1")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_parent_pid_is_not_inherited_further(python: MakeSpec, lines: Lines) -> None:
    code = DIE + f"import os; die_with_parent(); print(os.environ.get({PARENT_PID!r})); die_with_parent()"
    assert run(python(code), lines).exit_code == 0
    assert lines == ["[child] None"]


def _state(pid: int) -> str:
    return psutil.Process(pid).status()


def test_a_pause_stops_the_group_and_resume_lets_it_go_on(python: MakeSpec, lines: Lines) -> None:
    child = start(python(GRANDCHILD.format(session=False, then="time.sleep(60)")), lines)
    pids = [child.pid, lines.pid("grandchild")]
    assert child.pause()
    wait_until(lambda: all(_state(pid) == psutil.STATUS_STOPPED for pid in pids), "both are stopped")
    used_s = child.clock_s()
    assert used_s is not None
    assert used_s > 0
    child.resume()
    wait_until(lambda: not any(_state(pid) == psutil.STATUS_STOPPED for pid in pids), "both go on")
    assert child.clock_s() >= used_s
    child.kill()
    child.wait()
    assert (child.clock_s(), child.pause()) == (None, False)


def test_a_paused_child_hears_term_at_once_and_is_not_paused_again(python: MakeSpec, lines: Lines) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    child = start(python(f"{code}; print('ready'); time.sleep(60)"), lines)
    lines.wait_for("ready")
    assert child.pause()
    wait_until(lambda: _state(child.pid) == psutil.STATUS_STOPPED, "it is stopped")
    assert child.terminate()
    assert not child.pause()
    end = child.wait(10)
    assert end is not None
    assert (end.exit_code, sorted(end.sent)) == (7, ["SIGTERM"])


def test_a_paused_child_can_be_killed(python: MakeSpec, lines: Lines) -> None:
    child = start(python("import time; print('ready'); time.sleep(60)"), lines)
    lines.wait_for("ready")
    assert child.pause()
    assert child.kill()
    end = child.wait(10)
    assert end is not None
    assert (end.signal, end.stopped) == ("SIGKILL", True)
