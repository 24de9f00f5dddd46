"""Local workers as the coordinator sees them: hosts that train and help, whose feeds the job can do without."""

from __future__ import annotations

import pytest
from control_running import DEADLINE_S, wait_until
from split_bench import Bench
from split_peers import Peers

from hetero._proto import splits_pb2 as pb
from hetero.control.split_epoch import Report
from hetero.control.split_journal import Memory
from hetero.control.splits import SplitBook
from hetero.control.state import HostReport, Outcome, ProcessReport

HELPING = (ProcessReport("rank-0", 7, "running"), ProcessReport("worker-0", 8, "running"))
RESTARTING = (ProcessReport("rank-0", 7, "running"), ProcessReport("worker-0", 0, "waiting"))
GIVEN_UP = (ProcessReport("rank-0", 7, "running"), ProcessReport("worker-0", 0, "failed"))


# --- when a job ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [HELPING, RESTARTING])
def test_a_job_goes_on_with_local_workers_alone_until_they_are_gone_too(make_job, processes):
    job = make_job()
    job.start()
    job.beat("t2", ranks=1, workers_alive=1, processes=processes)
    job.beat("d2", workers_gone_for_good=True)
    job.beat("d1", workers_gone_for_good=True)
    job.pass_time(100)
    assert not job.state.ended
    job.beat("t2", ranks=1, workers_gone_for_good=True, processes=GIVEN_UP)
    outcome, message = job.end
    assert outcome is Outcome.DATA_LOST
    assert "d1 has no worker left" in message


def test_not_without_the_first_data_host(make_job):
    job = make_job()
    job.start()
    job.beat("t2", ranks=1, workers_alive=1, processes=HELPING)
    job.leave("d1", "SIGTERM")
    assert job.end[0] is Outcome.DATA_LOST


def test_local_workers_do_not_count_before_training_so_that_what_no_data_host_can_do_is_said_at_once(make_job):
    job = make_job()
    job.come("d1", "d2", "t1", "t2")
    job.beat("t2", ranks=1, workers_alive=1, processes=HELPING)
    assert not job.state.ended
    for host in ("d1", "d2"):
        job.fail(host, "no module named cv2")
        job.beat(host, workers_gone_for_good=True)
    assert job.end == (Outcome.DATA_LOST, "no module named cv2")


def test_a_trainer_host_that_has_given_its_workers_up_is_not_lost(make_job):
    job = make_job()
    job.start()
    job.beat("t2", ranks=1, workers_lost=6, workers_gone_for_good=True, processes=GIVEN_UP)
    job.pass_time(20)
    assert not job.state.ended
    host = job.state.host("t2")
    assert (host.lost, host.workers_gone_for_good, host.workers_lost) == (False, True, 6)


# --- splits -----------------------------------------------------------------------------------------------------------


class LocalBench(Bench):
    """As `Bench`, and the trainer hosts `t1` and `t2` may have feeds too."""

    def begin_again(self, memory: Memory | None = None, first_attempt: int = 0, **options: object) -> None:
        self.book = SplitBook(
            ("d1", "d2", "t1", "t2"),
            listers=("d1", "d2"),
            clock=self.clock,
            memory=memory,
            first_attempt=first_attempt,
            **options,
        )
        self.book.set_hosts({"d1", "d2"}, ())
        if self.splits is not None and self.book.values is None:
            self.book.feed_list("d1", [f'"{split}"' for split in range(self.splits)])


def test_a_local_feed_gets_splits_and_what_is_not_wanted_by_data_hosts():
    bench = LocalBench(splits=4)
    bench.feed("t1", 3)
    bench.feed("d1", 1)
    bench.open(0)
    assert bench.given("d1") == [(0, 0)]
    assert bench.given("t1") == [(0, 1), (0, 2), (0, 3)]
    bench.done("t1", *bench.keys)
    assert 0 in bench.book.epochs


