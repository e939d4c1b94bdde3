"""The fleet: every engine, and the one state machine that moves them.

`Fleet.apply(event, now=...)` takes in what happened and returns what was decided. It reads no clock, does no IO and is
deterministic: the same events give the same decisions. The invariants, which the tests hold it to:
- an ejected or held engine is never eligible;
- a yielding hold never leaves a role without an eligible engine;
- a streak equals the failures since the last evidence that clears it.
Source: source, "Engine failure handling" and "Readmission and drains".
"""

from __future__ import annotations

from collections.abc import Iterable

from narwhal.config import EngineEntry, RecoverySection
from narwhal.core.engine import Ejection, Engine, PendingProbe, Remark
from narwhal.core.events import (
    Decision,
    DrainCancelled,
    DrainOrdered,
    EjectionOrdered,
    EngineEjected,
    EngineReadmitted,
    EvidenceCleared,
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
    ReadmissionFailed,
    ReadmissionPassed,
)
from narwhal.core.evidence import ACTION, INFERENCE_CLASSES
from narwhal.core.holds import RULES, Hold
from narwhal.core.pairs import PairIds, Pairs
from narwhal.core.probing import Probing
from narwhal.core.readmission import Readmission
from narwhal.core.verdict import judge
from narwhal.core.vocabulary import (
    Action,
    EjectionCause,
    EngineId,
    FailureClass,
    HoldKind,
    Leg,
    ProbeKind,
    ProbeResult,
    Role,
    Success,
)

SUCCESS_OF_LEG = {Leg.PREFILL: Success.PREFILL, Leg.DECODE: Success.DECODE}


