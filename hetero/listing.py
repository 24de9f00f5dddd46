"""Who lists a job's splits, and for whom: each host knows only its own input channels.

Under `grpc` a data host lists them; each its own where channels are spread over the hosts. Under `tf_data` rank 0 does;
where its host lacks the channel, the first data host does in its stead: rank 0 waits with a server (`Listing` in
splits.proto) and publishes where, and that host's launcher starts a process that lists, hands over, and ends.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc

from hetero import tls as transport
from hetero._proto import splits_pb2 as pb
from hetero.channels import SHARDED, Channels
from hetero.control.channel import details, metadata_of, retry_pauses_s
from hetero.control.client import ControlClient
from hetero.control.split_causes import of_emptiness
from hetero.control.split_lists import HostList, hosts_of, merge
from hetero.control.state import Outcome, cause_from_json, failure_of
from hetero.data.exchange import Exchange
from hetero.data.feed_cause import cause_of
from hetero.door import Door
from hetero.errors import EngineError, HeteroError, InputError, PeerFailed, PeerNeverCame
from hetero.host import LISTING_KEY, HostConfig
from hetero.inputs import s3
from hetero.job import InputContext, Job
from hetero.job_file import load_job
from hetero.tls import PLAIN, Tls

logger = logging.getLogger(__name__)

MAX_LIST_BYTES = 256 * 1024 * 1024
_POLL_S = 0.25
_METHOD = "/hetero.v1.Listing/Hand"


def input_context(config: HostConfig, splits: Sequence[Any] = (), epoch: int = 0) -> InputContext:
    """Return what the job's `inputs` and `splits` are called with on this host."""
    settings = config.settings
    return InputContext(
        splits=tuple(splits),
        epoch=epoch,
        batch_size=settings.batch_size,
        params=settings.params,
        channels=config.channels(),
        run_seed=settings.seed,
    )


def list_own(job: Job, config: HostConfig) -> list[Any]:
    """Return the splits that this host lists; none where it has no file of a channel that is spread over the hosts.

    Raises:
        Exception: Whatever the job's splits function raises; InputError where there are none, or none that can be sent.
    """
    context = input_context(config)
    try:
        return job.list_splits(context)
    except Exception:
        channels = Channels.of(context.channels)
        if not set(channels.lacking()) & set(channels.sharded):
            raise
        print(f"warning: {config.host} has nothing to prepare. {channels.why_lacking()}", flush=True)
        return []


def mark_local(listed: pb.SplitList, channels: Channels) -> None:
    """Note in a list which of its splits no other host can prepare."""
    if not channels.sharded:
        return
    del listed.local[:]
    positions: dict[str, list[int]] = {}
    for position, value in enumerate(listed.values):
        if (name := channels.sharded_channel(json.loads(value))) is not None:
            positions.setdefault(name, []).append(position)
    for name, splits in positions.items():
        listed.local.add(channel=name, splits=splits)


def as_sent(splits: Iterable[Any], channels: Channels) -> pb.SplitList:
    """Return a list of splits as it is sent."""
    listed = pb.SplitList(values=[json.dumps(split) for split in splits])
    mark_local(listed, channels)
    return listed


def as_heard(raw: bytes) -> HostList:
    """Return a list that was sent."""
    listed = pb.SplitList.FromString(raw)
    return HostList(tuple(listed.values), {split: one.channel for one in listed.local for split in one.splits})


# --- local ------------------------------------------------------------------------------------------------------------


