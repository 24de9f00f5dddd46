"""The coordinator's rules: what is known of each host, and when and why a job ends. No network here.

All times inside are uptime: seconds since the job's coordinator was first started, so that they survive its restart.

What ends a job, besides `end_training`:

| what                                                        | outcome       |
|-------------------------------------------------------------|---------------|
| not everybody needed is there after `start_timeout_s`       | NEVER_STARTED |
| a trainer host is silent for `lease_s`                      | TRAINER_LOST  |
| the first data host is lost, or no host can prepare input   | DATA_LOST     |
| a trainer host reports a primary failure, or `fail`         | FAILED        |
| ... a secondary one, and no primary follows in time         | FAILED        |
| a trainer host leaves with a reason                         | STOPPED       |
| the chief leaves without one, after training has begun      | SUCCEEDED     |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hetero.control.config import CoordinatorConfig
from hetero.control.journal import read_journal, write_journal
from hetero.control.member import Member, ReportedFailure, note, seconds, weighty
from hetero.control.needs import chief_of, lost_data, unmet
from hetero.control.state import HostReport, JobState, Outcome, Phase, failure_of

logger = logging.getLogger(__name__)

MINOR_PUSH_INTERVAL_S = 0.5
MAX_ENDPOINTS = 4096


class Refused(Exception):
    """The ledger will not do what was asked; nothing has changed."""


class UnknownHost(Refused):
    """The host, or the host in this role, is not part of the job."""


class Ledger:
    """Everything the coordinator knows; not thread-safe.

    Args:
        config: The job; a journal of the same run at `config.journal` is resumed.
        clock: Monotonic seconds, the same in every process of this host: a restarted coordinator goes on by them.
        wall: Seconds since the epoch; used for causes only, since it can be set.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._clock, self._wall = clock, wall
        self._started = clock()
        self._members = {name: Member(name, "data") for name in config.data}
        self._members |= {name: Member(name, "trainer") for name in config.trainers}
        self._endpoints: dict[str, str] = {}
        self._phase, self._outcome = Phase.WAITING, Outcome.NONE
        self._cause: dict[str, object] | None = None
        # The earliest failure of each kind: "primary" and "secondary" ones of trainers, "data <host>".
        self._failures: dict[str, ReportedFailure] = {}
        self._failure_deadline_s: float | None = None
        self._minor_since_s: float | None = None
        self._restarts = 0
        self._input = (0, 0)  # batches replayed, splits skipped
        self.version = 1
        self._saved_version = 0
        self._resume(read_journal(config.journal))
        self._ticked_s = self.uptime_s

    def register(self, name: str, role: str, address: str, report: HostReport, launcher: str = "") -> None:
        """Note that a host is there, or there again.

        Raises:
            UnknownHost: The job expects no such host in this role, or another launcher plays it.
        """
        member = self._member(name)
        if member.role != role:
            raise UnknownHost(f"host {name!r} registers as {role}, this job expects it as {member.role}")
        if not self.ended and (other := member.other_than(launcher)):
            raise UnknownHost(other)
        if not member.registered:
            logger.info("%s host %s registered at %s", role, name, address)
        member.arrive(address, launcher, report, self.uptime_s, anew=not self.ended)
        self._change()
        self._judge_hosts()

    def heartbeat(self, name: str, report: HostReport) -> bool:
        """Renew a host's lease; return False if the host must register first.

        Raises:
            UnknownHost: The job expects no such host.
        """
        member = self._member(name)
        if not member.registered:
            return False
        if member.left:
            return True
        member.heard_s = self.uptime_s
        if member.lapsed:
            logger.warning("host %s is back", name)
            member.lapsed = False
            self._change()
        self._take_report(member, report)
        self._judge_hosts()
        return True

    def publish(self, name: str, endpoint: str, address: str) -> None:
        """Announce that `endpoint` listens at `address`.

        Raises:
            Refused: The host is unknown, a text is empty or too long, or there are too many endpoints.
        """
        member = self._member(name)
        if not 0 < len(endpoint) <= 256 or not 0 < len(address) <= 512:
            raise Refused(f"endpoint {endpoint[:80]!r} at {address[:80]!r}: needs 1 to 256 and 1 to 512 characters")
        if endpoint not in self._endpoints and len(self._endpoints) >= MAX_ENDPOINTS:
            raise Refused(f"endpoint {endpoint!r} would be one more than {MAX_ENDPOINTS}")
        if member.role == "data" and not member.seen and not member.registered:
            # Its lease begins: a feed may have splits in hand before its launcher is here, which may then never come.
            member.seen, member.heard_s = True, self.uptime_s
        if self._endpoints.get(endpoint) != address:
            self._endpoints[endpoint] = address
            self._change()
            self._judge_hosts()

    def end_training(
        self, name: str, outcome: Outcome, cause: dict[str, object] | None, age_s: float, wait_for_primary_s: float
    ) -> None:
        """End the job at a trainer's word; a failure may first wait for its primary cause.

        Raises:
            Refused: A data host asks; a host other than the chief says that training succeeded; or the outcome is one
                that only the coordinator can find.
        """
        member = self._member(name)
        if member.role != "trainer":
            raise Refused(f"data host {name!r} cannot end training")
        if outcome is Outcome.FAILED:
            told = cause or self._note(name, f"training failed on {name}; its launcher gave no cause")
            self.report_failure(name, told, age_s, wait_for_primary_s)
        elif outcome is Outcome.SUCCEEDED:
            if name != (chief := chief_of(self._config, self._endpoints)):
                raise Refused(f"only the chief, {chief!r}, can say that training succeeded, not {name!r}")
            self._succeed()
        elif outcome in (Outcome.STOPPED, Outcome.DATA_LOST):
            self._end(outcome, cause or self._note(name, f"{name} ended the job"))
        else:
            raise Refused(f"outcome {outcome.value!r} is not for hosts to declare")

    def report_failure(self, name: str, cause: dict[str, object], age_s: float, wait_for_primary_s: float) -> None:
        """Take in the failure of a process; a trainer's ends the job, the earliest primary one is its cause.

        Args:
            name: Host that reports.
            cause: The failure; `cause["secondary"]` is true if it only follows from a peer's.
            age_s: How long ago it happened.
            wait_for_primary_s: How long a secondary failure waits for a primary one.

        Raises:
            UnknownHost: The job expects no such host.
        """
        member = self._member(name)
        kind = f"data {name}" if member.role == "data" else "secondary" if cause.get("secondary") else "primary"
        failure = ReportedFailure(self.uptime_s - seconds(age_s), cause)
        known = self._failures.get(kind)
        if known is None or failure.at_s < known.at_s:
            self._failures[kind] = failure
            logger.warning("%s failure on %s: %s", kind, name, failure_of(cause).describe())
        if kind == "primary" and not self.ended:
            self._end(Outcome.FAILED, self._first_failure())
        elif kind == "secondary" and not self.ended and self._failure_deadline_s is None:
            self._failure_deadline_s = self.uptime_s + seconds(wait_for_primary_s)
            self._change()
            self._judge_time()
        elif member.role == "trainer" and self._outcome is Outcome.FAILED and self._cause != self._first_failure():
            self._cause = self._first_failure()
            self._change()

    def fail(self, cause: dict[str, object], outcome: Outcome = Outcome.FAILED) -> None:
        """End the job because of what the coordinator itself heard of: a primary failure, unless there was one."""
        self._failures.setdefault("primary", ReportedFailure(self.uptime_s, cause))
        self._end(outcome, self._first_failure())

    def note_input(self, replayed_batches: int, skipped_splits: int) -> None:
        """Take in totals of the input; they never sink, whatever a restarted coordinator has forgotten."""
        totals = max(replayed_batches, self._input[0]), max(skipped_splits, self._input[1])
        if totals != self._input:
            self._input = totals
            self._change_soon()

    def leave(self, name: str, reason: str, report: HostReport | None = None) -> None:
        """Note that a host goes, with an empty reason if its part is done; its last numbers are kept.

        Raises:
            UnknownHost: The job expects no such host.
        """
        member = self._member(name)
        if report is not None:
            member.report = report
        member.left, member.leave_reason = True, reason[:1000]
        member.left_early = member.left_early or (member.role == "data" and not self.ended)
        self._change()
        if member.role == "trainer" and not self.ended:
            if reason:
                self._end(Outcome.STOPPED, self._note(name, f"trainer host {name} left before the end: {reason}"))
            elif self._phase is Phase.WAITING:
                self._end(Outcome.STOPPED, self._note(name, f"trainer host {name} left before training began"))
            elif name == chief_of(self._config, self._endpoints):
                self._succeed()
        self._judge_hosts()

    def tick(self) -> None:
        """Judge leases and deadlines; to be called at least ten times in a lease.

        When it is called much later than that the coordinator itself was held up, and signs of life may wait unread:
        nobody is blamed for that time.
        """
        gap_s, self._ticked_s = self.uptime_s - self._ticked_s, self.uptime_s
        if gap_s > self._config.lease_s / 4:
            logger.warning("the coordinator was held up for %.1f s: leases are longer by that", gap_s)
            for member in self._members.values():
                member.heard_s = min(self.uptime_s, member.heard_s + gap_s)
        self._judge_time()
        if self._minor_since_s is not None and self.uptime_s - self._minor_since_s >= MINOR_PUSH_INTERVAL_S:
            self._change()

    @property
    def uptime_s(self) -> float:
        """Seconds since the job's coordinator was first started."""
        return self._clock() - self._started

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self._phase is Phase.ENDED

    def state(self) -> JobState:
        """Return the state as it is now."""
        return JobState(
            version=self.version,
            restarts=self._restarts,
            run_id=self._config.run_id,
            uptime_s=self.uptime_s,
            phase=self._phase,
            outcome=self._outcome,
            cause=self._cause,
            hosts=tuple(member.state(self.uptime_s) for member in self._members.values()),
            endpoints=dict(self._endpoints),
            replayed_batches=self._input[0],
            skipped_splits=self._input[1],
        )

    def save(self) -> None:
        """Write the journal if something has changed since it was last written."""
        if self._saved_version == self.version:
            return
        self._saved_version = self.version
        write_journal(
            self._config.journal,
            {
                "run_id": self._config.run_id,
                "started": self._started,
                "restarts": self._restarts,
                "version": self.version,
                "phase": self._phase.value,
                "outcome": self._outcome.value,
                "cause": self._cause,
                "endpoints": self._endpoints,
                "input": self._input,
                "failures": {kind: asdict(failure) for kind, failure in self._failures.items()},
                "failure_deadline_s": self._failure_deadline_s,
                "members": [member.to_json() for member in self._members.values()],
            },
        )

    def _judge_time(self) -> None:
        if self.ended:
            return
        now_s = self.uptime_s
        for member in self._members.values():
            if member.is_silent(now_s, self._config.lease_s):
                member.lapse()
                logger.warning(
                    "%s host %s has been silent for %.1f s", member.role, member.name, now_s - member.heard_s
                )
                self._change()
        self._judge_hosts()
        if self.ended:
            return
        if self._failure_deadline_s is not None and now_s >= self._failure_deadline_s:
            self._end(Outcome.FAILED, self._first_failure())
        elif self._phase is Phase.WAITING and now_s >= self._config.start_timeout_s:
            self._end(Outcome.NEVER_STARTED, self._missing())

    def _judge_hosts(self) -> None:
        """Start training once everybody needed is there; end the job once somebody needed is lost."""
        if self.ended:
            return
        lapsed = [m.name for m in self._members.values() if m.role == "trainer" and m.lapsed]
        if lapsed:
            text = f"trainer host {' and '.join(lapsed)} gave no sign of life for {self._config.lease_s:g} s"
            self._end(Outcome.TRAINER_LOST, self._note(lapsed[0], text, suggested_exit_code=5))
        elif self._config.data and (cause := self._data_lost()) is not None:
            self._end(Outcome.DATA_LOST, cause)
        elif self._phase is Phase.WAITING and not unmet(self._config, self._members, self._endpoints):
            self._phase = Phase.TRAINING
            logger.info("everybody is there after %.1f s: training starts", self.uptime_s)
            self._change()

    def _data_lost(self) -> dict[str, object] | None:
        training = self._phase is Phase.TRAINING
        in_time = not training or self.uptime_s < self._config.start_timeout_s
        if (lost := lost_data(self._config, self._members, in_time=in_time, training=training)) is None:
            return None
        names, text = [host.name for host in lost[0]], lost[1]
        return self.reported_by(names) or self._note(names[0], text, suggested_exit_code=4)

    def _missing(self) -> dict[str, object]:
        missing = unmet(self._config, self._members, self._endpoints)
        why = "; ".join(what for _, what in missing)
        text = f"training did not start within {self._config.start_timeout_s:g} s: {why}"
        return self._note(missing[0][0], text, suggested_exit_code=3)

    def reported_by(self, names: Sequence[str]) -> dict[str, object] | None:
        """Return the first failure that data hosts reported themselves, None if none did."""
        reported = [self._failures[kind] for name in names if (kind := f"data {name}") in self._failures]
        return min(reported, key=lambda failure: failure.at_s).cause if reported else None

    def _first_failure(self) -> dict[str, object] | None:
        return failure.cause if (failure := self._failures.get("primary") or self._failures.get("secondary")) else None

    def _succeed(self) -> None:
        if self._failures.keys() & {"primary", "secondary"}:
            self._end(Outcome.FAILED, self._first_failure())
        else:
            self._end(Outcome.SUCCEEDED, None)

    def _end(self, outcome: Outcome, cause: dict[str, object] | None) -> None:
        if self.ended:
            return
        self._phase, self._outcome, self._cause = Phase.ENDED, outcome, cause
        logger.info("the job has ended: %s%s", outcome.value, f": {cause.get('message')}" if cause else "")
        self._change()

    def _member(self, name: str) -> Member:
        if name not in self._members:
            raise UnknownHost(f"host {name[:80]!r} is not part of this job; it has {', '.join(self._members)}")
        return self._members[name]

    def _take_report(self, member: Member, report: HostReport) -> None:
        """Note a report. What rules depend on is pushed at once, the rest soon, CPU time alone not at all."""
        old, member.report = member.report, report
        if weighty(old) != weighty(report):
            self._change()
        elif (old.workers_busy, old.processes) != (report.workers_busy, report.processes):
            self._change_soon()

    def _change_soon(self) -> None:
        if self._minor_since_s is None:
            self._minor_since_s = self.uptime_s

    def _change(self) -> None:
        self.version += 1
        self._minor_since_s = None

    def _note(self, host: str, message: str, suggested_exit_code: int | None = None) -> dict[str, object]:
        return note(host, message, self._wall(), suggested_exit_code)

    def _resume(self, journal: Mapping[str, Any] | None) -> None:
        """Go on where the journal ends; every lease begins anew, because nobody could renew it meanwhile."""
        if journal is None or journal.get("run_id") != self._config.run_id:
            return
        try:
            started = min(float(journal["started"]), self._clock())
            heard_s = self._clock() - started
            phase, outcome, cause = Phase(journal["phase"]), Outcome(journal["outcome"]), journal["cause"]
            failures = {kind: ReportedFailure(**failure) for kind, failure in journal["failures"].items()}
            members = [Member.from_json(value, heard_s) for value in journal["members"]]
            endpoints, deadline_s = dict(journal["endpoints"]), journal["failure_deadline_s"]
            restarts, version = int(journal["restarts"]) + 1, int(journal["version"]) + 1
            replayed, skipped = map(int, journal["input"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("cannot use the journal %s (%r): starting anew", self._config.journal, error)
            return
        self._started, self._restarts, self.version = started, restarts, version
        self._phase, self._outcome, self._cause, self._endpoints = phase, outcome, cause, endpoints
        self._failures, self._failure_deadline_s, self._input = failures, deadline_s, (replayed, skipped)
        self._members |= {member.name: member for member in members if member.name in self._members}
        logger.warning("resumed run %s from %s (restart %d)", self._config.run_id, self._config.journal, restarts)
