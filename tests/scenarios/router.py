"""The core of one router under a scenario: its control plane, a clock that a scenario moves, and its own words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from narwhal.config import Config
from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import Decision, FleetEvent, LegReleased, LegStarted
from narwhal.core.handoff import LeasePart
from narwhal.core.holds import Hold
from narwhal.core.placement import Pair, choose
from narwhal.core.vocabulary import EngineId, FencingToken, HoldKind, Leg, RouterId, RouterRole, Stage
from tests.scenarios.wording import Wording

START: Final = 1000.0
"""Loop time at which a scenario begins; it shows seconds since then."""

LEASE: Final = LeasePart(router=RouterId("router-a"), incarnation="router-a-1", token=FencingToken(1))


class ScenarioRouter:
    """Everything that a scenario may do to the core. Every method returns the lines of the answer."""

    def __init__(self, config: Config) -> None:
        self.now = START
        self._config = config
        self._plane = self._started()

    def _started(self) -> ControlPlane:
        """A router that just began to serve. It runs alone: who holds the lease is no subject of a scenario."""
        plane = ControlPlane(self._config)
        plane.tenure.solo()
        plane.role = RouterRole.SOLO
        return plane

    def engine(self, name: str) -> Engine:
        """The engine of that name; KeyError if there is none."""
        return self._plane.fleet.engines[EngineId(name)]

    def wait(self, seconds: float) -> None:
        """Let time pass; nothing happens by itself."""
        self.now += seconds

    def hear(self, event: FleetEvent) -> list[str]:
        """Something happened to an engine."""
        return self._told(self._plane.apply(event, now=self.now))

    def hold(self, engine: Engine, kind: HoldKind) -> list[str]:
        """The controller holds an engine."""
        return self._told(self._plane.fleet.place(engine, Hold(kind, since=self.now, reason="scenario"), self.now))

    def monitor_pass(self, results: Mapping[Stage, str | None]) -> list[str]:
        """One pass: what is due in the core, stage by stage; `results` as for `Monitoring`.

        A stage that fails or is not due does nothing here. Work on engines (health, sweeps) is not part of a pass: what
        came of that is an input of its own.
        """
        work: dict[Stage, Callable[[], list[str]]] = {
            Stage.CONTROLLER: lambda: self._told(self._plane.controller.review(now=self.now)),
            Stage.HEALTH: self._let_time_pass,
            Stage.DRAINS: lambda: self._told(self._plane.controller.settle_drains()),
            Stage.READMISSION: self._readmit,
        }
        said = [line for stage, run in work.items() if results.get(stage, "not due") is None for line in run()]
        return said + self._told(self._plane.monitoring.finish_pass(results))

    def _let_time_pass(self) -> list[str]:
        fleet = self._plane.fleet
        return self._told([*fleet.tick(now=self.now), *fleet.probing.due(now=self.now)])

    def _readmit(self) -> list[str]:
        return [f"readmission of {engine} begins" for engine in self._plane.fleet.readmission.take_due(now=self.now)]

    def restart(self, *, resume: bool) -> list[str]:
        """Another process takes the place of this one, with the handoff of this instant or without any."""
        document = self._plane.capture(LEASE, version=1, now=self.now, wall=0.0)
        self._plane = self._started()
        if resume:
            self._plane.restore(document, now=self.now)
        return self.ready()

    def request(self) -> list[str]:
        """A client's request comes: who would serve it, if anybody. Its legs are over at once, without evidence."""
        readiness = self._plane.readiness(now=self.now, lease_now=self.now)
        if not readiness.ready:
            return [f"refused with 503: {readiness.reason}"]
        pair = choose(self._plane.fleet, now=self.now)
        assert isinstance(pair, Pair), "the router admits without an engine"
        for engine, leg in ((pair.prefill, Leg.PREFILL), (pair.decode, Leg.DECODE)):
            self._plane.apply(LegStarted(engine.id, leg), now=self.now)
            self._plane.apply(LegReleased(engine.id, leg), now=self.now)
        return [f"placed on {pair.prefill.id}+{pair.decode.id}"]

    def ready(self) -> list[str]:
        """What /ready says."""
        readiness = self._plane.readiness(now=self.now, lease_now=self.now)
        return [f"ready: {200 if readiness.ready else 503} {readiness.reason}"]

    def state(self, engine: Engine) -> list[str]:
        """How an engine stands."""
        return [self._wording.state(engine, self._plane.fleet, now=self.now)]

    @property
    def _wording(self) -> Wording:
        return Wording(started_at=START)

    def _told(self, decisions: Iterable[Decision]) -> list[str]:
        return [self._wording.decision(decision, self._plane.fleet, now=self.now) for decision in decisions]
