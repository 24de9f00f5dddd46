"""`s3://` through tensorflow-io against a moto server: listing, reading, what is said when it fails, how processes end.

Nothing here uses S3 in the tests' own process: what does so is a program of its own, whose end is part of the test.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from feed_cluster import FeedCluster
from s3_server import Programs, S3Server
from test_tf_service import Cluster, Reader

from hetero.errors import EngineError

pytestmark = pytest.mark.slow

SHARDS, ROWS = 4, 200
MANY = 1_203  # more than the 100 that tensorflow-io asks for at once, and than the 1,000 that S3 gives
ADDRESS = "s3://records/train"
PATHS = [f"{ADDRESS}/part-{number:05}-of-{SHARDS:05}.tfrecord" for number in range(SHARDS)]
JOB = f"{Path(__file__).parents[1] / 'e2e' / 'jobs' / 'records.py'}:job"
READ = "import tensorflow as tf; assert tf.io.gfile.GFile('s3://files/other/x').read() == 'other/x'; print('well')\n"
KEYS = [
    "train/b.txt",
    "train/a b+c%é&.txt",
    "train/both",
    "train/both/inner",
    "train/sub/deep/c.txt",
    "train/empty",
    "train/.hidden",
    "train/.folder/x",
    "train/marked/",
    "train/sub/",
    "train/double//x",
    "train-2/x",
    "other/x",
]
SHOWN = ["train/a b+c%é&.txt", "train/b.txt", "train/both", "train/both/inner", "train/empty", "train/sub/deep/c.txt"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.put("files", {key: b"" if key.endswith(("/", "empty")) else key.encode() for key in KEYS})
        server.put("empty", {})
        server.put("many", {f"flat/{number:06}": b"x" for number in range(MANY)})
        server.put("records", {})
        server.write_records(ADDRESS, SHARDS, ROWS)
        yield server


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with Programs() as made:
        yield made


Answers = dict[str, Any]


def answers(programs: Programs, environment: dict[str, str], asked: dict[str, str]) -> Answers:
    """Evaluate expressions in one program; an InputError comes as its text."""
    done = programs.run(
        f"""
        import json, time
        from hetero.data.local import LocalSource
        from hetero.errors import InputError
        from hetero.inputs import idx, s3, tfrecord
        from hetero.job import InputContext, Job

        def answer(expression):
            try:
                return eval(expression)
            except InputError as error:
                return str(error)

        asked = json.loads({json.dumps(asked)!r})
        print(json.dumps({{name: answer(expression) for name, expression in asked.items()}}))
        """,
        **environment,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# --- how processes end ------------------------------------------------------------------------------------------------


def test_the_trap_a_plain_program_that_has_read_s3_aborts_at_its_own_end(server: S3Server) -> None:
    done = server.run(f"import tensorflow_io; {READ}import sys; sys.exit(3)")
    assert done.stdout == "well\n", done.stderr
    assert done.returncode == -signal.SIGABRT, "tensorflow-io has mended this: what works around it can go"
    assert "pure virtual method called" in done.stderr


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("", 0),
        ("raise ValueError('on purpose')", 1),
        ("import os, signal; signal.signal(signal.SIGTERM, lambda *_: exit(9)); os.kill(os.getpid(), 15)", 9),
        ("import ctypes; ctypes.CDLL(None).exit(7)", 7),
    ],
    ids=["sys.exit", "last line", "exception", "signal handler", "C's exit"],
)
def test_after_register_a_program_ends_with_its_own_code(
    server: S3Server, programs: Programs, ending: str, code: int
) -> None:
    done = programs.run(READ + ending, PYTHONUNBUFFERED="1", **server.environment)
    assert done.returncode == code, done.stderr
    assert "pure virtual" not in done.stderr


def test_what_waits_to_be_written_and_what_waits_for_the_end_are_not_lost(server: S3Server, programs: Programs) -> None:
    ends = 'import atexit, ctypes; atexit.register(print, "Python\'s end"); ctypes.CDLL(None).printf(b"C\'s stream\\n")'
    done = programs.run(READ + ends, **server.environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["C's stream", "Python's end", "well"]


def test_a_process_that_a_job_spawns_ends_with_its_own_code(server: S3Server, tmp_path: Path) -> None:
    program = tmp_path / "spawns.py"
    program.write_text(f"""
import multiprocessing, sys
def child():
    from hetero.inputs import s3; s3.register(); {READ}
    sys.exit(5)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start(); process.join()
    print(process.exitcode)
