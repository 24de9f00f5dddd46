"""Random schedules of faults: one to three at random moments, each on a random host, all from one seed.

Every fault runs in a thread of its own, so that they overlap.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from local_job import wait_until

from ends.faults import Scene, own_clock, small_disk
from ends.kinds import all_kinds
from ends.running import START_S, by_part, make_cluster
from ends.verdicts import EPOCHS, LEASE_S, START_TIMEOUT_S, Planned, Verdict, collect, judge

MOMENTS_S = 9.0
"""Faults come within this after the first step."""
EARLY_S = 6.0
"""Where a schedule begins early, its first fault comes within this after the start."""
EARLY_SHARE, FATAL_SHARE, FATAL_LAST_SHARE = 0.2, 0.3, 0.5


def draw(seed: int, engine: str) -> list[Planned]:
    """Return the schedule of a seed."""
    choose = random.Random(f"{engine}-{seed}")
    kinds = [kind for kind in all_kinds() if engine in kind.engines]
    early = choose.random() < EARLY_SHARE
    planned: list[Planned] = []
    for number in range(choose.randint(1, 3)):
        fatal = choose.random() < FATAL_SHARE
        # Nothing happens twice: a host that is off cannot be switched off.
        taken = {(one.kind.name, one.kind.on) for one in planned}
        kind = choose.choice([k for k in kinds if k.fatal == fatal and (k.name, k.on) not in taken])
        first = early and number == 0 and kind.needs != "clock"  # a jump is proven by steps
        planned.append(Planned(kind, choose.uniform(0, EARLY_S if first else MOMENTS_S), first))
    if choose.random() < FATAL_LAST_SHARE:  # what comes after a fault that ends the job at once comes too late
        later = [one for one in planned if not one.early]
        moments_s = sorted(one.at_s for one in later)
        for one, at_s in zip(sorted(later, key=lambda one: one.kind.fatal), moments_s, strict=True):
            one.at_s = at_s
    return planned


def run_schedule(seed: int, folder: Path, engine: str = "grpc") -> Verdict:
    """Run the schedule of a seed and judge it."""
    started_s, planned = time.monotonic(), draw(seed, engine)
    verdict = Verdict(seed)
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"lease-s": LEASE_S, "start-timeout-s": START_TIMEOUT_S, "epochs": EPOCHS}
    if engine == "tf_data":
        options["start-timeout-s"] = 3 * START_TIMEOUT_S  # TensorFlow is slow to start
    with make_cluster(folder, engine, 2, options) as cluster:
        scene = Scene(cluster, folder)
        with scene.clean_up:
            try:
                hosts_started_s = _play(scene, planned, float(options["start-timeout-s"]))
                ends = cluster.wait(START_S)
            except AssertionError as error:
                verdict.note("hang", str(error))
            else:
                collect(scene, ends, planned, verdict)
                judge(scene, planned, verdict, engine, hosts_started_s)
            if verdict.wrong:
                verdict.logs = cluster.logs()
    verdict.faults = [str(one) for one in planned]
    verdict.seconds = round(time.monotonic() - started_s, 1)
    return verdict


def _play(scene: Scene, planned: list[Planned], start_timeout_s: float) -> float:
    """Start the hosts and let every fault come at its moment.

    Returns:
        When the last host was started, monotonic seconds; all faults have come by the return.
    """
    cluster, hosts = scene.cluster, by_part(scene.cluster)
    for part, host in hosts.items():
        needs = {one.kind.needs for one in planned if one.kind.on == part}
        if "disk" in needs:
            small_disk(scene, host)
        cluster.start(host, environment=own_clock(scene, host) if "clock" in needs else None)
    started_s = time.monotonic()
    threads = [
        threading.Thread(target=_inject, args=(scene, one, hosts[one.kind.on], started_s, start_timeout_s), daemon=True)
        for one in planned
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_S)
    return started_s


def _inject(scene: Scene, one: Planned, host: str, started_s: float, start_timeout_s: float) -> None:
    cluster = scene.cluster
    try:
        if not one.early:
            wait_until("training", lambda: scene.steps() or not cluster.running(), start_timeout_s + 30)
            started_s = time.monotonic()
        time.sleep(max(0.0, started_s + one.at_s - time.monotonic()))
        one.trained = bool(scene.steps())
        if host not in cluster.running():
            one.why_not = f"{host} was out by then"
            return
        one.attempted = True
        one.injected = one.kind.fault(scene, host)
    except (AssertionError, OSError, ValueError) as error:
        one.why_not = str(error) or repr(error)
    except Exception as error:  # psutil's: the process ended just then
        one.why_not = repr(error)
