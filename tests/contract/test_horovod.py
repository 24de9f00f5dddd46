"""Horovod through its door: real ranks on virtual hosts of one machine, started the way launchers start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hetero.errors import HeteroError
from hetero.training import horovod

SLOTS = [("trainer-1", 1), ("trainer-2", 1)]
PRELUDE = """
import json, os, sys, time
import numpy as np, keras, tensorflow as tf
from hetero.training import horovod, evaluate, fit

slots, host, rendezvous = json.loads(sys.argv[1])
print(json.dumps({"imported": True}), flush=True)
rank, size, local_rank = horovod.init_rank(horovod.slot_env(slots, host, 0, rendezvous, interface="lo"))

class FakeContext:
    batch_size, seed, model_dir = 8, 0, None
    def __init__(self, epochs, data):
        self.rank, self.size, self.number, self.data, self.logged = rank, size, epochs, data, {}
    def epochs(self):
        return range(self.number)
    def batches(self, epoch, *, with_mask=False):
        for batch, mask in self.data(epoch):
            yield (batch, mask) if with_mask else batch
    def log(self, **values):
        self.logged.update(values)

def say(**values):
    print(json.dumps(values), flush=True)
"""
SCRIPT = (
    PRELUDE
    + """
random = np.random.default_rng(rank)
keras.utils.set_random_seed(rank)  # other weights and other data on each rank
model = keras.Sequential([keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(3)])  # unbuilt
table = np.arange(50) % 3

def data(epoch):
    for step in range(6):
        x = random.integers(0, 50, (8, 1))
        mask = np.ones(8, bool)
        if step == 5 and rank == 1:
            mask[:] = False  # the padded end of an epoch
        yield (x, table[x[:, 0]]), mask

context = FakeContext(3, data)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
history = fit(context, model=model, loss=loss, optimizer=keras.optimizers.Adam(0.05), metrics=["accuracy"],
              validation=(np.arange(50)[:, None], table))
digest = [float(np.abs(weight).sum()) for weight in model.get_weights()]
one_batch = evaluate(context, model=model, data=(np.arange(50)[:, None], table), loss=loss, metrics=["accuracy"])
own = np.asarray(model(np.arange(50)[:, None])).argmax(-1)
horovod.barrier()
say(rank=rank, size=size, digest=digest, history=history, logged=sorted(context.logged), accuracy=one_batch["accuracy"],
    own_accuracy=float((own == table).mean()))

# Second training, without end: the test kills a rank in it.
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

def endless(epoch):
    step = 0
    while True:
        step += 1
        if step == 20:
            say(training=True)
        yield (np.ones((8, 4), "float32"), np.zeros(8, "int64")), np.ones(8, bool)

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
try:
    fit(FakeContext(1, endless), model=model, loss=loss, optimizer="sgd")
except Exception as error:
    say(at=time.time(), peer=horovod.is_peer_failure(error), kind=type(error).__name__, text=str(error)[:300])
    os._exit(7)
"""
)


class FakeRanks:
    """Two rank processes on two virtual hosts whose names do not resolve."""

    def __init__(self, script: str, rendezvous: str) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, json.dumps([SLOTS, host, rendezvous])],
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for host, _ in SLOTS
        ]

    def read(self, rank: int, key: str) -> dict[str, object]:
        """Return the rank's next JSON line that has the key; pytest's own timeout is the deadline."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{"):
                found = json.loads(line)
                if key in found:
                    return dict(found)
        pytest.fail(f"rank {rank} ended with {self.processes[rank].wait()} before it said {key!r}")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def rendezvous() -> Iterator[horovod.RendezvousHandle]:
    handle = horovod.start_rendezvous(SLOTS, "127.0.0.1", interface="lo")
    yield handle
    handle.stop()


@pytest.fixture
def ranks(rendezvous: horovod.RendezvousHandle) -> Iterator[FakeRanks]:
    started = FakeRanks(SCRIPT, rendezvous.endpoint)
    yield started
    started.end()


def test_two_ranks_train_one_model_and_one_notices_the_others_death(ranks: FakeRanks) -> None:
    first, second = ranks.read(0, "digest"), ranks.read(1, "digest")

    assert (first["rank"], second["rank"], first["size"]) == (0, 1, 2)
    assert first["digest"] == pytest.approx(second["digest"], rel=1e-6)
    assert first["history"] == second["history"], "metrics are averaged over the ranks"
    history = first["history"]
    assert isinstance(history, dict)
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert history["loss"][-1] < history["loss"][0]
    assert first["accuracy"] == second["accuracy"] == pytest.approx(first["own_accuracy"])
    assert first["logged"] == sorted(history)
    assert second["logged"] == [], "only rank 0 logs"

    ranks.read(0, "training")
    ranks.read(1, "training")
    killed_at = time.time()
    ranks.processes[1].send_signal(signal.SIGKILL)
    assert ranks.processes[1].wait(5) == -signal.SIGKILL
    said = ranks.read(0, "at")

    assert said["peer"] is True, said
    noticed_s = float(str(said["at"])) - killed_at
    print(f"noticed after {noticed_s:.3f} s as {said['kind']}: {said['text']}")
    assert noticed_s < 5
    assert ranks.processes[0].wait(10) == 7


