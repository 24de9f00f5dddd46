"""S3 for tests: a moto server in a process of its own, and programs that use it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables with which tensorflow-io and the AWS SDKs use that server, and ask nobody else."""
    return {
        "S3_ENDPOINT": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3Server:
    """A server that listens when `start` has returned. Use as a context manager: leaving it ends the server.

    Args:
        folder: Scratch folder, for what it prints.
        address: Where it listens.
        port: Its port; 0 takes a free one.
        wrap: What its command line, and that of `run`, begins with: to start them somewhere else.
        options: More variables of its environment.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        wrap: Sequence[str] = (),
        options: dict[str, str] | None = None,
    ) -> None:
        self._log, self._wrap, self._options = folder / "moto.log", tuple(wrap), options or {}
        self._address, self._port = address, port or _free_port()
        self.endpoint = f"http://{address}:{self._port}"

    def __enter__(self) -> S3Server:  # noqa: PYI034
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._wrap, sys.executable, "-m", "moto.server", "-H", self._address, "-p", str(self._port)],
                env={**os.environ, **self._options},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 60
        while b"Running on" not in self._log.read_bytes():
            alive = self._process.poll() is None and time.monotonic() < deadline
            assert alive, f"moto does not come up: {self._log.read_text(errors='replace')}"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    @property
    def environment(self) -> dict[str, str]:
        """See the function of this name."""
        return environment(self.endpoint)

    @property
    def log(self) -> str:
        """Return what it printed: a line for each request."""
        return self._log.read_text(errors="replace")

    def request(self, method: str, path: str, body: bytes = b"") -> int:
        """Ask the server something and return the status; path: `/bucket`, `/bucket/key`, or with a query."""
        where, question, query = path.partition("?")
        url = self.endpoint + urllib.parse.quote(where) + question + query
        if self._wrap:
            done = self.run(_REQUEST, method, url, body.hex())
            assert done.returncode == 0, done.stderr
            return int(done.stdout)
        return _ask(method, url, body)

    def put(self, bucket: str, objects: dict[str, bytes]) -> None:
        """Make a bucket with these objects; more of them if it is there."""
        assert self.request("PUT", f"/{bucket}") == 200
        for key, content in objects.items():
            assert self.request("PUT", f"/{bucket}/{key}", content) == 200, key

    def run(
        self, program: str, *arguments: str, timeout_s: float = 60.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program that uses the server, and return how it ended."""
        return subprocess.run(
            [*self._wrap, sys.executable, "-c", textwrap.dedent(program), *arguments],
            env={**os.environ, **self.environment, "PYTHONPATH": str(REPOSITORY), **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def role(self, *actions: str) -> dict[str, str]:
        """Make a role that may do this and no more; return credentials as a container's endpoint gives them."""
        done = self.run(_MAKE_ROLE, *actions)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def check_credentials(self) -> None:
        """Refuse from now on what no role allows."""
        assert self.request("POST", "/moto-api/reset-auth", b"0") == 200

    def write_records(self, address: str, shards: int, rows: int) -> None:
        """Write TFRecords to S3: features `row`, counted over all shards, and `picture`, 16 bytes of row % 256."""
        done = self.run(_WRITE_RECORDS, address, str(shards), str(rows))
        assert done.returncode == 0, done.stderr


def _ask(method: str, url: str, body: bytes) -> int:
    # Without a type of its own urllib says that it is a form, and moto takes it as one.
    asked = urllib.request.Request(url, body, {"Content-Type": "application/octet-stream"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


_REQUEST = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from s3_server import _ask
    print(_ask(*sys.argv[1:3], bytes.fromhex(sys.argv[3])))
"""


class Programs:
    """Python programs, each a process of its own that has TensorFlow and `s3.register()` from the start.

    They are forked by one process, which pays for that once and never uses S3 itself. Use as a context manager.
    """

    def __enter__(self) -> Programs:  # noqa: PYI034
        self._parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_FORK)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.kill()
        self._parent.communicate(timeout=10)

    def run(self, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program with these variables and return how it ended; it has a minute."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps([textwrap.dedent(program), variables]), file=self._parent.stdin, flush=True)
        return subprocess.CompletedProcess(program, *json.loads(self._parent.stdout.readline()))


_FORK = """
    import json, os, signal, sys, tempfile
    from hetero.inputs import s3

    s3.register()
    for line in sys.stdin:
        program, variables = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            pid = os.fork()
            if pid == 0:
                os.dup2(output.fileno(), 1), os.dup2(errors.fileno(), 2)
                os.environ.update(variables)
                signal.alarm(60)
                exec(compile(program, "program", "exec"), {"__name__": "__main__"})
                sys.exit()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (output, errors)]
        print(json.dumps([code, *said]), flush=True)
"""


_WRITE_RECORDS = """
    import sys
    import numpy as np
    from hetero.inputs import tfrecord

    address, shards, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    examples = ({"row": row, "picture": np.full(16, row % 256, np.uint8)} for row in range(rows))
    paths = tfrecord.write_tfrecords(examples, address, shards)
    assert len(paths) == shards and all(path.startswith(address) for path in paths)
"""


_MAKE_ROLE = """
    import boto3, json, os, sys

    def client(name):
        return boto3.client(name, region_name="us-east-1", endpoint_url=os.environ["S3_ENDPOINT"])

    name = "role-" + "-".join(action.partition(":")[2] for action in sys.argv[1:])
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    policy = {"Effect": "Allow", "Action": sys.argv[1:], "Resource": "*"}
    trust, policy = (json.dumps({"Version": "2012-10-17", "Statement": [each]}) for each in (trust, policy))
    arn = client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    client("iam").put_role_policy(RoleName=name, PolicyName="policy", PolicyDocument=policy)
    found = client("sts").assume_role(RoleArn=arn, RoleSessionName="session")["Credentials"]
    print(json.dumps({
        "RoleArn": arn,
        "AccessKeyId": found["AccessKeyId"],
        "SecretAccessKey": found["SecretAccessKey"],
        "Token": found["SessionToken"],
        "Expiration": found["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
    }))
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
