"""What a fleet must look like, kept beside it in plain dicts: counts from the events, states from what was decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from narwhal.core.events import (
    Decision,
    EngineEjected,
    EngineReadmitted,
    FleetEvent,
    GenerationSeen,
    HealthAnswered,
    HealthProbed,
    HoldLifted,
    HoldPlaced,
    InferenceProbed,
    LegFailed,
    LegRefused,
    LegReleased,
    LegStarted,
    LegSucceeded,
    LivenessSilent,
    ProbeJudged,
    ProbeOrdered,
    ReadmissionPassed,
)
from narwhal.core.vocabulary import EngineId, HoldKind, ProbeKind, ProbeResult

ROW: Final = {
    "client_error": {"connection", "inference_status"},
    "health": {"connection", "timeout", "overload", "liveness"},
    "prefill": {"connection", "inference_status", "kv_handoff"},
    "decode": {"connection", "inference_status", "stream"},
}
"""The source's clearing table, written out again."""

TRANSFER: Final = {"stream", "inference_status"}
ON_ITS_TICKETS: Final = ("kv_handoff", "decode")
"""A prefill engine's streak of decode legs that failed over its tickets."""

INFERENCE: Final = {"stream", "inference_status", "kv_handoff"}


@dataclass(slots=True)
class EngineModel:
    """One engine as the events and the decisions describe it."""

    role: str
    by_class: dict[str, int] = field(default_factory=dict)
    by_leg: dict[tuple[str, str], int] = field(default_factory=dict)
    inflight: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    generation: str | None = None
    ejected: bool = False
    holds: set[HoldKind] = field(default_factory=set)
    running: dict[ProbeKind, int] = field(default_factory=dict)
    waiting: set[ProbeKind] = field(default_factory=set)

    def clear(self, classes: Iterable[str], *, legs: bool = False) -> None:
        for name in classes:
            self.by_class.pop(name, None)
            if legs:
                self.by_leg = {key: n for key, n in self.by_leg.items() if key[0] != name}

    def served(self, leg: str) -> None:
        self.clear(ROW[leg])
        self.by_leg = {key: n for key, n in self.by_leg.items() if key[1] != leg}

    def forget(self) -> None:
        self.by_class.clear()
        self.by_leg.clear()

    def drop_probes(self) -> None:
        self.running.clear()
        self.waiting.clear()


class FleetModel:
    """Takes in each event with what was decided, and complains about decisions that cannot be."""

    def __init__(self, roles: dict[EngineId, str]) -> None:
        self.engines = {name: EngineModel(role) for name, role in roles.items()}

    def took(self, event: FleetEvent, decisions: list[Decision]) -> None:
        """Take in `event`, and then what was decided on it."""
        self._count(self.engines[event.engine], event, decisions)
        self.decided(decisions)

    def decided(self, decisions: Iterable[Decision]) -> None:
        """Move the states as the decisions say."""
        for decision in decisions:
            match decision:
                case EngineEjected(engine=name):
                    assert not self.engines[name].ejected, "ejected twice"
                    self.engines[name].ejected = True
                    self.engines[name].drop_probes()
                case EngineReadmitted(engine=name):
                    self.engines[name].ejected = False
                    self.engines[name].drop_probes()
                case HoldPlaced(engine=name, kind=kind):
                    self.engines[name].holds.add(kind)
                case HoldLifted(engine=name, kind=kind):
                    self.engines[name].holds.remove(kind)
                case ProbeOrdered(engine=name, kind=kind, number=number):
                    model = self.engines[name]
                    assert kind not in model.running, "a second probe of one kind was ordered"
                    assert not model.ejected, "a probe of an ejected engine was ordered"
                    model.waiting.discard(kind)
                    model.running[kind] = number
                case _:
                    pass

    def handed_over(self) -> None:
        """What another process knows after it restored the document of this one."""
        for model in self.engines.values():
            model.inflight = {"prefill": 0, "decode": 0}
            model.drop_probes()
            if HoldKind.INFERENCE_VERIFICATION in model.holds:
                model.waiting.add(ProbeKind.INFERENCE)

    def _count(self, model: EngineModel, event: FleetEvent, decisions: list[Decision]) -> None:
        match event:
            case LegStarted(leg=leg):
                model.inflight[leg] += 1
            case LegReleased(leg=leg):
                model.inflight[leg] -= 1
            case LegSucceeded(leg=leg, partner=partner):
                model.served(leg)
                if leg == "decode":
                    self._ticket_served(partner)
            case LegRefused():
                model.clear(ROW["client_error"])
            case LegFailed(failure_class=name, leg=leg, partner=partner):
                model.by_class[name] = model.by_class.get(name, 0) + 1
                model.by_leg[name, leg] = model.by_leg.get((name, leg), 0) + 1
                if partner is not None and leg == "decode" and name in TRANSFER:
                    by_leg = self.engines[partner].by_leg
                    by_leg[ON_ITS_TICKETS] = by_leg.get(ON_ITS_TICKETS, 0) + 1
            case HealthAnswered():
                model.clear(ROW["health"])
            case HealthProbed() | InferenceProbed():
                self._probed(model, event, decisions)
            case _:
                self._count_rare(model, event)

    @staticmethod
    def _count_rare(model: EngineModel, event: FleetEvent) -> None:
        match event:
            case LivenessSilent():
                model.by_class["liveness"] = model.by_class.get("liveness", 0) + 1
            case GenerationSeen(generation=generation):
                if model.generation not in (None, generation):
                    model.forget()
                model.generation = generation
            case ReadmissionPassed(generation=generation):
                model.forget()
                model.generation = generation or model.generation
            case _:
                pass

    def _probed(self, model: EngineModel, event: HealthProbed | InferenceProbed, decisions: list[Decision]) -> None:
        kind = ProbeKind.HEALTH if isinstance(event, HealthProbed) else ProbeKind.INFERENCE
        in_time = kind in model.running and event.number in (None, model.running[kind])
        (judged,) = [d for d in decisions if isinstance(d, ProbeJudged)]
        if in_time:
            del model.running[kind]
            if judged.result is ProbeResult.INCONCLUSIVE:
                model.waiting.add(kind)
            if isinstance(event, InferenceProbed):
                for finding in event.findings:
                    if finding.conclusive and finding.failed_leg is None:
                        self._ticket_served(finding.prefill)
        else:
            assert judged.result is ProbeResult.INCONCLUSIVE, "a late verdict counted"
        if isinstance(event, HealthProbed):
            if event.result is ProbeResult.PASSED:
                model.clear(ROW["health"], legs=in_time)
        elif judged.result is ProbeResult.PASSED:
            model.served(model.role)
            model.clear(INFERENCE, legs=True)

    def _ticket_served(self, prefill: EngineId | None) -> None:
        if prefill is not None:
            self.engines[prefill].by_leg.pop(ON_ITS_TICKETS, None)