""")
    path = str(program)
    done = server.run(
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')", path
    )
    assert done.stdout == "well\n5\n", done.stderr


def test_the_processes_of_hetero_leave_with_their_own_code_whoever_loaded_tensorflow_io(server: S3Server) -> None:
    done = server.run(f"import tensorflow_io; {READ}from hetero.process.leaving import leave; leave(7)")
    assert (done.returncode, done.stdout) == (7, "well\n"), done.stderr
    assert "pure virtual" not in done.stderr


# --- listing ----------------------------------------------------------------------------------------------------------


def test_a_prefix_gives_its_objects_sorted_and_nothing_that_is_no_file(server: S3Server, programs: Programs) -> None:
    context = "InputContext(channels={'training': 's3://files/train', 'one': 's3://files/other/x'})"
    asked = {
        "prefix": "s3.files('s3://files/train')",
        "slash": "s3.files('s3://files/train/')",
        "bucket": "s3.files('s3://files')",
        "object": "s3.files('s3://files/train/b.txt')",
        "channel": f"{context}.channel_files('training')",
        "one": f"{context}.channel_files('one')",
        "splits": f"Job('x').list_splits({context})",
    }
    found = answers(programs, server.environment, asked)
    below = [f"s3://files/{key}" for key in SHOWN]
    assert found["prefix"] == found["slash"] == found["channel"] == found["splits"] == below
    assert found["bucket"] == sorted([*below, "s3://files/other/x", "s3://files/train-2/x"])
    assert found["object"] == ["s3://files/train/b.txt"]
    assert found["one"] == ["s3://files/other/x"]


def test_a_prefix_may_have_more_objects_than_s3_lists_at_once(server: S3Server, programs: Programs) -> None:
    found = answers(programs, server.environment, {"flat": "s3.files('s3://many')"})
    assert found["flat"] == [f"s3://many/flat/{number:06}" for number in range(MANY)]


def test_what_is_wrong_with_an_address_is_said_with_bucket_prefix_and_next_step(
    server: S3Server, programs: Programs
) -> None:
    asked = {
        "prefix": "InputContext(channels={'training': 's3://files/trian'}).channel_files('training')",
        "near": "s3.files('s3://files/tra')",
        "pattern": "s3.files('s3://files/train/*.txt')",
        "empty": "s3.files('s3://empty')",
        "bucket": "s3.files('s3://nobucket/train')",
        "object": "s3.read_bytes('s3://files/gone').decode()",
        "written": "tfrecord.write_tfrecords([{'row': 1}], 's3://nobucket/x', 1)",
    }
    said = answers(programs, server.environment, asked)
    assert said["prefix"].startswith("Channel 'training': s3://files/trian: bucket 'files' has no object below")
    assert "the prefix 'trian/'" in said["prefix"]
    assert "Correct it, or put the data there." in said["prefix"]
    assert "beside it are train, train-2." in said["near"]
    assert "A prefix is no pattern: name the folder." in said["pattern"]
    assert "bucket 'empty' has no object" in said["empty"]
    assert f"there is no bucket 'nobucket' at S3_ENDPOINT {server.endpoint}" in said["bucket"]
    assert "Correct the address" in said["bucket"]
    assert "s3://files/gone cannot be read: there is no such object" in said["object"]
    assert "s3://nobucket/x cannot be written: there is no bucket 'nobucket'" in said["written"]


def keys(role: dict[str, str]) -> dict[str, str]:
    """Return a role's credentials as variables."""
    names = {
        "AWS_ACCESS_KEY_ID": "AccessKeyId",
        "AWS_SECRET_ACCESS_KEY": "SecretAccessKey",
        "AWS_SESSION_TOKEN": "Token",
    }
    return {variable: role[field] for variable, field in names.items()}


def test_denied_access_is_called_so_whether_to_the_list_or_to_the_objects(tmp_path: Path, programs: Programs) -> None:
    with S3Server(tmp_path) as server:
        server.put("files", {"train/x": b"x"})
        variables: dict[str, dict[str, str]] = {"neither": {}}
        for name, actions in {"list": ["List"], "read": ["Get"], "both": ["List", "Get"]}.items():
            variables[name] = keys(server.role(*(f"s3:{action}*" for action in actions)))
        server.check_credentials()
        asked = {"x": "s3.files('s3://files/train')"}
        said = {name: answers(programs, {**server.environment, **more}, asked)["x"] for name, more in variables.items()}
    assert said["both"] == ["s3://files/train/x"]
    for name in ("neither", "list", "read"):
        assert f"s3://files/train cannot be listed: S3_ENDPOINT {server.endpoint} denies access" in said[name], name
        assert "s3:ListBucket on bucket 'files' and s3:GetObject on 'train/*'" in said[name]


