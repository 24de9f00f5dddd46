"""A local cluster whose launchers are one-line programs: how their ends become one end."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero.cli import cluster as cluster_module
from hetero.cli.cluster import ClusterSpec, HostResult, exit_code_of, run_cluster
from hetero.clusters.local import LocalCluster
from hetero.errors import Stopped
from hetero.process.child import ChildSpec
from hetero.process.console import Console
from hetero.rundir import RunDir

WAIT = "import signal; signal.pause()"
# Not pause: a signal that comes just before it would be handled after it only, that is never.
DOZE = "import time\nwhile True: time.sleep(0.05)"


class Programs:
    """What the launcher of each host is."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def launcher(
        self, cluster: LocalCluster, host: str, run: RunDir, _arguments: Sequence[str], _console: Console
    ) -> ChildSpec:
        environ = {**os.environ, **cluster.environ(host)}
        return ChildSpec(
            host, (sys.executable, "-S", "-c", self.of[host]), env=environ, log_path=run.log(host, "launcher")
        )


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs()
    monkeypatch.setattr(cluster_module, "_launcher", made.launcher)
    return made


def run(folder: Path, data_hosts: int, trainer_hosts: int, lease_s: float = 30.0) -> list[HostResult]:
    spec = ClusterSpec(data_hosts, trainer_hosts, grace_s=1.0, lease_s=lease_s)
    return run_cluster(spec, RunDir(folder), [], Console(io.StringIO(), {}))


def codes(results: list[HostResult]) -> dict[str, int]:
    return {result.host: result.exit_code for result in results}


def test_every_host_is_waited_for_and_its_end_is_told_in_order_of_the_hosts(tmp_path: Path, programs: Programs) -> None:
    programs.of = {
        "data-1": "import os; assert os.environ['HETERO_HOST'] == 'data-1'",
        "trainer-1": "raise SystemExit(4)",
        "trainer-2": "import os; os.kill(os.getpid(), 9)",
    }
    started_s = time.time()
    results = run(tmp_path, 1, 2)
    assert codes(results) == {"data-1": 0, "trainer-1": 4, "trainer-2": -9}
    assert [result.host for result in results] == ["data-1", "trainer-1", "trainer-2"]
    assert all(started_s <= result.ended_s <= time.time() for result in results)


def test_hosts_that_can_never_find_a_coordinator_are_stopped_and_its_failure_stays_the_cause(
    tmp_path: Path, programs: Programs
) -> None:
    failure, ready = str(tmp_path / "failure.json"), str(tmp_path / "ready")
    programs.of = {
        "data-1": f"import os, time\nwhile not os.path.exists({ready!r}): time.sleep(0.01)\n"
        f"open({failure!r}, 'w').write('\"port in use\"'); raise SystemExit(2)",
        "trainer-1": "import signal\ndef stop(*_):\n"
        f"    open({failure!r}, 'w').write('\"I was stopped\"'); raise SystemExit(143)\n"
        f"signal.signal(15, stop); open({ready!r}, 'w')\n{DOZE}",
    }
    started_s = time.monotonic()
    results = run(tmp_path, 1, 1)
    assert codes(results) == {"data-1": 2, "trainer-1": 143}
    assert exit_code_of(results, 1) == 2
    assert json.loads(Path(failure).read_text()) == "port in use"
    assert time.monotonic() - started_s < 20


def test_after_any_other_bad_end_of_the_coordinators_host_the_others_have_their_own_lease(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LAUNCHER_MARGIN_S", 0.0)
    programs.of = {
        "data-1": "import os; os.kill(os.getpid(), 9)",
        "trainer-1": "import time; time.sleep(0.2); raise SystemExit(4)",
        "trainer-2": WAIT,
    }
    started_s = time.monotonic()
    assert codes(run(tmp_path, 1, 2, lease_s=0.5)) == {"data-1": -9, "trainer-1": 4, "trainer-2": -15}
    assert time.monotonic() - started_s >= 1.5


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_every_launcher_and_is_given_back_as_an_error(
    tmp_path: Path, programs: Programs, signum: signal.Signals
) -> None:
    told = tmp_path / "told"
    programs.of = {
        # The test process is the launchers' parent: the first one signals it when the second one is ready.
        "data-1": f"import os, signal, time\nwhile not os.path.exists({str(told)!r}): time.sleep(0.01)\n"
        f"os.kill(os.getppid(), {signum.value})\n{WAIT}",
        "trainer-1": f"import signal\ndef stop(*_): open({str(told) + '-15'!r}, 'w'); raise SystemExit(0)\n"
        f"signal.signal(15, stop)\nopen({str(told)!r}, 'w')\n{DOZE}",
    }
    before = signal.getsignal(signum)
    with pytest.raises(Stopped) as caught:
        run(tmp_path / "run", 1, 1)
    assert caught.value.exit_code == 128 + signum
    assert (tmp_path / "told-15").exists()
    assert signal.getsignal(signum) is before


def test_pinned_and_named_hosts_are_in_the_clusters_file(tmp_path: Path, programs: Programs) -> None:
    programs.of = {"data-1": "", "trainer-1": ""}
    spec = ClusterSpec(1, 1, data_cpus=(1,), trainer_cpus=(0,), control_port=17_000, data_group="cpus")
    run_cluster(spec, RunDir(tmp_path), [], Console(io.StringIO(), {}))
    written = json.loads((tmp_path / "cluster.json").read_text())
    assert written["control_port"] == 17_000
    groups = {group["instance_group_name"]: group["hosts"] for group in written["instance_groups"]}
    assert groups["cpus"][0]["cpus"] == [1]
    assert groups["dnn_group"][0]["cpus"] == [0]
