"""The timed hold of a failed engine: when it starts, what it never does, and the ways it ends."""

from __future__ import annotations

import pytest

from narwhal.core.events import HealthAnswered, HoldLifted, HoldPlaced
from narwhal.core.placement import Pair, choose
from narwhal.core.vocabulary import FailureClass, HoldKind, Leg, ProbeKind
from tests.core.fleets import D1, D2, EVIDENCE, P1, Driven, broke, make_fleet, ordered, served

F = FailureClass
QUARANTINE = HoldKind.FAILURE_QUARANTINE


@pytest.fixture
def fleet() -> Driven:
    return Driven(make_fleet(failure_quarantine_s=60.0, eject_after=3))


@pytest.mark.parametrize("failure_class", EVIDENCE)
def test_an_engine_with_a_full_streak_is_quarantined(fleet: Driven, failure_class: FailureClass) -> None:
    decisions = fleet.fail(D1, failure_class, times=3)
    assert HoldPlaced(D1, QUARANTINE, failure_class) in decisions
    assert fleet[D1].holds[QUARANTINE].until == fleet.now + 60


@pytest.mark.parametrize("failure_class", EVIDENCE)
def test_nobody_is_quarantined_unless_it_is_configured(failure_class: FailureClass) -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, failure_class, times=3)
    assert QUARANTINE not in fleet.holds(D1)


def test_candidate_selection_ends_it_at_the_deadline(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3)
    fleet.fleet.engines[D2].resident = 5
    just_before = choose(fleet.fleet, now=fleet.now + 59.9)
    at_the_deadline = choose(fleet.fleet, now=fleet.now + 60)
    assert isinstance(just_before, Pair)
    assert isinstance(at_the_deadline, Pair)
    assert (just_before.decode.id, at_the_deadline.decode.id) == (D2, D1)


def test_a_pass_says_that_it_ended(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3)
    assert fleet.tick(59.9) == []
    assert HoldLifted(D1, QUARANTINE, "deadline passed") in fleet.tick(0.1)


def test_another_failure_extends_it(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3)
    started_at = fleet.now
    fleet.now += 20
    fleet.fail(D1, F.OVERLOAD)
    assert fleet[D1].holds[QUARANTINE].until == started_at + 80


def test_another_failure_never_shortens_it(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3)
    fleet[D1].holds[QUARANTINE].until = fleet.now + 500
    fleet.fail(D1, F.OVERLOAD)
    assert fleet[D1].holds[QUARANTINE].until == fleet.now + 500
    assert fleet[D1].blocked_until == fleet.now + 500


@pytest.mark.parametrize("ending", ["health", "inference"])
def test_a_success_ends_it_before_the_deadline(fleet: Driven, ending: str) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    assert fleet.holds(D1) == {QUARANTINE, HoldKind.INFERENCE_VERIFICATION}
    decisions = fleet.apply(HealthAnswered(D1)) if ending == "health" else fleet.probed(D1, served(P1, D1))
    assert HoldLifted(D1, QUARANTINE, "health 200" if ending == "health" else "inference probe passed") in decisions


def test_the_verification_outlives_a_health_success(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.apply(HealthAnswered(D1))
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}


def test_an_inference_success_ends_both_holds(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.probed(D1, served(P1, D1))
    assert fleet.holds(D1) == set()


def test_the_verification_outlives_the_deadline(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.tick(61)
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    assert not fleet.eligible(D1)


def test_an_engine_whose_evidence_still_stands_is_probed_before_it_gets_full_traffic(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3, partner=P1)
    decisions = fleet.tick(60)
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    assert ordered(decisions) == [(D1, ProbeKind.INFERENCE)]
    fleet.probed(D1, served(P1, D1))
    assert fleet.eligible(D1)


def test_an_engine_whose_evidence_was_cleared_returns_without_a_probe(fleet: Driven) -> None:
    fleet.fail(D1, F.INFERENCE_STATUS, times=3)
    fleet.fleet.lift(fleet[D1], HoldKind.INFERENCE_VERIFICATION, "test", fleet.now)
    fleet[D1].probes.clear()
    fleet.succeed(D1)
    assert ordered(fleet.tick(60)) == []
    assert fleet.eligible(D1)


def test_misses_below_their_own_limit_are_not_standing_evidence() -> None:
    fleet = Driven(make_fleet(failure_quarantine_s=60.0, eject_after=3, liveness_misses=10))
    fleet.fail(D1, F.OVERLOAD, times=3)
    fleet.succeed(D1)
    fleet[D1].streaks.by_class.clear()
    fleet.silent(D1, times=5)
    fleet.tick(60)
    assert fleet.eligible(D1)


def test_an_engine_that_fails_its_probe_after_the_deadline_is_ejected(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3)
    fleet.tick(60)
    fleet.probed(D1, broke(P1, D1, Leg.DECODE))
    assert fleet[D1].ejection is not None


def test_a_failure_after_the_deadline_starts_a_new_one(fleet: Driven) -> None:
    fleet.fail(D1, F.OVERLOAD, times=3)
    fleet.now += 61
    decisions = fleet.fail(D1, F.OVERLOAD)
    assert HoldPlaced(D1, QUARANTINE, F.OVERLOAD) in decisions
    hold = fleet[D1].holds[QUARANTINE]
    assert (hold.since, hold.until) == (fleet.now, fleet.now + 60)
