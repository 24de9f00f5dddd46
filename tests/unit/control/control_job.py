"""A ledger with a fake clock and hosts that report every second of it."""

from __future__ import annotations

from hetero.control.ledger import Ledger
from hetero.control.state import HostReport, Outcome, Phase

WORKING = HostReport(workers_alive=1)
RANKS = HostReport(ranks=1)


class FakeClock:
    """Time that passes only when a test says so; wall time runs with it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now_s


class Job:
    """A ledger with hands: reports of all hosts but the silent ones come every second."""

    def __init__(self, config, clock) -> None:
        self.config, self.clock = config, clock
        self.ledger = Ledger(config, clock=clock, wall=clock.wall)
        self.reports: dict[str, HostReport] = {}

    def come(self, *names: str) -> None:
        for name in names:
            report, role = (WORKING, "data") if name in self.config.data else (RANKS, "trainer")
            self.reports[name] = report
            self.ledger.register(name, role, f"{name}.local", report)

    def start(self) -> None:
        self.come(*self.config.data, *self.config.trainers)
        if self.config.data:
            self.ledger.publish("d1", "dispatcher", "d1:6000")
        assert self.state.phase is Phase.TRAINING

    def silence(self, *names: str) -> None:
        for name in names:
            del self.reports[name]

    def beat(self, name: str, **fields: object) -> bool:
        self.reports[name] = HostReport(**fields)
        return self.ledger.heartbeat(name, self.reports[name])

    def leave(self, name: str, reason: str = "", report: HostReport | None = None) -> None:
        self.reports.pop(name, None)
        self.ledger.leave(name, reason, report)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.now_s += 1.0
            for name, report in self.reports.items():
                self.ledger.heartbeat(name, report)
            self.ledger.tick()

    def restart(self) -> None:
        self.ledger.save()
        self.ledger = Ledger(self.config, clock=self.clock, wall=self.clock.wall)

    def fail(
        self, name: str, message: str, *, secondary: bool = False, age_s: float = 0.0, wait_s: float = 5.0
    ) -> None:
        self.ledger.report_failure(name, {"host": name, "message": message, "secondary": secondary}, age_s, wait_s)

    @property
    def state(self):
        return self.ledger.state()

    @property
    def end(self) -> tuple[Outcome, str | None]:
        cause = self.state.cause
        return self.state.outcome, None if cause is None else str(cause["message"])
