"""From the control plane to a handoff document and back.

`capture` and `restore` are inverse: a document that was restored and captured again at the same instant is the same
but for its version. What is in flight is not carried: it belongs to the process.
Source: source, "Durable control-plane state"; decision 15.
"""

from __future__ import annotations

from math import inf

from narwhal.core.engine import Ejection, Engine, PendingProbe
from narwhal.core.fleet import Fleet
from narwhal.core.handoff import (
    EjectionPart,
    EnginePart,
    HandoffDocument,
    HoldPart,
    PairPart,
    PairStreakPart,
    StreakPart,
)
from narwhal.core.holds import Hold
from narwhal.core.pairs import Apart, PairIds
from narwhal.core.vocabulary import FailureClass, HoldKind, Leg, ProbeKind


def capture_engines(fleet: Fleet, *, now: float) -> tuple[EnginePart, ...]:
    """Return every engine's place in the control plane at loop time `now`."""
    return tuple(_engine_part(engine, now) for engine in fleet.engines.values())


def capture_pairs(fleet: Fleet, *, now: float) -> tuple[PairPart, ...]:
    """Return the pairs that are kept apart at loop time `now`."""
    return tuple(
        PairPart(prefill=pair.prefill, decode=pair.decode, age_s=max(0.0, now - apart.since), attempts=apart.attempts)
        for pair, apart in sorted(fleet.pairs.apart.items())
    )


def capture_pair_streaks(fleet: Fleet) -> tuple[PairStreakPart, ...]:
    """Return the pairs that failed together since they last served."""
    return tuple(
        PairStreakPart(prefill=pair.prefill, decode=pair.decode, count=count)
        for pair, count in sorted(fleet.pairs.streaks.items())
    )


def restore_engines(fleet: Fleet, document: HandoffDocument, *, now: float) -> None:
    """Put every engine of `fleet`, and every pair, where `document` says; the engine sets must match.

    A probe of a pair that is kept apart is due at once.
    """
    for part in document.engines:
        engine = fleet.engines[part.id]
        engine.role = part.role
        engine.generation = part.generation
        engine.ejection = _ejection(part.ejection, now)
        engine.holds = {hold.kind: _hold(hold, now) for hold in part.holds}
        engine.probes = _probes(engine, now)
        engine.streaks.clear()
        for streak in part.streaks:
            if streak.leg is None:
                engine.streaks.by_class[streak.failure_class] = streak.count
            else:
                engine.streaks.by_leg[streak.failure_class, streak.leg] = streak.count
        engine.streaks.excused = set(part.excused)
        engine.refresh()
    fleet.index_roles()
    fleet.pairs.streaks = {
        PairIds(part.prefill, part.decode): part.count
        for part in document.pair_streaks
        if {part.prefill, part.decode} <= fleet.engines.keys()
    }
    fleet.pairs.apart = {
        PairIds(part.prefill, part.decode): Apart(since=now - part.age_s, due_at=now, attempts=part.attempts)
        for part in document.pairs_apart
        if {part.prefill, part.decode} <= fleet.engines.keys()
    }


def _engine_part(engine: Engine, now: float) -> EnginePart:
    return EnginePart(
        id=engine.id,
        url=engine.url,
        role=engine.role,
        generation=engine.generation,
        ejection=_ejection_part(engine.ejection, now),
        holds=tuple(_hold_part(engine.holds[kind], now) for kind in HoldKind if kind in engine.holds),
        streaks=_streak_parts(engine),
        excused=tuple(leg for leg in Leg if leg in engine.streaks.excused),
    )


def _streak_parts(engine: Engine) -> tuple[StreakPart, ...]:
    by_class = engine.streaks.by_class
    by_leg = engine.streaks.by_leg
    return (
        *(StreakPart(failure_class=c, count=by_class[c]) for c in FailureClass if c in by_class),
        *(
            StreakPart(failure_class=c, leg=leg, count=by_leg[c, leg])
            for c in FailureClass
            for leg in Leg
            if (c, leg) in by_leg
        ),
    )


def _ejection_part(ejection: Ejection | None, now: float) -> EjectionPart | None:
    if ejection is None:
        return None
    return EjectionPart(
        cause=ejection.cause,
        age_s=max(0.0, now - ejection.since),
        detail=ejection.detail,
        attempts=ejection.attempts,
        last_step=ejection.last_step,
        last_reason=ejection.last_reason,
    )


def _ejection(part: EjectionPart | None, now: float) -> Ejection | None:
    if part is None:
        return None
    return Ejection(
        cause=part.cause,
        since=now - part.age_s,
        detail=part.detail,
        attempts=part.attempts,
        retry_at=now,
        last_step=part.last_step,
        last_reason=part.last_reason,
    )


def _hold_part(hold: Hold, now: float) -> HoldPart:
    return HoldPart(
        kind=hold.kind,
        age_s=max(0.0, now - hold.since),
        reason=hold.reason,
        actor=hold.actor,
        remaining_s=None if hold.until == inf else max(0.0, hold.until - now),
        partner=hold.partner,
        attempts=hold.attempts,
    )


def _hold(part: HoldPart, now: float) -> Hold:
    return Hold(
        kind=part.kind,
        since=now - part.age_s,
        until=inf if part.remaining_s is None else now + part.remaining_s,
        reason=part.reason,
        actor=part.actor,
        partner=part.partner,
        attempts=part.attempts,
    )


def _probes(engine: Engine, now: float) -> dict[ProbeKind, PendingProbe]:
    """A verification hold without a probe would never end: the first one is due at once."""
    hold = engine.holds.get(HoldKind.INFERENCE_VERIFICATION)
    if hold is None:
        return {}
    cause = FailureClass(hold.reason) if hold.reason in set(FailureClass) else None
    probe = PendingProbe(cause, hold.partner, running=False, due_at=now, attempts=hold.attempts)
    return {ProbeKind.INFERENCE: probe}
