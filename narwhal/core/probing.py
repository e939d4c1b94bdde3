"""Which probes are in flight or due: one per engine and kind, with capped back-off while they stay inconclusive.

Source: source, "Failure evidence"; decisions 12 and 13.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from narwhal.core.backoff import delay_s
from narwhal.core.engine import Engine, PendingProbe, Remark
from narwhal.core.events import Decision, ProbeJudged, ProbeOrdered
from narwhal.core.vocabulary import EngineId, FailureClass, HoldKind, ProbeKind, ProbeResult, Role

if TYPE_CHECKING:
    from narwhal.core.fleet import Fleet


class Probing:
    """The fleet's open probes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._orders = 0

    def order(
        self,
        engine: Engine,
        kind: ProbeKind,
        cause: FailureClass | None,
        partner: EngineId | None,
        *,
        passed_on: bool = False,
    ) -> list[Decision]:
        """Order a probe of `engine` unless one of that kind is open: the same verdict is not acted on twice.

        `passed_on` marks a suspicion that another engine's probe passed on; it is not passed on again.
        """
        if kind in engine.probes:
            return []
        probe = engine.probes[kind] = PendingProbe(cause, partner, running=True, passed_on=passed_on)
        return [self._start(engine, kind, probe)]

    def _start(self, engine: Engine, kind: ProbeKind, probe: PendingProbe) -> ProbeOrdered:
        self._orders += 1
        probe.running = True
        probe.number = self._orders
        return ProbeOrdered(engine.id, kind, probe.partner, probe.cause, probe.number)

    def plan(self, suspect: EngineId, partner: EngineId | None, *, now: float) -> list[tuple[Engine, Engine]]:
        """Return the (prefill, decode) pairs to try, in order, until the suspect has served with one of them."""
        engine = self._fleet.engines[suspect]
        other = Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL
        ranked = sorted(self._fleet.by_role[other], key=lambda e: (e.id != partner, *fitness(e, now)))
        pairs = [_ordered(engine, e) for e in ranked if e.ejection is None or e is ranked[0]][:2]
        if len(pairs) == 1 and engine.role is Role.DECODE:
            peers = sorted(self._fleet.by_role[Role.DECODE], key=lambda e: fitness(e, now))
            pairs += [(pairs[0][0], peer) for peer in peers if peer is not engine and peer.ejection is None][:1]
        return pairs

    def due(self, *, now: float) -> list[ProbeOrdered]:
        """Return the inconclusive probes that are due again, now marked as running."""
        return [
            self._start(engine, kind, probe)
            for engine in self._fleet.engines.values()
            for kind, probe in engine.probes.items()
            if not probe.running and probe.due_at <= now
        ]

    def answered(self, engine: Engine, kind: ProbeKind, number: int | None) -> PendingProbe | None:
        """Return the running probe that a verdict answers; None if it comes too late for anything to follow from it.

        Meanwhile the engine may have been ejected and readmitted, so that the verdict is about its past.
        """
        probe = engine.probes.get(kind)
        if probe is None or not probe.running or number not in (None, probe.number):
            return None
        return probe

    def finished(self, engine: Engine, kind: ProbeKind, result: ProbeResult, detail: str, now: float) -> ProbeJudged:
        """Close the probe of `kind`, or schedule the next one if it was inconclusive; return the verdict."""
        engine.history.append(Remark(now, f"{kind} probe {result}", detail))
        if result is not ProbeResult.INCONCLUSIVE:
            del engine.probes[kind]
            return ProbeJudged(engine.id, kind, result, detail)
        probe = engine.probes[kind]
        recovery = self._fleet.recovery
        probe.running = False
        probe.attempts += 1
        probe.due_at = now + delay_s(
            probe.attempts, first_s=recovery.retry_backoff_s, max_s=recovery.retry_backoff_max_s
        )
        hold = engine.holds.get(HoldKind.INFERENCE_VERIFICATION)
        if kind is ProbeKind.INFERENCE and hold is not None:
            hold.attempts = probe.attempts
        return ProbeJudged(engine.id, kind, result, detail, probe.due_at)

    def next_at(self, engine: Engine, kind: ProbeKind) -> float | None:
        """Return the loop time of the next probe of `kind`; None if none is scheduled or one is running."""
        probe = engine.probes.get(kind)
        return probe.due_at if probe is not None and probe.due_at < inf and not probe.running else None


def fitness(engine: Engine, now: float) -> tuple[bool, bool, int, str]:
    """Order engines by how well they can vouch: eligible, then held, then ejected; then least loaded, then by id."""
    return (not engine.eligible(now), engine.ejection is not None, engine.resident, engine.id)


def _ordered(one: Engine, other: Engine) -> tuple[Engine, Engine]:
    return (one, other) if one.role is Role.PREFILL else (other, one)