def share_out(  # noqa: PLR0917 - who shares with whom
    job: Job,
    config: HostConfig,
    exchange: Exchange,
    hosts: Sequence[str],
    ranks: tuple[int, int],
    local_ranks: tuple[int, int],
    check: Callable[[], None],
) -> list[Any]:
    """Return the splits of a rank that prepares its own input where each host has files of its own.

    The first rank of each host lists; all ranks hear of all lists. Rows move between ranks where shares are uneven.

    Args:
        job: The job.
        config: The host.
        exchange: This rank's.
        hosts: All hosts that have ranks, in the same order on all of them.
        ranks: Number of this rank, and how many there are.
        local_ranks: The same within the host.
        check: Called while waiting for other hosts; may raise.

    Raises:
        InputError: No host has a file.
        Exception: As `list_own`.
    """
    if local_ranks[0] == 0:
        listed = as_sent(list_own(job, config), config.channels())
        exchange.publish(f"splits/{config.host}", listed.SerializeToString())
    lists = {host: as_heard(exchange.wait(f"splits/{host}", check=check)) for host in hosts}
    if not any(one.values for one in lists.values()):
        raise InputError(str(of_emptiness(hosts, config.sharded_channels)["message"]))
    return share(lists, config.host, ranks, local_ranks)


def share(lists: Mapping[str, HostList], host: str, ranks: tuple[int, int], local_ranks: tuple[int, int]) -> list[Any]:
    """Return a rank's part of its host's own splits, and of those that all hosts can read; pure.

    Args:
        lists: By host, what each has listed.
        host: The rank's host.
        ranks: As of `share_out`.
        local_ranks: As of `share_out`.
    """
    splits = merge(lists)
    pairs = list(zip(splits.values, hosts_of(splits), strict=True))
    everybodys = [value for value, home in pairs if home is None][ranks[0] :: ranks[1]]
    own = [value for value, home in pairs if home == host][local_ranks[0] :: local_ranks[1]]
    return [json.loads(value) for value in (*everybodys, *own)]


# --- tf_data ----------------------------------------------------------------------------------------------------------


def list_for_tf_data(job: Job, config: HostConfig, control: ControlClient, check: Callable[[], None]) -> list[Any]:
    """Return the splits of a `tf_data` job; called by rank 0. A data host lists them if this host lacks the channel.

    Args:
        job: The job.
        config: The host.
        control: Tells the data hosts where the list is waited for.
        check: Called while waiting; may raise.

    Raises:
        EngineError: Each data host has files of its own, and a worker may be given any.
        PeerFailed: Listing failed on the data host; the coordinator knows why.
        Exception: As `list_own`.
    """
    context = input_context(config)
    channels = Channels.of(context.channels)
    try:
        listed = as_sent(job.list_splits(context), channels)
    except Exception as error:
        if not (config.topology.container and config.topology.data and channels.lacking()):
            raise
        lister = config.topology.coordinator_host.name
        print(f"data host {lister} lists the splits, since {config.host} cannot: {error}", flush=True)
        listed = _wait_for_list(config, control, check)
    if listed.local:
        raise EngineError(
            f"Channel {listed.local[0].channel!r} is {SHARDED}: each data host has files that the others lack, but "
            "under tf_data any worker may be given any file. Let it be FullyReplicated, or give --engine grpc."
        )
    return [json.loads(value) for value in listed.values]


def explained(error: HeteroError, channels: Channels) -> HeteroError:
    """Return an error about a file that no data host has, with what may be wrong with its channel; any other as it is.

    Args:
        error: What reading the input raised.
        channels: Those of the host on which the splits were listed.
    """
    text = str(error)
    hint = channels.hint(text) if isinstance(error, InputError) and "NotFoundError" in text else ""
    return InputError(f"{text} {hint}") if hint else error


def _wait_for_list(config: HostConfig, control: ControlClient, check: Callable[[], None]) -> pb.SplitList:
    server = ListingServer(config.settings.token, tls=config.tls)
    try:
        control.publish(LISTING_KEY, f"{config.topology.current.address}:{server.port}")
        listed = server.wait(check)
    finally:
        server.stop()
    if listed.cause_json:
        cause = cause_from_json(listed.cause_json) or {}
        control.end_training(Outcome.FAILED, cause)
        raise PeerFailed(f"The splits could not be listed: {failure_of(cause).describe()}")
    return listed


