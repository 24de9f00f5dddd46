"""How many CPUs a process may use, from control groups as they look on real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero.process.cpu import idle_cpu_s
from hetero.process.cpu_quota import QuotaFigures, available_cpus, cpu_quota, tightest_quota

EIGHT = range(8)
MOUNT = "31 23 0:28 {root} {point} rw,relatime shared:9 - {kind} {source} rw,{options}"


def machine(tmp_path: Path, groups: str, *mounts: str) -> Path:
    """Write a process's folder in /proc."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n" + "\n".join(mounts) + "\n")
    return proc


def unified(point: Path, root: str = "/") -> str:
    return MOUNT.format(root=root, point=point, kind="cgroup2", source="cgroup2", options="nsdelegate")


def old(point: Path, root: str = "/", controllers: str = "cpu,cpuacct") -> str:
    return MOUNT.format(root=root, point=point, kind="cgroup", source="cgroup", options=controllers)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups_it_is_the_affinity(tmp_path: Path) -> None:
    assert available_cpus(EIGHT, proc=tmp_path / "none") == 8
    assert available_cpus(proc=tmp_path / "none") == len(os.sched_getaffinity(0))
    assert available_cpus() >= 1


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("350000 100000", 3),  # rounded down
        ("50000 100000", 1),  # but at least one
        ("1600000 100000", 8),  # more than there are
        ("150000 50000", 3),
        ("nonsense", 8),
        ("0 100000", 8),
        ("100000 0", 8),
        ("", 8),
    ],
)
def test_a_quota_of_version_2_counts(tmp_path: Path, text: str, cpus: int) -> None:
    write(tmp_path / "fs" / "cpu.max", text + "\n")
    assert available_cpus(EIGHT, proc=machine(tmp_path, "0::/\n", unified(tmp_path / "fs"))) == cpus


@pytest.mark.parametrize(("text", "cpus"), [("max 100000", 8.0), ("135000 100000", 1.35), ("30000 100000", 0.3)])
def test_parts_of_cpus_are_told(tmp_path: Path, text: str, cpus: float) -> None:
    write(tmp_path / "fs" / "cpu.max", text + "\n")
    assert cpu_quota(EIGHT, proc=machine(tmp_path, "0::/\n", unified(tmp_path / "fs"))) == cpus


@pytest.mark.parametrize(
    ("quota", "period", "cpus"), [("-1", "100000", 8), ("200000", "100000", 2), ("20000", "100000", 1)]
)
def test_a_quota_of_version_1_counts(tmp_path: Path, quota: str, period: str, cpus: int) -> None:
    write(tmp_path / "fs" / "box" / "cpu.cfs_quota_us", quota + "\n")
    write(tmp_path / "fs" / "box" / "cpu.cfs_period_us", period + "\n")
    groups = "9:name=systemd:/\n4:memory:/elsewhere\n2:cpu,cpuacct:/box\n0::/\n"
    mounts = (old(tmp_path / "memory", controllers="memory"), old(tmp_path / "fs"))
    assert available_cpus(EIGHT, proc=machine(tmp_path, groups, *mounts)) == cpus


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "a" / "b" / "cpu.max", "600000 100000\n")
    write(tmp_path / "fs" / "a" / "cpu.max", "300000 100000\n")
    assert available_cpus(EIGHT, proc=machine(tmp_path, "0::/a/b\n", unified(tmp_path / "fs"))) == 3


def test_a_container_that_is_told_its_hosts_paths_finds_its_own_group(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "cpu.cfs_quota_us", "400000\n")
    write(tmp_path / "fs" / "cpu.cfs_period_us", "100000\n")
    groups = "3:cpu,cpuacct:/docker/8f2a\n"
    assert available_cpus(EIGHT, proc=machine(tmp_path, groups, old(tmp_path / "fs", "/docker/8f2a"))) == 4
    (tmp_path / "other").mkdir()
    elsewhere = machine(tmp_path / "other", groups, old(tmp_path / "fs", "/kubepods/pod7"))
    assert available_cpus(EIGHT, proc=elsewhere) == 4


def test_both_versions_at_once_are_looked_at(tmp_path: Path) -> None:
    write(tmp_path / "new" / "cpu.max", "500000 100000\n")
    write(tmp_path / "old" / "cpu.cfs_quota_us", "600000\n")
    write(tmp_path / "old" / "cpu.cfs_period_us", "100000\n")
    proc = machine(tmp_path, "1:cpu:/\n0::/\n", old(tmp_path / "old", controllers="cpu"), unified(tmp_path / "new"))
    assert available_cpus(EIGHT, proc=proc) == 5


