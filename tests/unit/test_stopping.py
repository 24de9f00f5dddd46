"""What a rank does on a signal: real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.errors import InputError
from hetero.rundir import write_json_atomic
from hetero.stopping import BOUNDARY_PART, PEERS_PART, Stopping, checkpoint_outcome, leave_order

SCRIPT = Path(__file__).parent / "stopped_rank.py"
GRACE_S = 1.2
STOP, FAILED = 143, 1  # what the launcher is about to end with


@dataclass
class Rank:
    """A running rank."""

    folder: Path
    process: subprocess.Popen[str]

    def order(self, exit_code: int = STOP) -> Rank:
        leave_order(self.folder / "order.json", exit_code)
        return self

    def signal(self, signum: int = signal.SIGTERM) -> Rank:
        self.signalled_s = time.monotonic()
        os.killpg(self.process.pid, signum)
        return self

    def go(self) -> Rank:
        (self.folder / "go").touch()
        return self

    def end(self) -> tuple[int, str]:
        """Return its exit code and what it printed; `seconds` is the time since the signal."""
        output, _ = self.process.communicate(timeout=20)
        self.seconds = time.monotonic() - getattr(self, "signalled_s", time.monotonic())
        return self.process.returncode, output

    @property
    def saves(self) -> list[list[Any]]:
        """What was saved: in the main thread or not, and both weights."""
        path = self.folder / "saves"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def outcome(self) -> str:
        """What the launcher says of it."""
        return checkpoint_outcome(self.folder / "report.json", STOP, "algo-1")


@contextlib.contextmanager
def rank(folder: Path, mode: str, save: str = "well", number: int = 0, grace_s: float = GRACE_S) -> Iterator[Rank]:
    argv = [sys.executable, str(SCRIPT), str(folder), str(number), str(grace_s), mode, save]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 20
        while not (folder / "ready").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Rank(folder, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_rank_0_saves_between_two_steps_says_so_and_ends(tmp_path: Path, signum: signal.Signals) -> None:
    with rank(tmp_path, "steps") as stopped:
        code, output = stopped.order(128 + signum).signal(signum).end()
    ((in_main, first, second),) = stopped.saves
    assert (code, in_main) == (143, True)
    assert first == second >= 4
    assert f"stopped by {signum.name} at epoch 0, step {first}: checkpoint written in 0.0 s\n" in output
    assert stopped.outcome == f"a checkpoint was written at epoch 0, step {first} in 0.0 s"
    assert stopped.seconds < GRACE_S * BOUNDARY_PART


def test_rank_0_that_does_not_come_back_to_python_saves_after_a_third_of_the_grace(tmp_path: Path) -> None:
    with rank(tmp_path, "blocked") as stopped:
        code, output = stopped.order().signal().end()
    assert code == 143
    assert [in_main for in_main, *_ in stopped.saves] == [False]
    assert GRACE_S * BOUNDARY_PART <= stopped.seconds < GRACE_S * PEERS_PART
    assert "at epoch 2, step 7 (no end of the step within 0.4 s): checkpoint written" in output


@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_ends_what_a_rank_sleeps_through_on_a_device(tmp_path: Path, number: int) -> None:
    with rank(tmp_path, "on_a_device", number=number) as stopped:
        code, output = stopped.order().signal().end()
    assert code == 143
    assert stopped.saves == ([[True, 0, 0]] if number == 0 else [])
    assert ("at epoch 0, step 1: checkpoint written" in output) is (number == 0)
    assert stopped.seconds < GRACE_S * (PEERS_PART if number else BOUNDARY_PART)


def test_rank_0_saves_when_a_peer_that_has_gone_breaks_off_its_step(tmp_path: Path) -> None:
    with rank(tmp_path, "raises") as stopped:
        code, output = stopped.order().signal().go().end()
    assert code == 143
    assert [in_main for in_main, *_ in stopped.saves] == [True]
    assert "stopped by SIGTERM at epoch 0, step 0 (train had raised PeerFailed): checkpoint written" in output
    assert "Traceback" not in output


def test_rank_0_saves_when_train_returns(tmp_path: Path) -> None:
    with rank(tmp_path, "returns") as stopped:
        code, _ = stopped.order().signal().end()
    assert (code, [in_main for in_main, *_ in stopped.saves]) == (143, [True])


def test_batches_that_are_read_ahead_are_held_so_that_the_weights_rest(tmp_path: Path) -> None:
    with rank(tmp_path, "reads_ahead") as stopped:
        code, _ = stopped.order().signal().end()
    ((in_main, first, second),) = stopped.saves
    assert (code, in_main) == (143, False)
    assert first == second


def test_other_ranks_go_on_until_most_of_the_grace_is_over_and_save_nothing(tmp_path: Path) -> None:
    with rank(tmp_path, "steps", number=1) as stopped:
        code, output = stopped.order().signal().end()
    assert (code, stopped.saves, output) == (143, [], "")
    assert GRACE_S * PEERS_PART <= stopped.seconds < GRACE_S


def test_another_rank_ends_at_once_when_rank_0_has_gone(tmp_path: Path) -> None:
    with rank(tmp_path, "raises", number=1) as stopped:
        code, output = stopped.order().signal().go().end()
    assert (code, stopped.saves, output) == (143, [], "")
    assert stopped.seconds < GRACE_S * PEERS_PART


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_told_to_end_because_the_job_has_failed_dies_at_once(tmp_path: Path, number: int) -> None:
    with rank(tmp_path, "blocked", number=number) as stopped:
        code, _ = stopped.order(FAILED).signal().end()
    assert (code, stopped.saves) == (-signal.SIGTERM, [])
    assert stopped.seconds < GRACE_S * BOUNDARY_PART


def test_a_signal_without_an_order_kills_as_ever_and_an_order_that_comes_late_is_obeyed(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    with rank(tmp_path, "steps") as stopped:
        assert stopped.signal().end()[0] == -signal.SIGTERM
    assert stopped.saves == []
    with rank(tmp_path / "late", "steps", grace_s=8.0) as stopped:
        stopped.signal()
        time.sleep(0.2)
        assert stopped.process.poll() is None
        assert stopped.order().end()[0] == 143
    assert len(stopped.saves) == 1


def test_a_rank_without_a_function_to_call_and_one_whose_training_is_over_die_at_once(tmp_path: Path) -> None:
    for mode, save in (("steps", "never"), ("over", "well")):
        (tmp_path / mode).mkdir()
        with rank(tmp_path / mode, mode, save) as stopped:
            assert stopped.order().signal().end()[0] == -signal.SIGTERM
        assert stopped.saves == []
        assert "the job had registered none" in stopped.outcome


def test_what_save_raises_is_reported_and_the_end_is_that_of_the_stop(tmp_path: Path) -> None:
    with rank(tmp_path, "steps", "badly") as stopped:
        code, output = stopped.order().signal().end()
    assert (code, len(stopped.saves)) == (143, 1)
    assert "Traceback" in output
    assert ": no checkpoint, OSError: [Errno 28] No space left on device\n" in output
    assert stopped.outcome == "no checkpoint was written: OSError: [Errno 28] No space left on device"


def test_further_signals_change_nothing(tmp_path: Path) -> None:
    with rank(tmp_path, "blocked", "slowly") as stopped:
        stopped.order().signal()
        while stopped.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stopped.process.pid, signal.SIGTERM)
            time.sleep(0.005)
        assert stopped.end()[0] == 143
    assert len(stopped.saves) == 1


def test_a_step_that_ends_while_another_thread_saves_does_not_save_again(tmp_path: Path) -> None:
    with rank(tmp_path, "ends_late", "slowly") as stopped:
        code, output = stopped.order().signal().end()
    assert (code, [in_main for in_main, *_ in stopped.saves]) == (143, [False])
    assert output.count("checkpoint written") == 1
    assert (tmp_path / "step_ended").exists()


@pytest.mark.slow
def test_a_fork_of_the_rank_dies_of_the_signal_and_disturbs_nothing(tmp_path: Path) -> None:
    with rank(tmp_path, "with_a_fork") as stopped:
        fork = psutil.Process(int((tmp_path / "fork").read_text()))
        code, output = stopped.order().signal().end()
        assert (code, len(stopped.saves)) == (143, 1), output
        with contextlib.suppress(psutil.NoSuchProcess):
            fork.wait(5)
        assert not fork.is_running()


@pytest.mark.parametrize(
    ("mode", "lost", "saves"), [("raises", True, 1), ("raises", False, 0), ("raises_its_own", None, 0)]
)
def test_a_rank_that_hears_of_the_end_before_its_launcher_does_saves_if_hosts_were_stopped_or_lost(
    tmp_path: Path, mode: str, lost: bool | None, saves: int
) -> None:
    with rank(tmp_path, mode) as stopped:
        (tmp_path / "lost.json").write_text(json.dumps(lost))
        code, output = stopped.go().end()
    assert (code, len(stopped.saves)) == (1, saves)
    assert "Error: the loss is not a number" in output or "PeerFailed: connection closed by peer" in output
    assert ("stopped at epoch 0, step 0 (train had raised PeerFailed): checkpoint written" in output) == bool(saves)


def test_a_broken_peer_is_waited_for_until_the_reason_is_known(tmp_path: Path) -> None:
    with rank(tmp_path, "raises") as stopped:
        stopped.go()
        time.sleep(0.2)
        assert stopped.order().signal().end()[0] == 143
    assert len(stopped.saves) == 1


def test_a_thread_of_the_jobs_own_cannot_register() -> None:
    stopping = Stopping(
        0, 1.0, order=lambda: None, lost=lambda: None, follows_from_a_peer=lambda _: False, report=lambda _: None
    )
    raised: list[BaseException] = []

    def register() -> None:
        try:
            stopping.on_stop(lambda: None)
        except InputError as error:
            raised.append(error)

    thread = threading.Thread(target=register)
    thread.start()
    thread.join()
    assert "call it where `train` was called" in str(raised[0])


def test_the_launcher_says_what_came_of_the_checkpoint(tmp_path: Path) -> None:
    report = tmp_path / "checkpoint.json"
    told_elsewhere = checkpoint_outcome(None, 143, "algo-1")
    assert told_elsewhere == "whether a checkpoint was written is told on algo-1, where rank 0 is"
    assert checkpoint_outcome(None, 4, "algo-1") == checkpoint_outcome(report, 4, "algo-1") == ""
    assert "the job had registered none (ctx.on_stop)" in checkpoint_outcome(report, 130, "algo-1")
    write_json_atomic(report, {"written": None, "epoch": 0, "step": 3})
    assert "rank 0 was killed before it was done. Give a longer --grace-s" in checkpoint_outcome(report, 143, "algo-1")
    write_json_atomic(report, {"written": True, "epoch": None, "step": None, "seconds": 0.25})
    assert checkpoint_outcome(report, 4, "algo-1") == "a checkpoint was written before the first step in 0.2 s"
    report.write_text("{")
    assert "the job had registered none" in checkpoint_outcome(report, 143, "algo-1")


def test_a_checkpoint_is_ordered_where_hosts_were_stopped_or_lost(tmp_path: Path) -> None:
    codes = {143: True, 130: True, 4: True, 5: True, 0: False, 1: False, 2: False, 3: False}
    for exit_code, checkpoint in codes.items():
        leave_order(tmp_path / "order.json", exit_code, within_s=0.5)
        order = json.loads((tmp_path / "order.json").read_text())
        assert order == {"checkpoint": checkpoint, "by": "SIGINT" if exit_code == 130 else "SIGTERM", "within_s": 0.5}


def test_an_order_may_leave_less_than_the_grace(tmp_path: Path) -> None:
    with rank(tmp_path, "blocked", grace_s=60.0) as stopped:
        leave_order(tmp_path / "order.json", STOP, within_s=0.3)
        assert stopped.signal().end()[0] == 143
    assert len(stopped.saves) == 1