class ListingServer:
    """Waits in rank 0's process for the list that a data host makes.

    Args:
        token: The job's shared secret; None: nobody is asked for it.
        host: Address to listen on.
        tls: Whether and with what to encrypt.

    Attributes:
        port: Where it listens.

    Raises:
        HeteroError: No port can be bound.
        SettingsError: The TLS files cannot be used.
    """

    def __init__(
        self,
        token: str | None,
        host: str = "0.0.0.0",  # noqa: S104 - peers are on other hosts
        *,
        tls: Tls = PLAIN,
    ) -> None:
        self._door = Door(token, logger)
        self._lists: queue.Queue[pb.SplitList] = queue.Queue()
        options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_LIST_BYTES))
        self._server = grpc.server(futures.ThreadPoolExecutor(2, "hetero-listing"), options=options)
        handlers = {"Hand": grpc.unary_unary_rpc_method_handler(self._hand)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("hetero.v1.Listing", handlers),))
        try:
            self.port: int = transport.bind(self._server, f"[{host}]:0" if ":" in host else f"{host}:0", tls)
        except RuntimeError as error:
            raise HeteroError(f"Cannot wait for the list of splits at {host}: {error}. Is that this host?") from error
        self._server.start()

    def wait(self, check: Callable[[], None]) -> pb.SplitList:
        """Return the list, or why there is none, once it is here; `check` is called meanwhile and may raise."""
        while True:
            try:
                return self._lists.get(timeout=_POLL_S)
            except queue.Empty:
                check()

    def stop(self) -> None:
        """End the service; who has handed over gets its answer. May be repeated."""
        self._server.stop(grace=1.0).wait(2.0)

    def _hand(self, request: bytes, context: Any) -> bytes:
        if (refusal := self._door.why_refused(context)) is not None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        self._lists.put(pb.SplitList.FromString(request))
        return b""


def serve_list(config: HostConfig, process: str) -> None:
    """List the splits in rank 0's stead and hand them over; the main of a process of the first data host.

    Raises:
        PeerNeverCame: Rank 0 did not take the list.
    """
    with config.connect() as control:
        control.watch()
        timeout_s = config.settings.start_timeout_s
        state = control.wait_for(lambda state: LISTING_KEY in state.endpoints, timeout_s, "Rank 0")
        if state.ended:
            return
        hand_over(state.endpoints[LISTING_KEY], _list_or_cause(config, process), config)


def _list_or_cause(config: HostConfig, process: str) -> pb.SplitList:
    try:
        s3.prepare(config.settings.channels)
        context = input_context(config)
        return as_sent(load_job(config.settings.job).list_splits(context), Channels.of(context.channels))
    except Exception as error:  # whatever the job's code raises is the job's failure
        where = "in listing the job's splits, for rank 0"
        cause = cause_of(error, host=config.host, process=process, where=where)
        code = error.exit_code if isinstance(error, HeteroError) else None
        return pb.SplitList(cause_json=json.dumps({**cause, "suggested_exit_code": code}))


def hand_over(address: str, listed: pb.SplitList, config: HostConfig) -> None:
    """Give a list to rank 0, trying on for as long as hosts have to come.

    Raises:
        PeerNeverCame: It was not taken in that time.
    """
    deadline_s = time.monotonic() + config.settings.start_timeout_s
    metadata, problem = metadata_of(config.settings.token), ""
    for pause_s in retry_pauses_s():
        try:
            with transport.channel(address, (), config.tls) as channel:
                call = channel.unary_unary(_METHOD, request_serializer=pb.SplitList.SerializeToString)
                call(listed, metadata=metadata, timeout=max(1.0, deadline_s - time.monotonic()))
            return
        except grpc.RpcError as error:
            problem = transport.explain(details(error), config.tls)
        if time.monotonic() > deadline_s:
            break
        time.sleep(pause_s)
    raise PeerNeverCame(f"Rank 0 at {address} did not take the list of splits: {problem}. See its log.")