def test_idle_seconds_are_those_of_the_cpus_that_it_may_run_on(tmp_path: Path) -> None:
    allowed, hertz = sorted(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    other = allowed[-1] + 1
    lines = [f"cpu{number} 10 0 10 {3 * hertz} {hertz} 0 0 0 0 0" for number in (*allowed, other)]
    write(tmp_path / "stat", "\n".join(["cpu  99 99 99 99 99", *lines, "intr 7 8"]) + "\n")
    assert idle_cpu_s(str(tmp_path / "stat")) == 4.0 * len(allowed)


@pytest.mark.parametrize("text", ["", "cpu0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0\n", "cpu0 1 2 x 4 5\n"])
def test_where_the_system_does_not_tell_idle_seconds_are_unknown(tmp_path: Path, text: str) -> None:
    write(tmp_path / "stat", text)
    assert idle_cpu_s(str(tmp_path / "stat")) is None
    assert idle_cpu_s(str(tmp_path / "none")) is None


def test_the_exact_quota_is_told_with_its_period_and_nothing_where_it_leaves_all_cpus(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/a/b\n", unified(tmp_path / "fs"))
    write(tmp_path / "fs" / "a" / "b" / "cpu.max", "40000 100000\n")
    write(tmp_path / "fs" / "a" / "cpu.max", "25000 50000\n")
    quota = tightest_quota(EIGHT, proc=proc)
    assert quota is not None
    assert (quota.cpus, quota.period_s, quota.group) == (0.4, 0.1, tmp_path / "fs" / "a" / "b")
    write(tmp_path / "fs" / "a" / "b" / "cpu.max", "max 50000\n")
    quota = tightest_quota(EIGHT, proc=proc)
    assert quota is not None
    assert (quota.cpus, quota.period_s, quota.group) == (0.5, 0.05, tmp_path / "fs" / "a")
    write(tmp_path / "fs" / "a" / "cpu.max", "400000 50000\n")
    assert tightest_quota(EIGHT, proc=proc) is None
    assert tightest_quota(EIGHT, proc=tmp_path / "none") is None


def test_a_group_of_version_2_tells_what_it_used_and_how_it_was_throttled(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "cpu.max", "40000 100000\n")
    text = "usage_usec 2500000\nuser_usec 2\nsystem_usec 1\nnr_periods 40\nnr_throttled 3\nthrottled_usec 1500\n"
    write(tmp_path / "fs" / "cpu.stat", text)
    quota = tightest_quota(EIGHT, proc=machine(tmp_path, "0::/\n", unified(tmp_path / "fs")))
    assert quota is not None
    assert quota.read() == QuotaFigures(40, 3, 0.0015, 2.5)
    write(tmp_path / "fs" / "cpu.stat", "usage_usec 2500000\n")  # the controller was taken away
    assert quota.read() is None
    (tmp_path / "fs" / "cpu.stat").unlink()
    assert quota.read() is None


@pytest.mark.parametrize(
    ("counted", "groups", "used_s"),
    [
        ("together", "3:cpu,cpuacct:/box\n", 7.5),
        ("apart", "3:cpuacct:/box\n2:cpu:/box\n", 7.5),
        ("apart", "3:cpuacct:/\n2:cpu:/box\n", None),  # what another group uses is of no interest
        ("nowhere", "2:cpu:/box\n", None),
    ],
)
def test_a_group_of_version_1_tells_what_it_used_where_that_is_counted_for_the_same_group(
    tmp_path: Path, counted: str, groups: str, used_s: float | None
) -> None:
    write(tmp_path / "fs" / "box" / "cpu.cfs_quota_us", "40000\n")
    write(tmp_path / "fs" / "box" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "fs" / "box" / "cpu.stat", "nr_periods 40\nnr_throttled 3\nthrottled_time 1500000\n")
    where = tmp_path / ("fs" if counted == "together" else "acct")
    if counted != "nowhere":
        write(where / "box" / "cpuacct.usage", "7500000000\n")
    mounts = [old(tmp_path / "fs", controllers="cpu,cpuacct" if counted == "together" else "cpu")]
    mounts += [old(where, controllers="cpuacct")] if counted == "apart" else []
    quota = tightest_quota(EIGHT, proc=machine(tmp_path, groups, *mounts))
    assert quota is not None
    assert quota.read() == QuotaFigures(40, 3, 0.0015, used_s)
