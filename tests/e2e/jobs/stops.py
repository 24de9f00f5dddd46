"""A job of the tests that is stopped: weights that rank 0 saves, and ranks that wait for each other in every step.

The weights are two numbers, raised one after the other in each step with a pause between them, so that only those of
whole steps are equal. A step ends with a byte from every other rank, which breaks off when that one ends, as a
collective does.

Options: half_s (half of a step), hang_step and hang (rank 0 waits for ever then: for `input`, or in a `collective`),
saves (`well`, `slowly`: longer than any grace, `badly`: it raises, `never`: none is registered).
"""

import ctypes
import json
import os
import socket
import time

import numpy as np

import hetero

job = hetero.Job(
    "stops", engine="grpc", framework="torch", batch_size=8, half_s=0.05, hang_step=-1, hang="collective", saves="well"
)


@job.splits
def splits(_ctx):
    return list(range(20))


@job.inputs
def inputs(ctx):
    for number, split in enumerate(ctx.splits):
        for start in range(0, 80, 8):
            if ctx.params["hang"] == "input" and (split + number) * 10 + start // 8 == ctx.params["hang_step"]:
                time.sleep(1000)
            yield np.arange(start, start + 8) + split * 80


class Ring:
    """Rank 0 and the others, over TCP: `meet` returns when all are there and raises once one is gone."""

    def __init__(self, ctx):
        self.peers = []
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if ctx.rank:
            deadline = time.monotonic() + 10
            while not self.peers:
                try:
                    self.peers.append(socket.create_connection(address))
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
        elif ctx.size > 1:
            with socket.create_server(address) as server:
                self.peers = [server.accept()[0] for _ in range(ctx.size - 1)]

    def meet(self):
        for peer in self.peers:
            peer.sendall(b".")
        for peer in self.peers:
            if not peer.recv(1):
                raise ConnectionError("connection closed by peer")


def wait_in_a_library():
    """Block the main thread where no Python runs."""
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


@job.train
def train(ctx):
    weights = [0, 0]

    def save():
        if ctx.params["saves"] == "slowly":
            time.sleep(1000)
        if ctx.params["saves"] == "badly":
            raise OSError(28, "No space left on device")
        (ctx.checkpoint_dir / f"weights-{ctx.rank}.json").write_text(json.dumps(weights))

    if ctx.params["saves"] != "never":
        ctx.on_stop(save)
    ring, steps = Ring(ctx), 0
    with (ctx.run_dir / f"seen-{ctx.rank}.jsonl").open("w") as seen:
        for epoch in ctx.epochs():
            for batch in ctx.batches(epoch):
                weights[0] += 1
                time.sleep(ctx.params["half_s"])
                if ctx.is_chief and steps == ctx.params["hang_step"] and ctx.params["hang"] == "collective":
                    weights[1] += 1  # what a rank waits for in a collective leaves its weights alone
                    seen.write(json.dumps({"epoch": epoch, "rows": batch.tolist()}) + "\n")
                    seen.flush()
                    wait_in_a_library()
                time.sleep(ctx.params["half_s"])
                weights[1] += 1
                ring.meet()
                seen.write(json.dumps({"epoch": epoch, "rows": batch.tolist()}) + "\n")
                seen.flush()
                steps += 1
