"""The last waits of a launcher: whom it stays for when its host's part is over.

Everywhere, the coordinator stays until all peers have heard of the end. In a cluster of containers that ends with the
exit code of the container that ends first (`hetero.clusters.leaves_after_chief`), the chief's has to be that one:

- the chief writes what it leaves, waits until all others have said goodbye, so that their own exit codes are settled,
  says its last word and ends;
- the others wait for that word, and then for the SIGTERM that the end of the chief's container brings them.

Each wait has a bound, so a host that has vanished keeps nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from hetero.control.client import ControlClient
from hetero.control.farewells import FAREWELL_S, left_s, patience_s
from hetero.control.state import JobState
from hetero.errors import HeteroError
from hetero.host import HostConfig
from hetero.process.supervisor import Supervisor

LAST_WORD_KEY = "chief-ends"
"""Name under which the chief publishes that it has written everything and ends now."""
GOODBYES_S = 5.0
"""How long the chief waits for the others' goodbyes."""
CHIEF_MARGIN_S = 5.0
"""How long the chief may take to end beside its grace period and the goodbyes."""
CHIEF_EXIT_S = 5.0
"""How long the others stay after the chief's last word where nobody stops them."""
ASK_S = 0.5
"""How often, and for how long, a host whose part is done asks whether the job is over."""
_LAST_WORD_TIMEOUT_S = 1.0
_LOOK_S = 0.05


class Departure:
    """What a launcher still waits for.

    Args:
        config: Which host this is, in which job.
        control: Its connection; watched.
        supervisor: Of its children; its events are taken and dropped while waiting.
    """

    def __init__(self, config: HostConfig, control: ControlClient, supervisor: Supervisor) -> None:
        self._config, self._control, self._supervisor = config, control, supervisor

    def wait_for_farewells(self, *, stopped: bool, killed_at_s: Callable[[], float | None]) -> None:
        """Keep the coordinator up until all peers have heard of the end.

        Args:
            stopped: Whether this host was told to stop.
            killed_at_s: Tells when mpirun will kill this launcher (time.monotonic()); None: not at all.
        """
        began_s, state, settings = time.monotonic(), self._control.state, self._config.settings
        patience = patience_s(state, settings.lease_s, settings.start_timeout_s, stopped=stopped) if state else {}
        while True:
            state = self._control.state
            end_s = began_s + (left_s(state, patience, self._config.host) if state else FAREWELL_S)
            wait_s = min(end_s, killed_at_s() or end_s) - time.monotonic()
            if wait_s <= 0:
                return
            self._supervisor.next_event(timeout_s=min(wait_s, _LOOK_S))

    def let_chief_end_first(
        self, told_to_stop: Callable[[], bool], answered: Callable[[], None] = lambda: None
    ) -> None:
        """Wait so that the chief's launcher is the first one to end; all that this host leaves is written.

        A host's part can be over while the job goes on: the ranks of a trainer host are through before rank 0 has saved
        its model, a data host has failed beside another one. Then the job's end is waited for as well.

        Args:
            told_to_stop: Whether a signal has asked this host to leave. The chief waits all the same, as the others
                hear of it then.
            answered: Called with each answer of the coordinator while the job goes on.
        """
        if self._config.is_chief:
            self._wait(lambda state: not others_to_come(state, self._config.host), GOODBYES_S)
            with contextlib.suppress(
                HeteroError
            ):  # no coordinator, or one that is gone: then nobody waits for the word
                self._control.publish(LAST_WORD_KEY, self._config.host, timeout_s=_LAST_WORD_TIMEOUT_S)
        elif self._has_ended(told_to_stop, answered):
            self._wait_for_chief(told_to_stop)

    def _has_ended(self, told_to_stop: Callable[[], bool], answered: Callable[[], None]) -> bool:
        """Wait for the job's end; return whether it has come.

        Without a coordinator the chief takes a lease to notice, and then as long as always to end.
        """
        answered_s = time.monotonic()
        while not told_to_stop():
            state = self._control.state
            if state is None or not state.ended:
                with contextlib.suppress(HeteroError):
                    state = self._control.status(ASK_S)
                    answered_s = time.monotonic()
                    answered()
            if state is not None and state.ended:
                return True
            if time.monotonic() - answered_s > self._config.settings.lease_s + self._chief_within_s():
                return False
            self._supervisor.next_event(timeout_s=ASK_S)
        return False

    def _chief_within_s(self) -> float:
        """Return how long after the job's end the chief has ended."""
        return self._config.settings.grace_s + GOODBYES_S + CHIEF_MARGIN_S

    def _wait_for_chief(self, told_to_stop: Callable[[], bool]) -> None:
        chief = self._config.topology.chief.name
        self._wait(lambda state: told_to_stop() or not chief_to_come(state, chief), self._chief_within_s())
        if LAST_WORD_KEY in (self._control.state.endpoints if self._control.state else {}):
            self._wait(lambda _: told_to_stop(), CHIEF_EXIT_S)

    def _wait(self, until: Callable[[JobState | None], bool], within_s: float) -> None:
        end_s = time.monotonic() + within_s
        while not until(self._control.state) and (wait_s := end_s - time.monotonic()) > 0:
            self._supervisor.next_event(timeout_s=min(wait_s, _LOOK_S))


def others_to_come(state: JobState | None, own: str) -> bool:
    """Return whether a host other than this one has not yet said how it ends, as far as is known."""
    hosts = state.hosts if state else ()
    return any(host.registered and not (host.left or host.lost) for host in hosts if host.name != own)


def chief_to_come(state: JobState | None, chief: str) -> bool:
    """Return whether the chief has still to end, now that the job is over, as far as is known."""
    if state is None or LAST_WORD_KEY in state.endpoints:
        return False
    host = state.host(chief)
    return host is not None and host.registered and not host.lost
