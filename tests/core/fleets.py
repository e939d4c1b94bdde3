"""Small fleets for tests: `p1 p2 ... d1 d2 ...`, and short words for what happens to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from narwhal.config import Config, EngineEntry, RecoverySection, parse_config
from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import (
    Decision,
    FleetEvent,
    InferenceProbed,
    LegFailed,
    LegSucceeded,
    LivenessSilent,
    PairFinding,
    ProbeOrdered,
)
from narwhal.core.fleet import Fleet
from narwhal.core.vocabulary import EngineId, FailureClass, HoldKind, Leg, ProbeKind

P1, P2, D1, D2 = EngineId("p1"), EngineId("p2"), EngineId("d1"), EngineId("d2")

EVIDENCE: Final = [failure_class for failure_class in FailureClass if failure_class is not FailureClass.LIVENESS]
"""The classes that legs give evidence of; liveness has its own event and its own limit."""


def entries(*, prefill: int = 2, decode: int = 2) -> tuple[EngineEntry, ...]:
    """Configured engines p1..pN and d1..dN."""
    prefills = (EngineEntry(id=f"p{n}", url=f"http://10.0.1.{n}:8000", role="prefill") for n in range(1, prefill + 1))
    decodes = (EngineEntry(id=f"d{n}", url=f"http://10.0.2.{n}:8000", role="decode") for n in range(1, decode + 1))
    return (*prefills, *decodes)


def make_fleet(*, prefill: int = 2, decode: int = 2, **recovery: Any) -> Fleet:
    """A fleet with the given recovery settings."""
    return Fleet(entries(prefill=prefill, decode=decode), RecoverySection(**recovery))


def make_config(*, prefill: int = 2, decode: int = 2, **sections: dict[str, Any]) -> Config:
    """A whole configuration; a section is given by its keys."""
    engines = [entry.model_dump() for entry in entries(prefill=prefill, decode=decode)]
    return parse_config({"serving": {"models": ["m"]}, "engines": engines, **sections}, source="test")


def make_plane(*, prefill: int = 2, decode: int = 2, **sections: dict[str, Any]) -> ControlPlane:
    """A control plane of a router that has not started yet."""
    return ControlPlane(make_config(prefill=prefill, decode=decode, **sections))


def leg_of(engine: Engine) -> Leg:
    """The leg that an engine of this role is asked for."""
    return Leg(engine.role.value)


class Driven:
    """A fleet and its clock: tests say what happens, at which second, and read what was decided."""

    def __init__(self, fleet: Fleet, *, now: float = 100.0) -> None:
        self.fleet = fleet
        self.now = now

    def __getitem__(self, engine: str) -> Engine:
        return self.fleet.engines[EngineId(engine)]

    def apply(self, event: FleetEvent) -> list[Decision]:
        return self.fleet.apply(event, now=self.now)

    def tick(self, seconds: float = 0.0) -> list[Decision]:
        self.now += seconds
        return self.fleet.tick(now=self.now)

    def fail(
        self,
        engine: EngineId,
        failure_class: FailureClass,
        *,
        times: int = 1,
        partner: EngineId | None = None,
        leg: Leg | None = None,
    ) -> list[Decision]:
        """Let `times` legs of `engine` fail; return all that was decided."""
        decisions: list[Decision] = []
        for _ in range(times):
            decisions += self.apply(LegFailed(engine, leg or leg_of(self[engine]), failure_class, partner))
        return decisions

    def succeed(self, engine: EngineId) -> list[Decision]:
        return self.apply(LegSucceeded(engine, leg_of(self[engine])))

    def silent(self, engine: EngineId, *, times: int = 1) -> list[Decision]:
        decisions: list[Decision] = []
        for _ in range(times):
            decisions += self.apply(LivenessSilent(engine))
        return decisions

    def probed(self, engine: EngineId, *findings: PairFinding) -> list[Decision]:
        return self.apply(InferenceProbed(engine, findings))

    def eligible(self, engine: str) -> bool:
        return self[engine].eligible(self.now)

    def holds(self, engine: str) -> set[HoldKind]:
        return set(self[engine].holds)


def ordered(decisions: Iterable[Decision]) -> list[tuple[EngineId, ProbeKind]]:
    """Which probes were ordered."""
    return [(d.engine, d.kind) for d in decisions if isinstance(d, ProbeOrdered)]


def served(prefill: EngineId, decode: EngineId) -> PairFinding:
    """A probe over this pair that worked."""
    return PairFinding(prefill, decode)


def broke(prefill: EngineId, decode: EngineId, leg: Leg) -> PairFinding:
    """A probe over this pair of which one leg failed."""
    return PairFinding(prefill, decode, failed_leg=leg, detail=f"{leg} leg of {prefill}+{decode}")


def unclear(prefill: EngineId, decode: EngineId) -> PairFinding:
    """A probe over this pair from which nothing follows."""
    return PairFinding(prefill, decode, conclusive=False, detail=f"pool full for {prefill}+{decode}")
