"""torch.distributed over Gloo with real ranks: what one raises when another is killed, or never comes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hetero.training.torch_peers import free_port

pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

DEADLINE_S = 60.0
SCRIPT = """
import datetime, json, os, sys, time
import torch
import torch.distributed as dist
from hetero.training.torch_peers import is_peer_failure

torch.set_num_threads(1)
rank, steps = int(os.environ["RANK"]), 0
model, values = torch.nn.Linear(10, 10), torch.ones(1000)

def say(**values):
    print(json.dumps(values), flush=True)

try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    while True:
        if sys.argv[1] == "backward":
            parallel(torch.ones(4, 10)).sum().backward()
        elif sys.argv[1] == "own" and rank == 1 and steps == 5:
            raise RuntimeError("a mistake of the job")
        else:
            dist.all_reduce(values)
            values /= 2
        steps += 1
        if steps == 5:
            say(training=float(values[0]))
except Exception as error:
    say(at=time.time(), peer=is_peer_failure(error), text=f"{type(error).__name__}: {error}"[:400])
    os._exit(7)
"""


class FakeRanks:
    """Rank processes of one host, as a launcher starts them."""

    def __init__(self, doing: str, ranks: tuple[int, ...] = (0, 1), timeout_s: float = DEADLINE_S) -> None:
        port = free_port("127.0.0.1")
        self.processes = {}
        for rank in ranks:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", SCRIPT, doing, str(timeout_s)],
                stdout=subprocess.PIPE,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                text=True,
            )

    def read(self, rank: int, key: str) -> dict[str, object]:
        """Return the rank's next JSON line that has the key; pytest's own timeout is the deadline."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        said = []
        for line in stdout:
            said.append(line)
            if line.startswith("{"):
                found = json.loads(line)
                if key in found:
                    return dict(found)
        pytest.fail(f"rank {rank} ended with {self.processes[rank].wait()} before it said {key!r}: {''.join(said)}")

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., FakeRanks]]:
    started = []

    def start_ranks(*arguments: object, **options: object) -> FakeRanks:
        started.append(FakeRanks(*arguments, **options))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.end()


@pytest.mark.parametrize(
    ("doing", "victim"),
    [
        ("allreduce", 1),
        pytest.param("allreduce", 0, marks=pytest.mark.slow),
        pytest.param("backward", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_notices_at_once_that_another_was_killed(start, doing: str, victim: int) -> None:
    ranks = start(doing)
    for rank in (0, 1):
        assert ranks.read(rank, "training")["training"] == 1.0
    killed_at = time.time()
    ranks.processes[victim].send_signal(signal.SIGKILL)
    assert ranks.processes[victim].wait(5) == -signal.SIGKILL
    said = ranks.read(1 - victim, "at")
    assert said["peer"] is True, said
    assert float(str(said["at"])) - killed_at < 5, said


@pytest.mark.slow
def test_the_rank_that_failed_by_itself_is_told_from_the_one_that_follows(start) -> None:
    ranks = start("own")
    first, second = ranks.read(0, "at"), ranks.read(1, "at")
    assert second["text"] == "RuntimeError: a mistake of the job"
    assert second["peer"] is False
    assert first["peer"] is True, first


@pytest.mark.slow
@pytest.mark.parametrize("here", [0, 1])
def test_a_rank_whose_peer_never_comes_says_so(start, here: int) -> None:
    said = start("allreduce", (here,), timeout_s=2.0).read(here, "at")
    assert said["peer"] is True, said