# --- servers that do not answer ---------------------------------------------------------------------------------------

ONCE = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "1"}


def test_a_server_that_is_not_there_is_named_with_what_to_look_at(server: S3Server, programs: Programs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        variables = {**server.environment, **ONCE, "S3_ENDPOINT": endpoint}
        said = answers(programs, variables, {"x": "s3.files('s3://files/train')"})["x"]
    assert f"S3_ENDPOINT {endpoint} does not answer" in said
    assert "correct S3_ENDPOINT" in said
    assert "Without http:// it means https://." in said


def test_a_server_that_says_nothing_is_given_up_after_seconds_and_not_after_five_minutes(
    server: S3Server, programs: Programs
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        asked = {"begun": "time.monotonic()", "x": "s3.files('s3://files/train')", "ended": "time.monotonic()"}
        said = answers(programs, {**server.environment, **ONCE, "S3_ENDPOINT": endpoint}, asked)
    assert f"S3_ENDPOINT {endpoint} does not answer" in said["x"]
    assert 8 < said["ended"] - said["begun"] < 50


# --- the engines ------------------------------------------------------------------------------------------------------


def rows_dataset() -> tf.data.Dataset:
    """The row numbers; made without S3."""
    feature = {"row": tf.io.FixedLenFeature([], tf.int64)}
    records = tf.data.Dataset.from_tensor_slices(PATHS).interleave(tf.data.TFRecordDataset)
    return records.map(lambda record: tf.io.parse_single_example(record, feature)["row"]).batch(8)


def test_tf_data_workers_read_s3_and_end_by_the_signal_that_ends_them(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as undo:
        cluster = Cluster(tmp_path, workers=2)
        undo.callback(cluster.stop)
        assert sorted(Reader(cluster.open("rows", rows_dataset())).rows(40)) == list(range(ROWS))
        undo.pop_all()
        for each in (*cluster.workers, cluster.dispatcher):
            each.process.terminate()
            assert each.process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize(
    "package", ["raise ModuleNotFoundError(\"No module named 'tensorflow_io'\")", ""], ids=["missing", "unfit"]
)
def test_a_tf_data_worker_without_tensorflow_io_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / "tensorflow_io").mkdir()
    (tmp_path / "tensorflow_io" / "__init__.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cluster = Cluster(tmp_path / "cluster", workers=1)
    try:
        said = r"data host.*'s3' not implemented.*tensorflow-io is missing there.*Install the release"
        with pytest.raises(EngineError, match=said):
            Reader(cluster.open("rows", rows_dataset())).rows(40)
    finally:
        cluster.stop()


def test_grpc_workers_read_s3(server: S3Server, tmp_path: Path) -> None:
    def work(connected: Any) -> list[int]:
        with connected.stream(epochs=1, remainder="pad") as stream:
            return [int(row) for batch in stream.batches(0) for row in batch.data["row"][batch.mask]]

    options = {"channels": {"training": ADDRESS}, "batch_size": 8, "params": {"prepare_s": 0.0}}
    with FeedCluster(tmp_path, JOB, data_hosts=1, options=options, environment=server.environment) as cluster:
        (found,) = cluster.run(work)
        assert isinstance(found, list), f"{found!r}\n{cluster.outputs()}"
        assert sorted(found) == list(range(ROWS))


def test_the_local_engine_and_the_helpers_for_file_formats_read_s3(server: S3Server, programs: Programs) -> None:
    server.put("idx", {"labels": b"\0\0\x08\x01" + (3).to_bytes(4, "big") + bytes([4, 5, 6])})
    spec = "{'row': tfrecord.scalar('int64')}"
    records = f"tfrecord.read({PATHS}).map(lambda record: tfrecord.parse(record, {spec})).batch(8)"
    asked = {
        "local": f"sorted(int(row) for batch in LocalSource({records}) for row in batch['row'])",
        "again": f"tfrecord.write_tfrecords([], {ADDRESS!r}, {SHARDS})",
        "idx": "idx.read('s3://idx/labels').tolist()",
    }
    found = answers(programs, server.environment, asked)
    assert found["local"] == list(range(ROWS))
    assert found["again"] == PATHS, "shards that are there are left as they are"
    assert found["idx"] == [4, 5, 6]
