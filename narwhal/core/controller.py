"""The controller's questions about the fleet as a whole: where work has consolidated, and what each interval saw.

Consolidation risk: a role whose work rests on at most one eligible engine, so that one more failure exhausts it. The
risk and its age travel in the handoff.
"""

from __future__ import annotations

from narwhal.core.engine import Tally
from narwhal.core.events import ConsolidationRiskChanged, DrainSettled
from narwhal.core.fleet import Fleet
from narwhal.core.placement import eligible
from narwhal.core.vocabulary import HoldKind, Role


class Controller:
    """Fleet-wide review, once per monitor pass. Instants are loop seconds."""

    __slots__ = ("_fleet", "_interval_s", "interval_started_at", "risk_since")

    def __init__(self, fleet: Fleet, *, interval_s: float) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self.risk_since: dict[Role, float] = {}
        self.interval_started_at: float | None = None

    def review(self, *, now: float) -> list[ConsolidationRiskChanged]:
        """Return the roles that came to rest on at most one eligible engine, and those that no longer do."""
        changes = []
        for role in Role:
            at_risk = len(eligible(self._fleet, role, now=now)) <= 1
            if at_risk == (role in self.risk_since):
                continue
            if at_risk:
                self.risk_since[role] = now
            else:
                del self.risk_since[role]
            changes.append(ConsolidationRiskChanged(role, at_risk))
        return changes

    def settle_drains(self) -> list[DrainSettled]:
        """Return the drained engines whose resident work has just come to an end; each is named once."""
        settled = []
        for engine in self._fleet.engines.values():
            drain = engine.holds.get(HoldKind.OPERATOR_DRAIN)
            if drain is not None and not drain.settled and engine.resident == 0:
                drain.settled = True
                settled.append(DrainSettled(engine.id))
        return settled

    def roll_over(self, *, now: float) -> bool:
        """Begin a new interval of request tallies when the current one is over; say whether one began."""
        if self.interval_started_at is not None and now - self.interval_started_at < self._interval_s:
            return False
        self.interval_started_at = now
        for engine in self._fleet.engines.values():
            engine.last_interval, engine.interval = engine.interval, Tally()
        return True
