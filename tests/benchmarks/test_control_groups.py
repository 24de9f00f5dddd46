"""Control groups of the benchmarks: found, refused with the next step, and removed with what is in them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from awake import Awake
from control_groups import ControlGroup, GroupUsage, Hierarchy, remove_stale_groups
from virtual_hosts import BenchmarkFailed

V1 = """\
30 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
31 23 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:10 - cgroup cgroup rw,memory
32 23 0:28 / /sys/fs/cgroup/unified rw,nosuid shared:11 - cgroup2 cgroup2 rw
"""
APART = """\
30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
31 23 0:27 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct
"""


def test_version_1_is_found_with_one_mount_and_with_two() -> None:
    both = Path("/sys/fs/cgroup/cpu,cpuacct")
    assert Hierarchy.find(V1) == Hierarchy(1, both, both)
    assert Hierarchy.find(APART) == Hierarchy(1, Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpuacct"))


def test_version_2_is_found_where_it_has_the_cpu_controller(tmp_path: Path) -> None:
    line = f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    with pytest.raises(BenchmarkFailed, match="need control groups with the controller cpu"):
        Hierarchy.find(line)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert Hierarchy.find(line) == Hierarchy(2, tmp_path, tmp_path)


def test_a_group_that_cannot_be_made_says_what_is_needed() -> None:
    with pytest.raises(BenchmarkFailed, match=r"Cannot make the control group /proc/.* need root"):
        ControlGroup("test", Hierarchy(1, Path("/proc"), Path("/proc")))


def test_usage_is_counted_from_an_earlier_look() -> None:
    assert GroupUsage(5.0, 10, 6, 2.0).since(GroupUsage(2.0, 4, 1, 0.5)) == GroupUsage(3.0, 6, 5, 1.5)


def test_version_2_is_written_and_read_as_the_kernel_has_it(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    group = ControlGroup("test", Hierarchy(2, tmp_path, tmp_path))
    folder = tmp_path / f"hetero-benchmark-{os.getpid()}-test"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    group.limit(1.35)
    assert (folder / "cpu.max").read_text() == "135000 100000"
    group.limit(None)
    assert (folder / "cpu.max").read_text() == "max 100000"
    group.yield_to_others()
    assert ((folder / "cpu.weight").read_text(), (folder / "cpu.idle").read_text()) == ("1", "1")
    (folder / "cpu.stat").write_text("usage_usec 2500000\nnr_periods 9\nnr_throttled 4\nthrottled_usec 300000\n")
    assert group.usage() == GroupUsage(2.5, 9, 4, 0.3)
    with pytest.raises(BenchmarkFailed, match=r"a quota of 0\.001 CPUs is too small"):
        group.limit(0.001)
    for file in folder.iterdir():
        file.unlink()
    group.remove()
    assert not folder.exists()


@pytest.mark.slow
def test_a_quota_holds_for_all_that_a_command_starts_and_the_group_goes_with_it() -> None:
    spin = ["/bin/sh", "-c", "(while :; do :; done) & while :; do :; done"]
    with ControlGroup("test") as group:
        group.limit(0.1)
        with subprocess.Popen(group.command(spin), start_new_session=True) as process:
            deadline_s = time.monotonic() + 30
            while (used := group.usage()).throttled < 5:
                assert time.monotonic() < deadline_s, f"no quota holds: {used}"
                time.sleep(0.05)
            assert len(group.pids) == 2
            group.remove()
            assert process.wait(10) == -9
    hierarchy = Hierarchy.find()
    assert list(hierarchy.cpu.glob(f"hetero-benchmark-{os.getpid()}-*")) == []


@pytest.mark.slow
def test_groups_of_a_benchmark_that_was_killed_are_removed_by_the_next() -> None:
    hierarchy = Hierarchy.find()
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    folders = {mount / f"hetero-benchmark-{gone.pid}-left" for mount in (hierarchy.cpu, hierarchy.accounting)}
    for folder in folders:
        folder.mkdir()
    assert f"hetero-benchmark-{gone.pid}-left" in remove_stale_groups(hierarchy)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_cpus_are_kept_awake_by_one_process_each_and_let_go() -> None:
    hierarchy = Hierarchy.find()
    folder = hierarchy.cpu / f"hetero-benchmark-{os.getpid()}-awake"
    cpus, deadline_s = len(os.sched_getaffinity(0)), time.monotonic() + 30
    with Awake():
        while len(pids := (folder / "cgroup.procs").read_text().split()) < cpus:
            assert time.monotonic() < deadline_s, f"in the group are only {pids}"
            time.sleep(0.02)
        assert len(pids) == cpus
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
