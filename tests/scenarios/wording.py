"""How scenario files put what the core decided: one line each decision, one line each state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from narwhal.core.engine import Engine
from narwhal.core.events import (
    ConsolidationRiskChanged,
    Decision,
    DrainSettled,
    EngineEjected,
    EngineReadmitted,
    EvidenceCleared,
    HoldLifted,
    HoldPlaced,
    MonitoringDegraded,
    MonitoringRecovered,
    PairParted,
    PairRejoined,
    ProbeJudged,
    ProbeOrdered,
    ReadmissionBlocked,
)
from narwhal.core.fleet import Fleet
from narwhal.core.vocabulary import FailureClass, Leg, ProbeKind


@dataclass(frozen=True)
class Wording:
    """Words for decisions and states; instants are shown in seconds since `started_at`."""

    started_at: float

    def decision(self, decision: Decision, fleet: Fleet, *, now: float) -> str:
        """Return the line of `decision`."""
        match decision:
            case EngineEjected(engine, cause, streak, detail):
                return f"{engine} ejected ({cause}{f', streak {streak}' if streak else ''}){because(detail)}"
            case EngineReadmitted(engine):
                return f"{engine} readmitted"
            case HoldPlaced(engine, kind, reason):
                return f"{engine} held: {kind} ({reason})"
            case HoldLifted(engine, kind, reason):
                return f"{engine} no longer held: {kind} ({reason})"
            case EvidenceCleared(engine, classes, reason):
                return f"{engine} cleared of {', '.join(classes)} ({reason})"
            case ProbeOrdered() | ProbeJudged():
                return self._probe(decision, fleet, now)
            case MonitoringDegraded(stage, error_class, streak):
                return f"monitoring degraded: {stage} {error_class} (streak {streak})"
            case MonitoringRecovered():
                return "monitoring recovered"
            case _:
                return self._rarely(decision)

    def _probe(self, decision: ProbeOrdered | ProbeJudged, fleet: Fleet, now: float) -> str:
        if isinstance(decision, ProbeJudged):
            again = "" if decision.next_at is None else f", again from {self._at(decision.next_at)}"
            return f"{decision.kind} probe of {decision.engine} {decision.result}{again}{because(decision.detail)}"
        line = f"{decision.kind} probe of {decision.engine} ordered ({decision.cause})"
        if decision.kind is ProbeKind.HEALTH:
            return line
        pairs = fleet.probing.plan(decision.engine, decision.partner, now=now)
        return f"{line}: {', then '.join(f'{prefill.id}+{decode.id}' for prefill, decode in pairs)}"

    def _rarely(
        self, decision: ReadmissionBlocked | PairParted | PairRejoined | DrainSettled | ConsolidationRiskChanged
    ) -> str:
        match decision:
            case ReadmissionBlocked(engine, step, reason, retry_at):
                return f"readmission of {engine} stopped at {step}, again from {self._at(retry_at)}{because(reason)}"
            case PairParted(prefill, decode, detail, next_at):
                return f"{prefill}+{decode} kept apart until a probe from {self._at(next_at)}{because(detail)}"
            case PairRejoined(prefill, decode, reason):
                return f"{prefill}+{decode} no longer kept apart ({reason})"
            case DrainSettled(engine):
                return f"{engine} has no work left"
            case ConsolidationRiskChanged(role, at_risk):
                return f"{role} rests on {'at most one engine' if at_risk else 'several engines again'}"

    def state(self, engine: Engine, fleet: Fleet, *, now: float) -> str:
        """Return how `engine` stands: whether it may get work, why not, its streaks, and the probes to come."""
        parts = ["eligible" if engine.eligible(now) else "not eligible", *self._obstacles(engine)]
        parts += [f"{c} {n}" for c, n in engine.streaks.by_class.items()]
        parts += [f"{c} on {leg} {n}" for (c, leg), n in engine.streaks.by_leg.items() if own(engine, c, leg, n)]
        for kind, probe in engine.probes.items():
            at = fleet.probing.next_at(engine, kind)
            parts.append(f"{kind} probe {'running' if probe.running or at is None else f'from {self._at(at)}'}")
        return f"state: {engine.id} {'; '.join(parts)}"

    def _obstacles(self, engine: Engine) -> Iterator[str]:
        if engine.ejection is not None:
            yield f"ejected ({engine.ejection.cause})"
        for hold in engine.holds.values():
            yield f"held: {hold.kind}" + ("" if hold.until == inf else f" until {self._at(hold.until)}")

    def _at(self, instant: float) -> str:
        return f"{round(instant - self.started_at, 3):g}s"


def because(detail: str) -> str:
    """Return `detail` as the end of a line, if there is any."""
    return f": {detail}" if detail else ""


def own(engine: Engine, failure_class: FailureClass, leg: Leg, count: int) -> bool:
    """Whether a leg streak says more than the class streak beside it."""
    return engine.streaks.by_class.get(failure_class, 0) != count or leg.value != engine.role.value
