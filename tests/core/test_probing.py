"""Probes: which pairs are tried, when the next one is due, and whose answer counts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from narwhal.core.events import (
    DrainOrdered,
    EngineEjected,
    HealthProbed,
    InferenceProbed,
    ProbeJudged,
    ProbeOrdered,
    ReadmissionPassed,
)
from narwhal.core.vocabulary import EngineId, FailureClass, HoldKind, Leg, ProbeKind, ProbeResult
from tests.core.fleets import D1, D2, P1, P2, Driven, broke, make_fleet, ordered, served, unclear

F = FailureClass


def plan(fleet: Driven, suspect: EngineId, partner: EngineId | None = None) -> list[tuple[str, str]]:
    pairs = fleet.fleet.probing.plan(suspect, partner, now=fleet.now)
    return [(prefill.id, decode.id) for prefill, decode in pairs]


def only_order(decisions: Iterable[object]) -> ProbeOrdered:
    (order,) = [decision for decision in decisions if isinstance(decision, ProbeOrdered)]
    return order


@pytest.mark.parametrize(
    ("suspect", "partner", "pairs"),
    [
        (D1, P2, [("p2", "d1"), ("p1", "d1")]),
        (D1, P1, [("p1", "d1"), ("p2", "d1")]),
        (D1, None, [("p1", "d1"), ("p2", "d1")]),
        (P2, D2, [("p2", "d2"), ("p2", "d1")]),
        (D1, D2, [("p1", "d1"), ("p2", "d1")]),
    ],
)
def test_the_recorded_pair_is_tried_first_and_then_another_partner(
    suspect: EngineId, partner: EngineId | None, pairs: list[tuple[str, str]]
) -> None:
    assert plan(Driven(make_fleet()), suspect, partner) == pairs


def test_two_pairs_are_enough() -> None:
    assert len(plan(Driven(make_fleet(prefill=5)), D1)) == 2


def test_a_decode_suspect_with_a_sole_prefill_is_cross_checked_with_another_decode_engine() -> None:
    assert plan(Driven(make_fleet(prefill=1, decode=3)), D1) == [("p1", "d1"), ("p1", "d2")]


def test_a_prefill_suspect_with_a_sole_decode_engine_has_one_pair() -> None:
    assert plan(Driven(make_fleet(decode=1)), P1) == [("p1", "d1")]


def test_a_sole_pair_is_tried_alone() -> None:
    assert plan(Driven(make_fleet(prefill=1, decode=1)), D1) == [("p1", "d1")]


def test_eligible_partners_come_before_held_ones_and_the_least_loaded_first() -> None:
    fleet = Driven(make_fleet(prefill=3))
    fleet.apply(DrainOrdered(P1, "op", "test"))
    fleet[P2].resident = 7
    assert plan(fleet, D1) == [("p3", "d1"), ("p2", "d1")]


def test_an_ejected_partner_is_tried_only_as_the_recorded_one_or_for_want_of_another() -> None:
    fleet = Driven(make_fleet(decode=1))
    fleet.fail(P1, F.CONNECTION, times=3)
    assert plan(fleet, D1) == [("p2", "d1")]
    assert plan(fleet, D1, P1) == [("p1", "d1"), ("p2", "d1")]
    fleet.fail(P2, F.CONNECTION, times=3)
    assert plan(fleet, D1) == [("p1", "d1")]


def test_an_engine_that_only_poisons_its_partners_is_found() -> None:
    """Its pairs fail at decode, the decode engine is charged, and the probe turns the suspicion around."""
    fleet = Driven(make_fleet())
    order = only_order(fleet.fail(D1, F.STREAM, times=3, partner=P1))
    assert plan(fleet, order.engine, order.partner)[0] == (P1, D1)
    decisions = fleet.probed(D1, broke(P1, D1, Leg.DECODE), served(P2, D1))
    assert fleet.eligible(D1)
    assert fleet.holds(P1) == {HoldKind.INFERENCE_VERIFICATION}
    assert (only_order(decisions).engine, only_order(decisions).partner) == (P1, D1)
    decisions = fleet.probed(P1, broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE))
    assert [d.engine for d in decisions if isinstance(d, EngineEjected)] == [P1]
    assert fleet.eligible(D1)
    assert fleet.eligible(D2)


def test_a_sole_prefill_that_poisons_its_partners_is_found() -> None:
    fleet = Driven(make_fleet(prefill=1))
    fleet.fail(D1, F.STREAM, times=3, partner=P1)
    decisions = fleet.probed(D1, broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE))
    assert ordered(decisions) == [(P1, ProbeKind.INFERENCE)]
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    fleet.probed(P1, broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE))
    assert fleet[P1].ejection is not None
    assert fleet[D1].ejection is None


def test_prefills_that_killed_decode_engines_poisoned_are_out_until_they_restart_and_nobody_is_blamed_for_ever() -> (
    None
):
    """Every prefill poisons after a decode engine died: the decode engines go too, and all return with new prefills."""
    fleet = Driven(make_fleet(prefill=1))
    fleet.fail(D2, F.CONNECTION, times=3)
    fleet.fail(D1, F.STREAM, times=3, partner=P1)
    fleet.probed(D1, broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE))
    fleet.probed(P1, broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE))
    assert set(fleet.fleet.readmission.take_due(now=fleet.now)) == {P1, D2}
    assert [e.id for e in fleet.fleet.readmission.partners(fleet[P1], now=fleet.now)] == [D1, D2]
    fleet.apply(ReadmissionPassed(P1, "g2"))
    fleet.now += 60
    assert ordered(fleet.fleet.probing.due(now=fleet.now)) == [(D1, ProbeKind.INFERENCE)]
    fleet.probed(D1, served(P1, D1))
    assert fleet.eligible(P1)
    assert fleet.eligible(D1)


def test_a_suspicion_is_passed_on_once() -> None:
    fleet = Driven(make_fleet(decode=1))
    fleet.fail(D1, F.STREAM, times=3, partner=P1)
    fleet.probed(D1, broke(P1, D1, Leg.DECODE), served(P2, D1))
    decisions = fleet.probed(P1, broke(P1, D1, Leg.DECODE), served(P1, D1))
    assert ordered(decisions) == []
    assert fleet.eligible(P1)
    assert fleet.eligible(D1)


def test_a_decode_engine_is_not_suspected_for_a_prefill_that_failed() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(P1, F.INFERENCE_STATUS, times=3)
    fleet.probed(P1, broke(P1, D1, Leg.PREFILL), served(P1, D2))
    assert fleet.eligible(P1)
    assert fleet.eligible(D1)


def test_an_ejected_partner_is_not_suspected_again() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, F.STREAM, times=3, partner=P1)
    fleet.fail(P1, F.CONNECTION, times=3)
    assert ordered(fleet.probed(D1, broke(P1, D1, Leg.PREFILL), served(P2, D1))) == []


def test_inconclusive_probes_back_off_up_to_the_cap() -> None:
    fleet = Driven(make_fleet(retry_backoff_s=1.0, retry_backoff_max_s=5.0))
    fleet.fail(D1, F.STREAM, times=3)
    waits = []
    for _ in range(5):
        fleet.probed(D1, unclear(P1, D1))
        next_at = fleet.fleet.probing.next_at(fleet[D1], ProbeKind.INFERENCE)
        assert next_at is not None
        waits.append(next_at - fleet.now)
        fleet.now = next_at
        assert len(fleet.fleet.probing.due(now=fleet.now)) == 1
    assert waits == [1, 2, 4, 5, 5]


def test_a_probe_that_is_due_is_ordered_once_and_keeps_its_partner() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, F.STREAM, times=3, partner=P2)
    fleet.probed(D1, unclear(P2, D1))
    fleet.now += 60
    (order,) = fleet.fleet.probing.due(now=fleet.now)
    assert (order.engine, order.partner, order.cause) == (D1, P2, F.STREAM)
    assert fleet.fleet.probing.due(now=fleet.now) == []
    assert fleet.fleet.probing.next_at(fleet[D1], ProbeKind.INFERENCE) is None


def test_an_inconclusive_health_probe_is_tried_again_and_holds_nothing() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, F.TIMEOUT, times=3)
    fleet.apply(HealthProbed(D1, ProbeResult.INCONCLUSIVE, "pool full"))
    assert fleet.eligible(D1)
    assert ordered(fleet.fleet.probing.due(now=fleet.now + 1)) == [(D1, ProbeKind.HEALTH)]


def test_a_verdict_says_when_the_next_probe_is_due() -> None:
    fleet = Driven(make_fleet(retry_backoff_s=2.0))
    fleet.fail(D1, F.STREAM, times=3)
    (judged,) = fleet.probed(D1, unclear(P1, D1))
    assert isinstance(judged, ProbeJudged)
    assert (judged.result, judged.next_at) == (ProbeResult.INCONCLUSIVE, fleet.now + 2)
    fleet.fleet.probing.due(now=fleet.now + 2)
    judged, *_ = fleet.probed(D1, served(P1, D1))
    assert isinstance(judged, ProbeJudged)
    assert judged.next_at is None


def test_a_verdict_that_comes_after_the_readmission_changes_nothing() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, F.STREAM, times=3)
    fleet.fail(D1, F.CONNECTION, times=3)
    fleet.apply(ReadmissionPassed(D1, "g1"))
    fleet.probed(D1, broke(P1, D1, Leg.DECODE))
    fleet.apply(HealthProbed(D1, ProbeResult.FAILED))
    assert fleet.eligible(D1)


def test_a_late_verdict_does_not_answer_a_newer_probe() -> None:
    fleet = Driven(make_fleet())
    first = only_order(fleet.fail(D1, F.STREAM, times=3))
    fleet.fail(D1, F.CONNECTION, times=3)
    fleet.apply(ReadmissionPassed(D1, "g1"))
    second = only_order(fleet.fail(D1, F.STREAM, times=3))
    late = fleet.apply(InferenceProbed(D1, (broke(P1, D1, Leg.DECODE),), number=first.number))
    assert [d.result for d in late if isinstance(d, ProbeJudged)] == [ProbeResult.INCONCLUSIVE]
    assert fleet[D1].ejection is None
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    fleet.apply(InferenceProbed(D1, (served(P1, D1),), number=second.number))
    assert fleet.eligible(D1)


def test_every_order_has_a_number_of_its_own() -> None:
    fleet = Driven(make_fleet())
    numbers = [only_order(fleet.fail(engine, F.STREAM, times=3)).number for engine in (D1, P1)]
    fleet.probed(D1, unclear(P1, D1))
    numbers += [order.number for order in fleet.fleet.probing.due(now=fleet.now + 60)]
    assert len(set(numbers)) == 3
