"""Pairs: decode legs that failed over a ticket, and the prefill and decode engines that do not work together.

A failed decode is charged to the decode engine. But its KV came from a prefill engine, over a link between the two, and
an engine that also works with others never fills a streak of its own. So two more streaks count decode legs in a row
that failed over a ticket in a class that a bad transfer can cause:
- of the prefill engine whose ticket it was, whoever used it. Full, it is verified: it may poison its partners. It is
  kept as its leg streak (kv_handoff, decode), which a decode over its ticket or a passed probe clears;
- of the pair. Full, the decode engine is verified, with that partner first.
While one of the two is held for verification nobody is suspected beside it: its probe tries the pair. When each of two
engines is found well with others and the two fail together, nobody is ejected: placement keeps them apart where it can,
and a probe with capped back-off tells when the pair works again.
Source: decision 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from narwhal.core.backoff import delay_s
from narwhal.core.engine import Engine
from narwhal.core.events import (
    Decision,
    EvidenceCleared,
    LegFailed,
    PairFinding,
    PairParted,
    PairRejoined,
)
from narwhal.core.vocabulary import EngineId, FailureClass, HoldKind, Leg, ProbeKind

if TYPE_CHECKING:
    from narwhal.core.fleet import Fleet

TRANSFER_CLASSES: Final = frozenset({FailureClass.STREAM, FailureClass.INFERENCE_STATUS})
"""How a decode leg fails when its KV cannot be loaded."""

ON_ITS_TICKETS: Final = (FailureClass.KV_HANDOFF, Leg.DECODE)
"""The leg streak of a prefill engine that counts decode legs which failed over its tickets."""


class PairIds(NamedTuple):
    """A prefill and a decode engine."""

    prefill: EngineId
    decode: EngineId


class Suspicion(NamedTuple):
    """An engine to be verified, the partner to try it with first, and the class that raised the suspicion."""

    engine: Engine
    partner: EngineId
    cause: FailureClass


@dataclass(slots=True)
class Apart:
    """Two engines that placement keeps apart; `due_at` is when they are probed again, infinite during a probe."""

    since: float
    due_at: float
    attempts: int = 0


class Pairs:
    """What is known of the pairs of a fleet beyond its engines. Instants are loop seconds."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.streaks: dict[PairIds, int] = {}
        self.apart: dict[PairIds, Apart] = {}

    def apart_from(self, prefill: EngineId) -> frozenset[EngineId]:
        """Return the decode engines that are kept apart from `prefill`."""
        return frozenset(pair.decode for pair in self.apart if pair.prefill == prefill)

    def failed(self, decode: Engine, event: LegFailed) -> Suspicion | None:
        """Count a failed decode leg against its pair and its prefill engine; return who is to be verified now."""
        if event.leg is not Leg.DECODE or event.partner is None or event.failure_class not in TRANSFER_CLASSES:
            return None
        pair = PairIds(event.partner, decode.id)
        prefill = self._fleet.engines[pair.prefill]
        on_tickets = prefill.streaks.by_leg[ON_ITS_TICKETS] = prefill.streaks.by_leg.get(ON_ITS_TICKETS, 0) + 1
        together = self.streaks[pair] = self.streaks.get(pair, 0) + 1
        if any(HoldKind.INFERENCE_VERIFICATION in engine.holds for engine in (prefill, decode)):
            return None
        limit = self._fleet.recovery.eject_after
        if on_tickets >= limit and prefill.ejection is None:
            return Suspicion(prefill, decode.id, FailureClass.KV_HANDOFF)
        if together >= limit and pair not in self.apart:
            return Suspicion(decode, prefill.id, event.failure_class)
        return None

    def served(self, pair: PairIds) -> list[Decision]:
        """Clear what was held against a pair that has just served, and against its prefill engine."""
        decisions: list[Decision] = []
        self.streaks.pop(pair, None)
        if self._fleet.engines[pair.prefill].streaks.by_leg.pop(ON_ITS_TICKETS, 0):
            decisions.append(EvidenceCleared(pair.prefill, (FailureClass.KV_HANDOFF,), "a decode over its ticket"))
        if self.apart.pop(pair, None) is not None:
            decisions.append(PairRejoined(*pair, "the pair served"))
        return decisions

    def part(self, pair: PairIds, detail: str, now: float) -> list[Decision]:
        """Keep two engines apart that work with others and not together, or for longer if they are apart already."""
        apart = self.apart.setdefault(pair, Apart(since=now, due_at=inf))
        recovery = self._fleet.recovery
        apart.attempts += 1
        apart.due_at = now + delay_s(
            apart.attempts, first_s=recovery.retry_backoff_s, max_s=recovery.retry_backoff_max_s
        )
        return [PairParted(*pair, detail, apart.due_at)]

    def probed(self, engine: Engine, findings: tuple[PairFinding, ...], now: float) -> list[Decision]:
        """Take in what an inference probe of `engine` saw of pairs, whatever it says about the engine."""
        decisions: list[Decision] = []
        for finding in findings:
            pair = PairIds(finding.prefill, finding.decode)
            if not finding.conclusive:
                continue
            if finding.failed_leg is None:
                decisions += self.served(pair)
            elif finding.failed_leg is Leg.DECODE and pair in self.apart:
                decisions += self.part(pair, finding.detail, now)
        for pair, apart in self.apart.items():
            if engine.id in pair and apart.due_at == inf:
                apart.due_at = now
        return decisions

    def due(self, *, now: float) -> list[Decision]:
        """Order a probe of each pair whose time has come, if both engines could be used."""
        decisions: list[Decision] = []
        engines = self._fleet.engines
        for pair, apart in self.apart.items():
            decode = engines[pair.decode]
            unusable = decode.ejection is not None or engines[pair.prefill].ejection is not None
            if apart.due_at > now or unusable or ProbeKind.INFERENCE in decode.probes:
                continue
            apart.due_at = inf
            decisions += self._fleet.probing.order(
                decode, ProbeKind.INFERENCE, FailureClass.KV_HANDOFF, pair.prefill, passed_on=True
            )
        return decisions

    def forget(self, engine: EngineId) -> list[Decision]:
        """Start afresh with a readmitted or restarted engine: it is no longer kept apart from anybody."""
        self.streaks = {pair: count for pair, count in self.streaks.items() if engine not in pair}
        ended = [pair for pair in self.apart if engine in pair]
        for pair in ended:
            del self.apart[pair]
        return [PairRejoined(*pair, f"{engine} starts afresh") for pair in ended]
