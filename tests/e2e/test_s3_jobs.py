"""Channels in S3: the bytes go from a moto server to whoever prepares input, and every process ends as it should."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_job import LocalJob
from namespace_hosts import run
from s3_server import S3Server
from sagemaker_cluster import SageMakerCluster

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

JOB = f"{Path(__file__).parent / 'jobs' / 'records.py'}:job"
CONTAINER_ENDPOINT = "169.254.170.2"  # fixed by AWS
ADDRESS = "s3://data/records/train"
SHARDS, ROWS, BATCH = 6, 480, 8
ALL = dict.fromkeys(range(ROWS), 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.put("data", {"records/train/.hidden": b"no records", "records/other/x": b"no records"})
        server.write_records(ADDRESS, SHARDS, ROWS)
        yield server


@pytest.fixture
def records(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a job that reads them; its hosts find the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return [f"--channel=training={ADDRESS}", "--ranks-per-host=1", "--workers-per-host=1", "--lease-s=5"]


@pytest.mark.parametrize(("engine", "data_hosts"), [("tf_data", 2), ("grpc", 2), ("local", 0)])
def test_every_row_in_s3_is_seen_once_and_every_host_ends_with_0(
    tmp_path: Path, records: list[str], engine: str, data_hosts: int
) -> None:
    with LocalJob(tmp_path, data_hosts, 1, [*records, f"--engine={engine}", "--epochs=2"], job=JOB) as job:
        assert set(job.start().wait().values()) == {0}, job.outputs()
        assert [job.rows(epoch, ranks=1) for epoch in range(2)] == [ALL, ALL]
        assert "pure virtual" not in job.outputs()
        assert job.summary()["rows"] == 2 * ROWS
        assert job.summary()["lost_workers"] == 0


def test_a_worker_that_is_killed_while_it_reads_s3_costs_no_row_and_doubles_none(
    tmp_path: Path, records: list[str]
) -> None:
    options = [*records, "--engine=grpc", "--workers-per-host=2", "--prepare-s=0.1"]
    with LocalJob(tmp_path, 1, 1, options, job=JOB) as job:
        job.start().wait_for_steps(6)
        job.kill("data-1", "worker-0")
        assert len(job.seen(0)) < ROWS // BATCH, "the epoch was over"
        assert set(job.wait().values()) == {0}, job.outputs()
        assert job.rows(0, ranks=1) == ALL
        assert (job.summary()["lost_workers"], job.summary()["rows_lost"]) == (1, 0)


@contextlib.contextmanager
def container_endpoint(cluster: SageMakerCluster, folder: Path, credentials: dict[str, str]) -> Iterator[None]:
    """Serve credentials where containers of AWS ask for them, which is how a job on SageMaker comes by its role's."""
    (folder / "served").mkdir()
    (folder / "served" / "credentials").write_text(json.dumps(credentials))
    run(*cluster.hosts.on_switch(["ip", "addr", "add", f"{CONTAINER_ENDPOINT}/32", "dev", "br0"]))
    argv = [
        sys.executable,
        "-m",
        "http.server",
        "80",
        "--bind",
        CONTAINER_ENDPOINT,
        "--directory",
        str(folder / "served"),
    ]
    server = subprocess.Popen(cluster.hosts.on_switch(argv), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        assert server.poll() is None
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("engine", "slowly"),  # so that there is work left when the second data host is up
    [("tf_data", {"step-s": 0.1}), ("grpc", {"prepare-s": 0.2})],
    ids=["tf_data", "grpc"],
)
def test_under_sagemaker_data_hosts_read_s3_by_their_role_while_the_trainer_has_no_files(
    tmp_path: Path, engine: str, slowly: dict[str, float]
) -> None:
    options = {"engine": engine, "channel": f"training={ADDRESS}", "epochs": 2, "workers-per-host": 1, **slowly}
    variables = {"S3_ENDPOINT": "http://outside:5000", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/credentials"}
    with contextlib.ExitStack() as stack:
        cluster = SageMakerCluster(tmp_path, 2, 1, "records.py", options, environment=variables)
        stack.enter_context(cluster)
        wrap = cluster.hosts.on_switch([])
        server = stack.enter_context(S3Server(tmp_path, address=cluster.hosts.outside, port=5000, wrap=wrap))
        server.put("data", {})
        server.write_records(ADDRESS, SHARDS, ROWS)
        role = server.role("s3:List*", "s3:Get*")
        server.check_credentials()
        stack.enter_context(container_endpoint(cluster, tmp_path, role))
        cluster.start()
        ends = cluster.wait(150)
        assert {(end.code, end.success, end.failure) for end in ends.values()} == {(0, True, None)}, cluster.logs()
        assert [cluster.rows(epoch) for epoch in range(2)] == [ALL, ALL]
        assert all(not list((cluster.folder(host) / "input" / "data").iterdir()) for host in ends)
        assert (cluster.folder(cluster.chief) / "model" / "model.json").exists()
        readers = {line.split()[0] for line in server.log.splitlines() if f"GET /{ADDRESS[5:]}/part" in line}
        assert readers == {cluster.hosts[host].address for host in cluster.data_hosts}
        assert all("pure virtual" not in cluster.log(host) for host in ends)