def test_its_splits_go_back_when_its_host_gives_its_workers_up():
    bench = LocalBench(splits=2)
    bench.open(0)
    bench.feed("t1", 2)
    bench.given("t1")
    attempts = [key.attempt for key in bench.keys]
    bench.feed("d1", 2)
    bench.book.set_hosts({"d1", "d2", "t1"}, {"t1"})
    assert sorted(key.attempt for key in bench.book.feed_mail("t1").revoked) == attempts
    assert bench.given("d1") == []
    assert [fence.splits for fence in bench.answer({0: {1: b"\x05"}})] == [[0, 1], [0, 1]]
    assert bench.given("d1") == [(0, 0), (0, 1)]
    assert [one.arrived for one in bench.mail.assignments] == [b"", b"\x05"]
    bench.book.feed_wanted("t1", 9)
    bench.book.feed_report("t1", Report(bench.keys[0]._replace(attempt=attempts[0]), "done", 5))
    assert bench.given("t1") == []


def test_the_list_is_asked_of_data_hosts():
    bench = LocalBench(splits=None)
    bench.feed("t1", 8)
    assert not bench.book.feed_mail("t1").list_splits
    bench.feed("d2", 1)
    assert bench.book.feed_mail("d2").list_splits
    assert not bench.book.feed_mail("t1").list_splits


def test_the_list_is_asked_of_a_trainer_host_if_nobody_else_is_left():
    bench = LocalBench(splits=None)
    bench.feed("t1", 8)
    bench.book.set_hosts({"d1", "d2", "t1"}, {"d1"})
    assert not bench.book.feed_mail("t1").list_splits
    bench.book.set_hosts({"d1", "d2", "t1"}, {"d1", "d2"})
    assert bench.book.feed_mail("t1").list_splits


def test_a_later_coordinator_waits_for_the_feeds_of_trainer_hosts_only_where_there_are_some():
    for with_feed in (False, True):
        bench = LocalBench(splits=2)
        bench.begin_again(memory=bench.book.memory())
        bench.book.set_hosts({"d1", "d2", *(["t1"] if with_feed else [])}, ())
        bench.feed("d1", 1)
        bench.feed("d2")
        bench.ranks(0, highest_attempt=1)
        bench.answer()
        assert (bench.given("d1") == []) == with_feed
        bench.clock.now_s += 11
        bench.book.tick()
        bench.answer()
        assert with_feed == (bench.given("d1") == [(0, 0)])


# --- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture
def peers():
    started = Peers()
    yield started
    started.close()


def test_a_trainer_hosts_feed_serves_is_shown_and_is_done_without(start_coordinator, peers, make_client):
    server = start_coordinator(splits=True)
    for name in ("d1", "d2"):
        make_client(server.address, name).register(HostReport(workers_alive=1), DEADLINE_S)
    trainers = {name: make_client(server.address, name) for name in ("t1", "t2")}
    for trainer in trainers.values():
        trainer.register(HostReport(ranks=1, workers_alive=1, processes=HELPING), DEADLINE_S)
    trainers["t1"].publish("feed/t1", "127.0.0.1:9")
    rank = peers.rank(server.address)
    rank.follower.begin(0)
    lister = peers.feed(server.address, "d1", workers=0, values=['"a"', '"b"'])
    wait_until(lambda: lister.hellos, "the data host's feed")
    lister.say(pb.ServeRequest(list=pb.SplitList(values=lister.values)))
    local = peers.feed(server.address, "t1", workers=2)
    wait_until(lambda: len(local.held) == 2, "both splits at the trainer host")

    shown = make_client(server.address).input_state()
    assert [(host.host, host.connected) for host in shown.hosts] == [("d1", True), ("d2", False), ("t1", True)]

    other = peers.feed(server.address, "d2", workers=2)
    given_up = HostReport(ranks=1, workers_gone_for_good=True, processes=GIVEN_UP)
    trainers["t1"].register(given_up, DEADLINE_S)
    wait_until(lambda: len(other.held) == 2, "both splits at a data host")
    for split in (0, 1):
        other.finish(0, split)
    wait_until(lambda: rank.ended == [0], "the end of the epoch")
    assert not make_client(server.address).status().ended
