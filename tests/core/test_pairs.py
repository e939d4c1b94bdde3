"""Pairs: an engine that poisons its partners, and two engines that only fail together, among many that work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from narwhal.core.events import (
    Decision,
    EngineEjected,
    EvidenceCleared,
    GenerationSeen,
    LegFailed,
    LegSucceeded,
    PairFinding,
    PairParted,
    PairRejoined,
    ProbeOrdered,
    ReadmissionPassed,
)
from narwhal.core.pairs import TRANSFER_CLASSES, PairIds
from narwhal.core.placement import Pair, choose, choose_decode
from narwhal.core.vocabulary import EngineId, FailureClass, HoldKind, Leg, ProbeKind
from tests.core.fleets import D1, D2, EVIDENCE, P1, P2, Driven, broke, make_fleet, ordered, served

F = FailureClass


@pytest.fixture
def fleet() -> Driven:
    return Driven(make_fleet(eject_after=3, retry_backoff_s=1.0, retry_backoff_max_s=4.0))


def decode(fleet: Driven, prefill: EngineId, engine: EngineId, *, fails: bool) -> list[Decision]:
    if fails:
        return fleet.apply(LegFailed(engine, Leg.DECODE, F.INFERENCE_STATUS, prefill))
    return fleet.apply(LegSucceeded(engine, Leg.DECODE, prefill))


def traffic(fleet: Driven, *bad: tuple[EngineId, EngineId], limit: int = 60) -> Iterator[Decision]:
    """Every pair in turn, the bad ones failing, until something is decided beyond cleared evidence."""
    for prefill, engine in itertools.islice(itertools.cycle([(P1, D1), (P1, D2), (P2, D1), (P2, D2)]), limit):
        decisions = decode(fleet, prefill, engine, fails=(prefill, engine) in bad)
        if found := [d for d in decisions if not isinstance(d, EvidenceCleared)]:
            yield from found
            return


def probe(fleet: Driven, order: ProbeOrdered, *bad: tuple[EngineId, EngineId]) -> list[Decision]:
    """Carry a probe out over its planned pairs, the bad ones failing at decode."""
    findings: list[PairFinding] = []
    for prefill, engine in fleet.fleet.probing.plan(order.engine, order.partner, now=fleet.now):
        fails = (prefill.id, engine.id) in bad
        findings.append(broke(prefill.id, engine.id, Leg.DECODE) if fails else served(prefill.id, engine.id))
        if not fails and order.engine in (prefill.id, engine.id):
            break
    return fleet.probed(order.engine, *findings)


def order_in(decisions: list[Decision]) -> ProbeOrdered:
    (order,) = [decision for decision in decisions if isinstance(decision, ProbeOrdered)]
    return order


def part(fleet: Driven) -> PairParted:
    """Let p1 and d1 be found unable to work together."""
    first = order_in(list(traffic(fleet, (P1, D1))))
    second = order_in(probe(fleet, first, (P1, D1)))
    (parted,) = [d for d in probe(fleet, second, (P1, D1)) if isinstance(d, PairParted)]
    return parted


def test_a_prefill_that_poisons_its_partners_is_found_among_prefills_that_do_not(fleet: Driven) -> None:
    """No decode engine ever fails three times in a row, for each also works with p2."""
    held, order = traffic(fleet, (P1, D1), (P1, D2))
    assert fleet.holds(P1) == {HoldKind.INFERENCE_VERIFICATION}
    assert (held.__class__.__name__, order_in([order]).cause) == ("HoldPlaced", F.KV_HANDOFF)
    decisions = probe(fleet, order_in([order]), (P1, D1), (P1, D2))
    assert [d.engine for d in decisions if isinstance(d, EngineEjected)] == [P1]
    assert fleet.eligible(D1)
    assert fleet.eligible(D2)


def test_a_poisoning_prefill_costs_the_limit(fleet: Driven) -> None:
    failed = 0
    for engine in itertools.cycle([D1, D2]):
        if not fleet.eligible(P1):
            break
        decode(fleet, P1, engine, fails=True)
        decode(fleet, P2, engine, fails=False)
        failed += 1
    assert failed == 3


def test_a_poisoning_prefill_is_held_where_a_sole_decode_engine_cannot_convict_it() -> None:
    fleet = Driven(make_fleet(decode=1))
    while fleet.eligible(P1):
        decode(fleet, P1, D1, fails=True)
        decode(fleet, P2, D1, fails=False)
    assert fleet.eligible(D1)
    fleet.probed(P1, broke(P1, D1, Leg.DECODE))
    assert fleet.holds(P1) == {HoldKind.INFERENCE_VERIFICATION}


@pytest.mark.parametrize("failure_class", [c for c in EVIDENCE if c not in TRANSFER_CLASSES])
def test_only_what_a_bad_transfer_can_cause_is_held_against_a_prefill(fleet: Driven, failure_class: F) -> None:
    for _ in range(2):
        fleet.apply(LegFailed(D1, Leg.DECODE, failure_class, P1))
        fleet.apply(LegFailed(D2, Leg.DECODE, failure_class, P1))
    assert fleet[P1].streaks.by_leg == {}
    assert fleet.eligible(P1)


def test_a_failed_prefill_leg_is_not_held_against_its_decode_engine(fleet: Driven) -> None:
    fleet.apply(LegFailed(P1, Leg.PREFILL, F.INFERENCE_STATUS, D1))
    assert fleet.fleet.pairs.streaks == {}
    assert fleet[D1].streaks.by_leg == {}


def test_a_decode_over_its_ticket_clears_what_was_held_against_a_prefill(fleet: Driven) -> None:
    for _ in range(10):
        decode(fleet, P1, D1, fails=True)
        decode(fleet, P1, D2, fails=True)
        cleared = decode(fleet, P1, D2, fails=False)
        assert EvidenceCleared(P1, (F.KV_HANDOFF,), "a decode over its ticket") in cleared
        decode(fleet, P2, D1, fails=False)
        fleet.fleet.pairs.streaks.clear()
    assert fleet.eligible(P1)


def test_a_decode_engine_that_fails_with_everybody_is_charged_alone(fleet: Driven) -> None:
    for prefill in (P1, P2, P1):
        decode(fleet, prefill, D1, fails=True)
        decode(fleet, prefill, D2, fails=False)
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    assert fleet.eligible(P1)
    assert fleet.eligible(P2)


def test_two_engines_that_only_fail_together_are_verified_in_turn_and_then_kept_apart(fleet: Driven) -> None:
    parted = part(fleet)
    assert (parted.prefill, parted.decode, parted.next_at) == (P1, D1, fleet.now + 1)
    assert all(fleet.eligible(engine) for engine in (P1, P2, D1, D2))


def test_a_bad_pair_costs_the_limit(fleet: Driven) -> None:
    first = list(traffic(fleet, (P1, D1)))
    assert order_in(first).engine == D1
    assert fleet.fleet.pairs.streaks == {(P1, D1): 3}


def test_placement_avoids_a_pair_that_is_apart_and_uses_it_for_want_of_another(fleet: Driven) -> None:
    part(fleet)
    fleet[D2].resident = 50
    chosen = choose_decode(fleet.fleet, fleet[P1], now=fleet.now)
    assert chosen is not None
    assert chosen.id == D2
    assert choose_decode(fleet.fleet, fleet[P2], now=fleet.now) is fleet[D1]
    fleet[P2].resident = 50
    pair = choose(fleet.fleet, now=fleet.now)
    assert isinstance(pair, Pair)
    assert (pair.prefill.id, pair.decode.id) == (P1, D2)
    fleet.fail(D2, F.CONNECTION, times=3)
    assert choose_decode(fleet.fleet, fleet[P1], now=fleet.now) is fleet[D1]


def test_a_pair_that_is_apart_is_probed_with_capped_back_off_and_nobody_is_held_for_it(fleet: Driven) -> None:
    part(fleet)
    waits = []
    for _ in range(4):
        apart = fleet.fleet.pairs.apart[PairIds(P1, D1)]
        waits.append(apart.due_at - fleet.now)
        assert fleet.tick(apart.due_at - fleet.now - 0.001) == []
        order = order_in(fleet.tick(0.001))
        assert (order.engine, order.partner) == (D1, P1)
        assert fleet.tick(60) == []
        decisions = probe(fleet, order, (P1, D1))
        assert [d.decode for d in decisions if isinstance(d, PairParted)] == [D1]
        assert fleet.eligible(D1)
        assert fleet.eligible(P1)
    assert waits == [1, 2, 4, 4]


def test_a_pair_that_serves_its_probe_is_used_again(fleet: Driven) -> None:
    part(fleet)
    decisions = probe(fleet, order_in(fleet.tick(1)))
    assert PairRejoined(P1, D1, "the pair served") in decisions
    assert fleet.fleet.pairs.apart == {}
    fleet[D2].resident = 50
    assert choose_decode(fleet.fleet, fleet[P1], now=fleet.now) is fleet[D1]


def test_a_client_that_was_served_by_a_pair_rejoins_it(fleet: Driven) -> None:
    part(fleet)
    assert decode(fleet, P1, D1, fails=False) == [PairRejoined(P1, D1, "the pair served")]


def test_an_engine_that_is_out_is_not_probed_for_a_pair(fleet: Driven) -> None:
    part(fleet)
    fleet.fail(P1, F.CONNECTION, times=3)
    assert fleet.tick(10) == []


@pytest.mark.parametrize("engine", [P1, D1])
def test_a_readmitted_or_restarted_engine_is_no_longer_kept_apart(fleet: Driven, engine: EngineId) -> None:
    part(fleet)
    fleet.fail(engine, F.CONNECTION, times=3)
    decisions = fleet.apply(ReadmissionPassed(engine, "g2"))
    assert PairRejoined(P1, D1, f"{engine} starts afresh") in decisions
    part(fleet)
    decisions = fleet.apply(GenerationSeen(engine, "g3"))
    assert PairRejoined(P1, D1, f"{engine} starts afresh") in decisions


def test_a_probe_that_an_ejection_cut_short_leaves_no_pair_waiting_for_ever(fleet: Driven) -> None:
    part(fleet)
    order = order_in(fleet.tick(1))
    fleet.fail(D1, F.CONNECTION, times=3)
    fleet.apply(ReadmissionPassed(D1, "g1"))
    assert fleet.fleet.pairs.apart == {}
    probe(fleet, order, (P1, D1))
    assert fleet.eligible(D1)


def test_a_probe_for_another_reason_that_did_not_try_the_pair_leaves_it_due(fleet: Driven) -> None:
    part(fleet)
    order_in(fleet.tick(1))
    fleet.probed(D1, served(P2, D1))
    assert ordered(fleet.tick()) == [(D1, ProbeKind.INFERENCE)]


def test_a_prefill_that_fails_its_own_leg_is_not_a_matter_of_the_pair(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3, partner=P1)
    fleet.probed(D1, broke(P1, D1, Leg.DECODE), served(P2, D1))
    decisions = fleet.probed(P1, broke(P1, D1, Leg.PREFILL), served(P1, D2))
    assert not [d for d in decisions if isinstance(d, PairParted)]
