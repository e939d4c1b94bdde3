"""Readmission: which ejected engines are due for it, and what a failed step leads to.

The checks run in the order of `ReadmissionStep`; the first that fails names the step. A failed attempt is retried with
capped back-off; nothing but an operator drain needs an operator.
Source: source, "Readmission and drains"; decisions 16 to 18.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narwhal.core.backoff import delay_s
from narwhal.core.engine import Engine, Remark
from narwhal.core.events import ReadmissionBlocked
from narwhal.core.probing import fitness
from narwhal.core.vocabulary import EngineId, ReadmissionStep, Role

if TYPE_CHECKING:
    from narwhal.core.fleet import Fleet


class Readmission:
    """The way back of ejected engines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def take_due(self, *, now: float) -> list[EngineId]:
        """Return the ejected engines whose next attempt is due, now marked as running."""
        due = []
        for engine in self._fleet.engines.values():
            ejection = engine.ejection
            if ejection is not None and not ejection.running and ejection.retry_at <= now:
                ejection.running = True
                due.append(engine.id)
        return due

    def failed(self, engine: Engine, step: ReadmissionStep, reason: str, now: float) -> ReadmissionBlocked:
        """Note why the attempt stopped and when the next one is due."""
        ejection = engine.ejection
        if ejection is None:
            return ReadmissionBlocked(engine.id, step, reason, retry_at=now)
        recovery = self._fleet.recovery
        if (step, reason) != (ejection.last_step, ejection.last_reason):
            engine.history.append(Remark(now, f"readmission stopped at {step}", reason))
        ejection.running = False
        ejection.attempts += 1
        ejection.last_step = step
        ejection.last_reason = reason
        ejection.retry_at = now + delay_s(
            ejection.attempts, first_s=recovery.retry_backoff_s, max_s=recovery.retry_backoff_max_s
        )
        return ReadmissionBlocked(engine.id, step, reason, ejection.retry_at)

    def partners(self, engine: Engine, *, now: float) -> list[Engine]:
        """Return the engines of the other role that can vouch in a KV transfer, the fittest first.

        Eligible ones come first, then held ones, ejected ones last: a fleet of which every engine was ejected can still
        prove itself pair by pair.
        """
        other = Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL
        return sorted(self._fleet.by_role[other], key=lambda e: fitness(e, now))