def test_the_rendezvous_needs_no_tensorflow_and_frees_its_port() -> None:
    code = (
        "import sys, time\n"
        "from hetero.training.horovod import start_rendezvous\n"
        "handle = start_rendezvous([('a', 2)], '127.0.0.1')\n"
        "print('tensorflow' in sys.modules, handle.port)\n"
        "handle.stop(); handle.stop()\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    loaded, port = said.split()
    assert loaded == "False"
    with socket.socket() as again:
        again.bind(("", int(port)))


def _status(port: int, request: str, rest: str = "\r\n") -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(f"{request} HTTP/1.1\r\n{rest}".encode())
        return int(connection.recv(64).split()[1])


def test_strangers_do_not_disturb_the_rendezvous(
    rendezvous: horovod.RendezvousHandle, capfd: pytest.CaptureFixture[str]
) -> None:
    idle = [socket.create_connection(("127.0.0.1", rendezvous.port)) for _ in range(30)]
    for connection in idle[:10]:
        connection.sendall(os.urandom(64) + b"\r\n\r\n")
    wrong = ["GET /", "GET /a/b/c/d", "PUT /global/x", "DELETE /a"]
    assert [_status(rendezvous.port, line) for line in wrong] == [400] * 4
    assert _status(rendezvous.port, "GET /global/absent") == 404
    assert _status(rendezvous.port, "PUT /global/key", "Content-Length: 5\r\n\r\nvalue") == 200
    for connection in idle:
        connection.close()
    assert "Traceback" not in capfd.readouterr().err


def test_slots_are_numbered_host_by_host() -> None:
    slots = [("algo-2", 2), ("algo-10", 1)]
    third = horovod.slot_env(slots, "algo-10", 0, "algo-2:1234", interface="eth0", timeout_s=60)
    assert all(isinstance(value, str) for value in third.values())
    wanted = {"RANK": "2", "SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
    assert {name: third[f"HOROVOD_{name}"] for name in wanted} == wanted
    assert third["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "algo-2"
    assert third["HOROVOD_GLOO_IFACE"] == "eth0"
    second = horovod.slot_env(slots, "algo-2", 1, "algo-2:1234")
    assert (second["HOROVOD_RANK"], second["HOROVOD_CROSS_SIZE"]) == ("1", "1")
    assert "HOROVOD_GLOO_IFACE" not in second


def test_our_slots_are_those_of_horovods_own_launcher() -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    slots = [("a", 3), ("b", 1), ("c", 2)]
    for slot in get_host_assignments(parse_hosts("a:3,b:1,c:2"), 6):
        ours = horovod.slot_env(slots, slot.hostname, slot.local_rank, "10.0.0.1:80", interface="eth0")
        theirs = create_slot_env_vars(slot) | create_run_env_vars("10.0.0.1", ["eth0"], 80)
        assert {name: ours[name] for name in theirs} == {name: str(value) for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("slots", "host", "local_rank", "rendezvous"),
    [
        ([], "a", 0, "x:1"),
        ([("a", 1), ("a", 1)], "a", 0, "x:1"),
        ([("a", 1)], "a", 1, "x:1"),
        ([("a", 1)], "a", 0, "x"),
    ],
)
def test_a_slot_that_is_not_there_is_refused(
    slots: list[tuple[str, int]], host: str, local_rank: int, rendezvous: str
) -> None:
    with pytest.raises(ValueError, match=r"slots are|no rank|address:port"):
        horovod.slot_env(slots, host, local_rank, rendezvous)


def test_the_interface_is_the_one_with_the_route() -> None:
    assert horovod.interface_to("127.0.0.1", 9) == "lo"
    with pytest.raises(HeteroError, match="no route"):
        horovod.interface_to("256.0.0.1", 9)


def test_only_errors_that_follow_from_a_peer_are_peer_failures() -> None:
    internal = type("HorovodInternalError", (RuntimeError,), {"__module__": "horovod.common.exceptions"})
    unknown = type("UnknownError", (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    assert horovod.is_peer_failure(internal("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert horovod.is_peer_failure(unknown("node HorovodAllreduce: Horovod has been shut down."))
    wrapped = RuntimeError("step 3 failed")
    wrapped.__cause__ = internal("gone")
    assert horovod.is_peer_failure(wrapped)
    assert not horovod.is_peer_failure(ValueError("Horovod has been shut down"))
    assert not horovod.is_peer_failure(unknown("Incompatible shapes"))
    assert not horovod.is_peer_failure(internal("Mismatched allreduce tensor shapes"))