class Fleet:
    """Every engine of the cluster, and what is allowed to happen to it."""

    def __init__(self, engines: Iterable[EngineEntry], recovery: RecoverySection) -> None:
        self.recovery = recovery
        self.engines: dict[EngineId, Engine] = {
            EngineId(entry.id): Engine(EngineId(entry.id), entry.url, Role(entry.role))
            for entry in sorted(engines, key=lambda entry: entry.id)
        }
        self.by_role: dict[Role, list[Engine]] = {}
        self.index_roles()
        self._legs_placed = 0
        self.probing = Probing(self)
        self.pairs = Pairs(self)
        self.readmission = Readmission(self)

    def index_roles(self) -> None:
        """Rebuild the list of engines per role after roles were set."""
        self.by_role = {role: [e for e in self.engines.values() if e.role is role] for role in Role}

    def apply(self, event: FleetEvent, *, now: float) -> list[Decision]:
        """Take in `event` at loop time `now` and return what follows from it."""
        engine = self.engines[event.engine]
        match event:
            case LegStarted():
                engine.inflight[event.leg] += 1
                engine.resident += 1
                self._legs_placed += 1
                engine.last_placed = self._legs_placed
                return []
            case LegReleased():
                assert engine.inflight[event.leg] > 0, "a leg was released twice"
                engine.inflight[event.leg] -= 1
                engine.resident -= 1
                return []
            case LegSucceeded():
                engine.interval.succeeded += 1
                return self._leg_succeeded(engine, event, now)
            case LegRefused():
                return self._succeeded(engine, Success.CLIENT_ERROR, now)
            case LegFailed():
                engine.interval.failed += 1
                return self._failed(engine, event, now)
            case HealthAnswered():
                return self._succeeded(engine, Success.HEALTH, now)
            case _:
                return self._rarely(engine, event, now)

    def _rarely(
        self,
        engine: Engine,
        event: LivenessSilent
        | HealthProbed
        | InferenceProbed
        | GenerationSeen
        | DrainOrdered
        | DrainCancelled
        | EjectionOrdered
        | ReadmissionFailed
        | ReadmissionPassed,
        now: float,
    ) -> list[Decision]:
        match event:
            case LivenessSilent():
                return self._silent(engine, event.detail, now)
            case HealthProbed():
                return self._health_probed(engine, event, now)
            case InferenceProbed():
                return self._inference_probed(engine, event, now)
            case GenerationSeen():
                return self._generation_seen(engine, event.generation, now)
            case DrainOrdered():
                return self._drain(engine, event, now)
            case DrainCancelled():
                return self.lift(engine, HoldKind.OPERATOR_DRAIN, f"{event.actor}: {event.reason}", now)
            case EjectionOrdered():
                return self.eject(engine, EjectionCause.OPERATOR, 0, f"{event.actor}: {event.reason}", now)
            case ReadmissionFailed():
                return [self.readmission.failed(engine, event.step, event.reason, now)]
            case ReadmissionPassed():
                return self._readmitted(engine, event, now)

    def tick(self, *, now: float) -> list[Decision]:
        """Let time pass: end quarantines whose deadline is over, probing the engine if its evidence still stands.

        Pairs that are kept apart are probed when they are due.
        """
        decisions: list[Decision] = []
        for engine in self.engines.values():
            quarantine = engine.holds.get(HoldKind.FAILURE_QUARANTINE)
            if quarantine is None or quarantine.until > now:
                continue
            decisions += self.lift(engine, HoldKind.FAILURE_QUARANTINE, "deadline passed", now)
            standing = engine.streaks.full(self.recovery.eject_after)
            if standing and engine.ejection is None:
                decisions += self._verify(engine, standing[0], quarantine.partner, now)
        return decisions + self.pairs.due(now=now)

    def _leg_succeeded(self, engine: Engine, event: LegSucceeded, now: float) -> list[Decision]:
        decisions = self._succeeded(engine, SUCCESS_OF_LEG[event.leg], now)
        if event.leg is Leg.DECODE and event.partner is not None:
            decisions += self.pairs.served(PairIds(event.partner, engine.id))
        return decisions

    def _succeeded(self, engine: Engine, success: Success, now: float) -> list[Decision]:
        decisions = self._cleared(engine, engine.streaks.succeed(success), success)
        if success is Success.HEALTH and engine.holds:
            decisions += self._lift_all(engine, [k for k in engine.holds if RULES[k].health_ends_it], "health 200", now)
        return decisions

    @staticmethod
    def _cleared(engine: Engine, classes: Iterable[FailureClass], reason: str) -> list[Decision]:
        cleared = tuple(sorted(set(classes)))
        return [EvidenceCleared(engine.id, cleared, reason)] if cleared else []

    def _failed(self, engine: Engine, event: LegFailed, now: float) -> list[Decision]:
        streak = engine.streaks.fail(event.failure_class, event.leg)
        suspicion = self.pairs.failed(engine, event)
        if engine.ejection is not None:
            return []
        if streak < self.recovery.eject_after:
            return [] if suspicion is None else self._verify(suspicion.engine, suspicion.cause, suspicion.partner, now)
        decisions: list[Decision] = []
        match ACTION[event.failure_class]:
            case Action.EJECT:
                decisions += self.eject(engine, EjectionCause(event.failure_class), streak, event.detail, now)
            case Action.PROBE_HEALTH:
                decisions += self.probing.order(engine, ProbeKind.HEALTH, event.failure_class, event.partner)
                if event.failure_class is FailureClass.TIMEOUT and event.leg in engine.streaks.excused:
                    decisions += self._verify(engine, event.failure_class, event.partner, now)
            case Action.VERIFY_INFERENCE:
                decisions += self._verify(engine, event.failure_class, event.partner, now)
        return decisions + self._quarantine(engine, event, now)

    def _verify(
        self, engine: Engine, cause: FailureClass, partner: EngineId | None, now: float, *, passed_on: bool = False
    ) -> list[Decision]:
        """Pause new requests first, then order the probe: no request may slip in between."""
        placed: list[Decision] = []
        if HoldKind.INFERENCE_VERIFICATION not in engine.holds:
            hold = Hold(HoldKind.INFERENCE_VERIFICATION, since=now, reason=cause, partner=partner)
            placed = self.place(engine, hold, now)
        return placed + self.probing.order(engine, ProbeKind.INFERENCE, cause, partner, passed_on=passed_on)

    def _quarantine(self, engine: Engine, event: LegFailed, now: float) -> list[Decision]:
        """Start or extend the timed hold of a failed engine; it never shortens. Source: "Failure quarantine"."""
        length_s = self.recovery.failure_quarantine_s
        if length_s is None:
            return []
        standing = engine.holds.get(HoldKind.FAILURE_QUARANTINE)
        if standing is not None and standing.until > now:
            standing.until = max(standing.until, now + length_s)
            engine.refresh()
            return []
        if self._is_last(engine, now):
            return []
        hold = Hold(
            HoldKind.FAILURE_QUARANTINE,
            since=now,
            until=now + length_s,
            reason=event.failure_class,
            partner=event.partner,
        )
        return self.place(engine, hold, now)

    def _silent(self, engine: Engine, detail: str, now: float) -> list[Decision]:
        misses = engine.streaks.fail(FailureClass.LIVENESS)
        if misses < self.recovery.liveness_misses or engine.ejection is not None:
            return []
        return self.eject(engine, EjectionCause.LIVENESS, misses, detail, now)

    def _generation_seen(self, engine: Engine, generation: str, now: float) -> list[Decision]:
        """A new process behind the URL: the old one's evidence is void, and the new one must prove itself."""
        known, engine.generation = engine.generation, generation
        if known is None or known == generation:
            return []
        decisions = self._cleared(engine, engine.streaks.clear(), "new process") + self.pairs.forget(engine.id)
        detail = f"process {known} was replaced by {generation}"
        return decisions + self.eject(engine, EjectionCause.GENERATION_CHANGED, 0, detail, now)

    def _health_probed(self, engine: Engine, event: HealthProbed, now: float) -> list[Decision]:
        if self.probing.answered(engine, ProbeKind.HEALTH, event.number) is None:
            decisions = self._too_late(engine, ProbeKind.HEALTH)
        else:
            decisions = [self.probing.finished(engine, ProbeKind.HEALTH, event.result, event.detail, now)]
            if event.result is ProbeResult.FAILED:
                return decisions + self.eject(engine, EjectionCause.HEALTH_PROBE, 0, event.detail, now)
            if event.result is ProbeResult.PASSED:
                excused = engine.streaks.excuse(self.recovery.eject_after)
                decisions += self._cleared(engine, excused, "health probe passed")
        if event.result is ProbeResult.PASSED:
            decisions += self._succeeded(engine, Success.HEALTH, now)
        return decisions

    def _inference_probed(self, engine: Engine, event: InferenceProbed, now: float) -> list[Decision]:
        probe = self.probing.answered(engine, ProbeKind.INFERENCE, event.number)
        if probe is None:
            return self._too_late(engine, ProbeKind.INFERENCE)
        verdict = judge(engine.id, engine.role, event.findings)
        decisions: list[Decision] = [
            self.probing.finished(engine, ProbeKind.INFERENCE, verdict.result, verdict.detail, now)
        ]
        decisions += self.pairs.probed(engine, event.findings, now)
        if verdict.result is ProbeResult.PASSED:
            reason = "inference probe passed"
            success = SUCCESS_OF_LEG[Leg(engine.role.value)]
            absolved = (*engine.streaks.succeed(success), *engine.streaks.absolve(INFERENCE_CLASSES))
            decisions += self._cleared(engine, absolved, reason)
            decisions += self._lift_all(engine, [k for k in engine.holds if RULES[k].inference_ends_it], reason, now)
        if verdict.result is ProbeResult.FAILED:
            decisions += self.eject(engine, EjectionCause.INFERENCE_PROBE, 0, verdict.detail, now)
        if verdict.next_suspect is not None:
            decisions += self._pass_on(engine, self.engines[verdict.next_suspect], event, probe, now)
        return decisions

    def _pass_on(
        self, engine: Engine, suspect: Engine, event: InferenceProbed, probe: PendingProbe, now: float
    ) -> list[Decision]:
        """Suspect the partner of a cleared engine; if both were cleared in turn, it is the pair that does not work."""
        transfers = [f for f in event.findings if f.conclusive and f.failed_leg is Leg.DECODE]
        pairs = {PairIds(f.prefill, f.decode): f.detail for f in transfers if suspect.id in (f.prefill, f.decode)}
        if suspect.ejection is not None or pairs.keys() & self.pairs.apart.keys():
            return []
        if not probe.passed_on:
            return self._verify(suspect, FailureClass.KV_HANDOFF, engine.id, now, passed_on=True)
        return [decision for pair, detail in pairs.items() for decision in self.pairs.part(pair, detail, now)]

    @staticmethod
    def _too_late(engine: Engine, kind: ProbeKind) -> list[Decision]:
        """Convict nobody on a verdict about the past: the engine may have been ejected and readmitted since."""
        return [ProbeJudged(engine.id, kind, ProbeResult.INCONCLUSIVE, "the verdict came too late")]

    def eject(self, engine: Engine, cause: EjectionCause, streak: int, detail: str, now: float) -> list[Decision]:
        """Take `engine` out of placement until it is readmitted; an ejected engine stays as it is."""
        if engine.ejection is not None:
            return []
        decisions = self._end_hold(engine, HoldKind.INFERENCE_VERIFICATION, "ejected", now)
        engine.ejection = Ejection(cause, since=now, detail=detail, retry_at=now)
        engine.probes.clear()
        engine.refresh()
        engine.history.append(Remark(now, "ejected", f"{cause}: {detail}" if detail else cause))
        return [*decisions, EngineEjected(engine.id, cause, streak, detail), *self.keep_last(engine.role, now)]

    def _readmitted(self, engine: Engine, event: ReadmissionPassed, now: float) -> list[Decision]:
        engine.ejection = None
        engine.generation = event.generation or engine.generation
        engine.streaks.clear()
        engine.probes.clear()
        ended = [kind for kind in engine.holds if kind is not HoldKind.OPERATOR_DRAIN or event.clears_drain]
        decisions = self._lift_all(engine, ended, "readmitted", now) + self.pairs.forget(engine.id)
        engine.refresh()
        engine.history.append(Remark(now, "readmitted", "every check passed"))
        return [*decisions, EngineReadmitted(engine.id, engine.generation)]

    def _drain(self, engine: Engine, event: DrainOrdered, now: float) -> list[Decision]:
        if engine.drained:
            return []
        hold = Hold(HoldKind.OPERATOR_DRAIN, since=now, reason=event.reason, actor=event.actor)
        return self.place(engine, hold, now)

    def place(self, engine: Engine, hold: Hold, now: float) -> list[Decision]:
        """Put `hold` on `engine`, then lift what must yield so that its role keeps an eligible engine."""
        engine.holds[hold.kind] = hold
        engine.refresh()
        engine.history.append(Remark(now, f"{hold.kind} placed", hold.reason))
        return [HoldPlaced(engine.id, hold.kind, hold.reason), *self.keep_last(engine.role, now)]

    def lift(self, engine: Engine, kind: HoldKind, reason: str, now: float) -> list[Decision]:
        """End the hold `kind` of `engine`, if there is one; what then still keeps its role empty yields as well."""
        return self._lift_all(engine, [kind], reason, now)

    def _lift_all(self, engine: Engine, kinds: list[HoldKind], reason: str, now: float) -> list[Decision]:
        lifted = [decision for kind in kinds for decision in self._end_hold(engine, kind, reason, now)]
        return [*lifted, *self.keep_last(engine.role, now)] if lifted else []

    @staticmethod
    def _end_hold(engine: Engine, kind: HoldKind, reason: str, now: float) -> list[Decision]:
        if engine.holds.pop(kind, None) is None:
            return []
        engine.refresh()
        engine.history.append(Remark(now, f"{kind} lifted", reason))
        return [HoldLifted(engine.id, kind, reason)]

    def keep_last(self, role: Role, now: float) -> list[Decision]:
        """Lift yielding holds if `role` would be left without an eligible engine: the longest held engine returns.

        Holds that do not yield, and ejections, may empty the role. Source: source, "Last-engine protection".
        """
        engines = self.by_role[role]
        relievable = [engine for engine in engines if engine.relievable]
        if not relievable or any(engine.eligible(now) for engine in engines):
            return []
        engine = min(relievable, key=lambda e: (min(hold.since for hold in e.holds.values()), e.id))
        reason = f"last {role} engine"
        return [decision for kind in list(engine.holds) for decision in self._end_hold(engine, kind, reason, now)]

    def _is_last(self, engine: Engine, now: float) -> bool:
        """Whether a yielding hold on `engine` would be lifted again at once, since nobody else could take its place."""
        others = [other for other in self.by_role[engine.role] if other is not engine]
        return engine.eligible(now) and not any(other.eligible(now) or other.relievable for other in others)
