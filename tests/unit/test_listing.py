"""Who lists a job's splits: a host that has nothing to list, a data host in rank 0's stead, hosts that share out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from hetero import listing
from hetero._proto import splits_pb2 as pb
from hetero.channels import Channels, Place
from hetero.control.split_lists import HostList
from hetero.control.state import Outcome
from hetero.errors import EngineError, HeteroError, InputError, PeerFailed, PeerNeverCame
from hetero.host import LISTING_KEY, HostConfig
from hetero.job import Job
from hetero.listing import ListingServer, hand_over, list_for_tf_data, list_own, share
from hetero.settings import Settings
from hetero.topology import Host, Role, Topology

DATA = Host("algo-2", Role.DATA, "data_group", "127.0.0.1")
TRAINER = Host("algo-1", Role.TRAINER, "dnn_group", "127.0.0.1")


def config(current: Host, folder: Path, *, sharded: bool = False, **settings: Any) -> HostConfig:
    """Return the configuration of a host whose channel `training` lies in a folder, as on SageMaker."""
    base = folder / current.name / "input" / "data" / "training"
    base.mkdir(parents=True, exist_ok=True)
    return HostConfig(
        settings=Settings(job="job.py:job", channels={"training": str(base)}, **settings),
        topology=Topology(current, (DATA,), (TRAINER,), None, "", container=True),
        engine="tf_data",
        job_name="files",
        run_dir=str(folder),
        run_id="r",
        control_address="",
        started_s=0.0,
        sharded_channels=("training",) if sharded else (),
    )


def put(host: HostConfig, *names: str) -> list[str]:
    """Make files in a host's channel and return their paths."""
    paths = [Path(host.settings.channels["training"]) / name for name in names]
    for path in paths:
        path.touch()
    return [str(path) for path in paths]


class FakeControl:
    """Where rank 0 publishes; a thread that stands for the data host hands something over."""

    def __init__(self, host: HostConfig, answer: pb.SplitList) -> None:
        self._host, self._answer = host, answer
        self.published: list[str] = []
        self.ends: list[tuple[Outcome, Any]] = []

    def publish(self, name: str, address: str) -> None:
        self.published.append(name)
        threading.Thread(target=hand_over, args=(address, self._answer, self._host), daemon=True).start()

    def end_training(self, outcome: Outcome, cause: Any) -> None:
        self.ends.append((outcome, cause))


class NoControl:
    """Fails where anything is asked of it."""


def nothing_ended() -> None:
    """Stand for a job that goes on."""


# A host without a file


def test_a_host_without_a_file_of_a_sharded_channel_lists_nothing_and_says_so(tmp_path: Path, capsys: Any) -> None:
    here = config(DATA, tmp_path, sharded=True)
    assert list_own(Job("files"), here) == []
    said = capsys.readouterr().out
    assert said.startswith("warning: algo-2 has nothing to prepare. Channel 'training' ")
    files = put(here, "b", "a")
    assert list_own(Job("files"), here) == sorted(files)


def test_any_other_host_without_a_file_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no files on host algo-2"):
        list_own(Job("files"), config(DATA, tmp_path))


