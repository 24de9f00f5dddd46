"""Why a job ends whose data hosts have files of their own: as failure records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero.channels import SHARDED
from hetero.control.member import note
from hetero.control.split_lists import Loss
from hetero.control.state import HostState, failure_of


def of_loss(
    loss: Loss, host: HostState, lease_s: float, reported: Mapping[str, object] | None, time_s: float
) -> dict[str, object]:
    """Say that a host was lost which alone has what is still to be read.

    Args:
        loss: The host, and the channels that it has files of.
        host: What is known of it.
        lease_s: How long it may have been silent.
        reported: Its own failure, if it told of one.
        time_s: When, seconds since the epoch.
    """
    which = f"{_channels(loss.channels)} ({SHARDED})"
    left = f", and it alone has files of {which} that are still to be read"
    if not loss.was_listed:
        left = f" before it had listed its files of {which}, which no other host has"
    text = f"data host {host.name} {_why_gone(host, lease_s)}{left}. {_ADVICE}"
    if reported is None:
        return note(host.name, text, time_s, 4)
    text = f"{text} What happened there: {failure_of(reported).describe()}"
    details = {name: reported[name] for name in ("traceback", "last_lines") if name in reported}
    return {**note(host.name, text, time_s, 4), **details}


def of_silence(hosts: Sequence[str], channels: Sequence[str], timeout_s: float, time_s: float) -> dict[str, object]:
    """Say that hosts have not listed their own splits in time."""
    who = f"data host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
    text = (
        f"{who} did not list the splits of {_channels(channels)} ({SHARDED}) within {timeout_s:g} s of being asked. "
        "Each data host has to, since each has other files. Does the job's splits function wait for something there? "
        "If it only takes long, raise --start-timeout-s."
    )
    return note(hosts[0], text, time_s, 3)


def of_emptiness(hosts: Sequence[str], channels: Sequence[str]) -> dict[str, object]:
    """Say that all hosts have listed, and nothing."""
    text = (
        f"{_channels(channels)} ({SHARDED}) gave no splits on any of the hosts {', '.join(hosts)}. "
        "Look at its S3 prefix."
    )
    return {"host": hosts[0], "process": "coordinator", "exception": "InputError", "message": text}


def of_stray(channel: str, rank: int) -> dict[str, object]:
    """Say that a trainer host has a part of the input, which is spread over the hosts."""
    text = (
        f"channel {channel!r} is {SHARDED}, and the host of rank {rank} has files of it that no data host would read. "
        "Give it to the data hosts' group alone: TrainingInput(..., instance_groups=[...])."
    )
    cause = {"host": "", "process": "coordinator", "exception": "EngineError", "message": text}
    return {**cause, "suggested_exit_code": 2}


_ADVICE = "Let it be FullyReplicated if data hosts are to replace each other."


def _channels(names: Sequence[str]) -> str:
    return f"channel{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def _why_gone(host: HostState, lease_s: float) -> str:
    if host.left:
        return f"left before the end ({host.leave_reason or 'it gave no reason'})"
    if host.workers_gone_for_good:
        return "has no worker left and cannot start another"
    return f"gave no sign of life for {lease_s:g} s"
