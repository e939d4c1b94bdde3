"""The control plane of one router: the parts of the core, and the two questions that concern them all.

It decides nothing itself; it says whether the router admits (`readiness`) and turns the whole into a document and back.
"""

from __future__ import annotations

from narwhal.config import Config
from narwhal.core import readiness
from narwhal.core.capture import capture_engines, capture_pair_streaks, capture_pairs, restore_engines
from narwhal.core.controller import Controller
from narwhal.core.counters import CounterName, Counters
from narwhal.core.events import (
    Decision,
    EngineEjected,
    EngineReadmitted,
    FleetEvent,
    HoldPlaced,
    ProbeJudged,
)
from narwhal.core.fleet import Fleet
from narwhal.core.handoff import ConsolidationPart, HandoffDocument, LeasePart
from narwhal.core.monitoring import Monitoring
from narwhal.core.placement import missing_roles
from narwhal.core.readiness import Readiness
from narwhal.core.tenure import Tenure
from narwhal.core.vocabulary import ProbeResult, RouterId, RouterRole


class ControlPlane:
    """Everything a router knows, and what follows for admission."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fleet = Fleet(config.engines, config.recovery)
        self.controller = Controller(self.fleet, interval_s=config.controller.interval_s)
        self.monitoring = Monitoring(config.controller.monitor_failure_limit)
        self.tenure = Tenure(margin_s=config.ha.margin_s, clock_error=config.ha.clock_error)
        self.counters = Counters()
        self.role = RouterRole.STANDBY
        self.ineligible: str | None = "starting"
        self.owner: RouterId | None = None
        self.owner_url: str | None = None
        self.stopping = False
        self.version = 0

    @property
    def serving(self) -> bool:
        """Whether this router is the one that decides about the fleet."""
        return self.role in (RouterRole.ACTIVE, RouterRole.SOLO)

    def readiness(self, *, now: float, lease_now: float) -> Readiness:
        """Return whether this router admits: `now` in loop seconds, `lease_now` on the lease clock."""
        if self.stopping:
            return readiness.STOPPING
        if self.role is RouterRole.STANDBY:
            return readiness.standby(why_not=self.ineligible, clean=self.monitoring.clean)
        if self.role is RouterRole.FENCED:
            return readiness.fenced(self.tenure.fenced_reason or "no lease")
        if not self.tenure.held(lease_now):
            return readiness.fenced("the local lease deadline has passed")
        if (failing := self.monitoring.degraded) is not None:
            return readiness.degraded(failing)
        if roles := missing_roles(self.fleet, now=now):
            return readiness.exhausted(roles)
        return readiness.READY

    def apply(self, event: FleetEvent, *, now: float) -> list[Decision]:
        """Let the fleet take in `event`, keep the tallies, and return what was decided."""
        decisions = self.fleet.apply(event, now=now)
        if decisions:
            self.count(decisions)
        return decisions

    def count(self, decisions: list[Decision]) -> None:
        """Keep the tallies of what was decided."""
        for decision in decisions:
            match decision:
                case EngineEjected():
                    self.counters.add(CounterName.EJECTIONS)
                case EngineReadmitted():
                    self.counters.add(CounterName.READMISSIONS)
                case HoldPlaced():
                    self.counters.add(CounterName.HOLDS_PLACED)
                case ProbeJudged(result=ProbeResult.FAILED):
                    self.counters.add(CounterName.PROBES_FAILED)
                case _:
                    pass

    def capture(self, lease: LeasePart, *, version: int, now: float, wall: float) -> HandoffDocument:
        """Return the document of this instant: `now` in loop seconds, `wall` in unix seconds."""
        return HandoffDocument(
            cluster=self.config.ha.cluster,
            version=version,
            lease=lease,
            written_wall=wall,
            engines=capture_engines(self.fleet, now=now),
            pairs_apart=capture_pairs(self.fleet, now=now),
            pair_streaks=capture_pair_streaks(self.fleet),
            consolidation_risk=tuple(
                ConsolidationPart(role=role, age_s=max(0.0, now - since))
                for role, since in sorted(self.controller.risk_since.items())
            ),
            counters=dict(self.counters.values),
        )

    def restore(self, document: HandoffDocument, *, now: float) -> None:
        """Take over what `document` says; it must match the configured fleet.

        `now` is the loop time at which the document was written, as near as the caller knows: from there on the timed
        holds run down and the ages grow.
        """
        restore_engines(self.fleet, document, now=now)
        self.controller.risk_since = {part.role: now - part.age_s for part in document.consolidation_risk}
        self.counters.restore(document.counters)
        self.version = max(self.version, document.version)