def test_an_error_of_the_jobs_code_is_not_taken_for_an_empty_share(tmp_path: Path) -> None:
    job, here = Job("files"), config(DATA, tmp_path, sharded=True)
    job.splits(lambda _ctx: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list_own(job, here)


# tf_data


def test_rank_0_lists_what_its_host_has(tmp_path: Path) -> None:
    here = config(TRAINER, tmp_path)
    files = put(here, "a", "b")
    assert list_for_tf_data(Job("files"), here, NoControl(), nothing_ended) == files


def test_a_data_host_lists_where_the_host_of_rank_0_lacks_the_channel(tmp_path: Path, capsys: Any) -> None:
    here, there = config(TRAINER, tmp_path, token="secret"), config(DATA, tmp_path, token="secret")
    files = put(there, "a", "b")
    control = FakeControl(there, listing.as_sent(list_own(Job("files"), there), there.channels()))
    assert list_for_tf_data(Job("files"), here, control, nothing_ended) == files
    assert control.published == [LISTING_KEY]
    assert "data host algo-2 lists the splits, since algo-1 cannot: " in capsys.readouterr().out


def test_a_failure_there_ends_the_job_with_its_cause(tmp_path: Path) -> None:
    here, there = config(TRAINER, tmp_path), config(DATA, tmp_path)
    cause = {"host": "algo-2", "process": "lister", "time_s": 1.0, "exception": "ValueError", "message": "odd"}
    control = FakeControl(there, pb.SplitList(cause_json=json.dumps(cause)))
    with pytest.raises(PeerFailed, match=r"could not be listed: ValueError: odd \(lister on algo-2\)"):
        list_for_tf_data(Job("files"), here, control, nothing_ended)
    assert control.ends == [(Outcome.FAILED, cause)]


def test_an_error_that_has_nothing_to_do_with_channels_is_rank_0s_own(tmp_path: Path) -> None:
    job = Job("files")
    job.splits(lambda _ctx: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list_for_tf_data(job, config(TRAINER, tmp_path), NoControl(), nothing_ended)


def test_what_ends_the_job_ends_the_wait(tmp_path: Path) -> None:
    class Silent(FakeControl):
        def publish(self, name: str, address: str) -> None:
            """Tell nobody."""

    def ended() -> None:
        raise PeerFailed("the job has ended")

    here = config(TRAINER, tmp_path)
    with pytest.raises(PeerFailed, match="the job has ended"):
        list_for_tf_data(Job("files"), here, Silent(here, pb.SplitList()), ended)


@pytest.mark.parametrize("lister", ["rank 0", "a data host"])
def test_files_that_each_host_has_its_own_of_are_refused(tmp_path: Path, lister: str) -> None:
    here, there = config(TRAINER, tmp_path, sharded=True), config(DATA, tmp_path, sharded=True)
    put(here if lister == "rank 0" else there, "a")
    control: Any = NoControl()
    if lister != "rank 0":
        control = FakeControl(there, listing.as_sent(list_own(Job("files"), there), there.channels()))
    with pytest.raises(EngineError) as refused:
        list_for_tf_data(Job("files"), here, control, nothing_ended)
    assert str(refused.value) == (
        "Channel 'training' is ShardedByS3Key: each data host has files that the others lack, but under tf_data any "
        "worker may be given any file. Let it be FullyReplicated, or give --engine grpc."
    )


def test_a_file_that_no_data_host_has_is_explained() -> None:
    place = Place("algo-1", "dnn_group", ("data_group", "dnn_group"))
    channels = Channels({"training": "/opt/ml/input/data/training"}, place=place)
    error = InputError("The job's input failed (NotFoundError): /opt/ml/input/data/training/a; No such file")
    explained = listing.explained(error, channels)
    assert str(explained).startswith(f"{error} It was listed on host algo-1 of group 'dnn_group', but the data hosts")
    for other in (InputError("NotFoundError: /elsewhere/a"), HeteroError(str(error)), InputError("odd")):
        assert listing.explained(other, channels) is other


# Handing over


@pytest.fixture
def server() -> Iterator[ListingServer]:
    started = ListingServer("secret", "127.0.0.1")
    yield started
    started.stop()


def test_whoever_has_not_the_token_is_refused(server: ListingServer, tmp_path: Path) -> None:
    address = f"127.0.0.1:{server.port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/hetero.v1.Listing/Hand")(b"\xff", timeout=5.0)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    hand_over(address, pb.SplitList(values=['"a"']), config(DATA, tmp_path, token="secret"))
    assert list(server.wait(nothing_ended).values) == ['"a"']


def test_a_list_that_nobody_takes_is_given_up_in_time(tmp_path: Path) -> None:
    with pytest.raises(PeerNeverCame, match=r"Rank 0 at 127\.0\.0\.1:1 did not take the list of splits: "):
        hand_over("127.0.0.1:1", pb.SplitList(), config(DATA, tmp_path, start_timeout_s=0.2))


def test_a_list_of_many_megabytes_arrives(server: ListingServer, tmp_path: Path) -> None:
    values = ["x" * 1_000_000] * 10
    hand_over(f"127.0.0.1:{server.port}", pb.SplitList(values=values), config(DATA, tmp_path, token="secret"))
    assert list(server.wait(nothing_ended).values) == values


# local


def test_ranks_share_their_hosts_own_splits_and_those_of_all() -> None:
    own = {"a": HostList(('"a1"', '"all"', '"a2"', '"a3"'), dict.fromkeys((0, 2, 3), "training"))}
    own |= {"b": HostList(('"all"', '"b1"'), {1: "training"})}
    places = [("a", (0, 3), (0, 2)), ("a", (1, 3), (1, 2)), ("b", (2, 3), (0, 1))]
    assert [share(own, *place) for place in places] == [["all", "a1", "a3"], ["a2"], ["b1"]]
