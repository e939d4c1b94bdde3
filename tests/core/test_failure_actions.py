"""What a full streak does to an engine: per class, at and below `recovery.eject_after`."""

from __future__ import annotations

import pytest

from narwhal.core.events import (
    EngineEjected,
    EvidenceCleared,
    HealthAnswered,
    HealthProbed,
    HoldPlaced,
    LegRefused,
    ProbeOrdered,
    ReadmissionPassed,
)
from narwhal.core.vocabulary import EjectionCause, FailureClass, HoldKind, Leg, ProbeKind, ProbeResult
from tests.core.fleets import D1, D2, EVIDENCE, P1, Driven, broke, make_fleet, ordered, served, unclear

F = FailureClass
EJECTS = [F.CONNECTION]
PROBES_HEALTH = [F.TIMEOUT, F.OVERLOAD]
VERIFIES = [F.STREAM, F.INFERENCE_STATUS, F.KV_HANDOFF]


@pytest.fixture
def fleet() -> Driven:
    return Driven(make_fleet(eject_after=3))


@pytest.mark.parametrize("failure_class", EVIDENCE)
def test_nothing_happens_below_the_limit(fleet: Driven, failure_class: FailureClass) -> None:
    assert fleet.fail(D1, failure_class, times=2) == []
    assert fleet.eligible(D1)


@pytest.mark.parametrize("failure_class", EJECTS)
def test_a_full_streak_of_connection_errors_ejects(fleet: Driven, failure_class: FailureClass) -> None:
    decisions = fleet.fail(D1, failure_class, times=3)
    assert decisions == [EngineEjected(D1, EjectionCause.CONNECTION, streak=3)]
    assert not fleet.eligible(D1)


@pytest.mark.parametrize("failure_class", PROBES_HEALTH)
def test_a_full_streak_of_slowness_runs_a_health_probe_and_pauses_nothing(
    fleet: Driven, failure_class: FailureClass
) -> None:
    decisions = fleet.fail(D1, failure_class, times=3, partner=P1)
    assert ordered(decisions) == [(D1, ProbeKind.HEALTH)]
    assert fleet.eligible(D1)


@pytest.mark.parametrize("failure_class", VERIFIES)
def test_a_full_streak_of_bad_inference_holds_first_and_then_probes(fleet: Driven, failure_class: FailureClass) -> None:
    held, probe = fleet.fail(D1, failure_class, times=3, partner=P1)
    assert held == HoldPlaced(D1, HoldKind.INFERENCE_VERIFICATION, failure_class)
    assert isinstance(probe, ProbeOrdered)
    assert (probe.engine, probe.kind, probe.partner, probe.cause) == (D1, ProbeKind.INFERENCE, P1, failure_class)
    assert not fleet.eligible(D1)


@pytest.mark.parametrize("eject_after", [1, 2, 5])
@pytest.mark.parametrize("failure_class", EVIDENCE)
def test_the_limit_is_the_configured_one(failure_class: FailureClass, eject_after: int) -> None:
    fleet = Driven(make_fleet(eject_after=eject_after))
    assert fleet.fail(D1, failure_class, times=eject_after - 1) == []
    assert fleet.fail(D1, failure_class) != []


def test_every_class_of_evidence_is_tested() -> None:
    assert sorted(EJECTS + PROBES_HEALTH + VERIFIES) == sorted(EVIDENCE)


def test_streaks_of_two_classes_do_not_add_up(fleet: Driven) -> None:
    for failure_class in EVIDENCE:
        assert fleet.fail(D1, failure_class, times=2) == []


def test_streaks_of_two_engines_do_not_add_up(fleet: Driven) -> None:
    assert fleet.fail(D1, F.STREAM, times=2) == []
    assert fleet.fail(D2, F.STREAM, times=2) == []


def test_refused_requests_never_suspect_an_engine(fleet: Driven) -> None:
    assert [fleet.apply(LegRefused(D1, Leg.DECODE)) for _ in range(1000)] == [[]] * 1000
    assert fleet.eligible(D1)


def test_a_decode_that_always_fails_is_found_while_its_prefill_keeps_succeeding(fleet: Driven) -> None:
    """An engine that serves both legs: success on one must not wipe the record of the other."""
    d1 = fleet[D1]
    for _ in range(2):
        fleet.fail(D1, F.INFERENCE_STATUS)
        fleet.apply(LegRefused(D1, Leg.PREFILL))
        assert d1.streaks.by_class == {}
    decisions = fleet.fail(D1, F.INFERENCE_STATUS)
    assert ordered(decisions) == [(D1, ProbeKind.INFERENCE)]


@pytest.mark.parametrize("failure_class", [*PROBES_HEALTH, *VERIFIES])
def test_the_same_verdict_is_not_acted_on_twice_while_its_probe_is_open(
    fleet: Driven, failure_class: FailureClass
) -> None:
    fleet.fail(D1, failure_class, times=3)
    assert fleet.fail(D1, failure_class, times=5) == []


def test_two_classes_that_need_the_same_probe_share_it(fleet: Driven) -> None:
    assert ordered(fleet.fail(D1, F.STREAM, times=3)) == [(D1, ProbeKind.INFERENCE)]
    assert fleet.fail(D1, F.INFERENCE_STATUS, times=3) == []
    assert ordered(fleet.fail(D1, F.TIMEOUT, times=3)) == [(D1, ProbeKind.HEALTH)]


def test_an_ejected_engine_is_not_acted_on_again(fleet: Driven) -> None:
    fleet.fail(D1, F.CONNECTION, times=3)
    for failure_class in EVIDENCE:
        assert fleet.fail(D1, failure_class, times=4) == []


def test_an_ejection_ends_the_verification_hold(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.fail(D1, F.CONNECTION, times=3)
    assert fleet.holds(D1) == set()
    assert fleet[D1].probes == {}
    assert not fleet.eligible(D1)


def test_a_failed_health_probe_ejects(fleet: Driven) -> None:
    fleet.fail(D1, F.TIMEOUT, times=3)
    decisions = fleet.apply(HealthProbed(D1, ProbeResult.FAILED, "503"))
    assert EngineEjected(D1, EjectionCause.HEALTH_PROBE, streak=0, detail="503") in decisions
    assert not fleet.eligible(D1)


def test_a_passed_health_probe_lets_the_engine_go_on(fleet: Driven) -> None:
    fleet.fail(D1, F.TIMEOUT, times=3)
    decisions = fleet.apply(HealthProbed(D1, ProbeResult.PASSED))
    assert EvidenceCleared(D1, (F.TIMEOUT,), "health probe passed") in decisions
    assert fleet.fail(D1, F.TIMEOUT, times=2) == []
    fleet.succeed(D1)
    fleet.apply(HealthAnswered(D1))
    assert ordered(fleet.fail(D1, F.TIMEOUT, times=3)) == [(D1, ProbeKind.HEALTH)]
    assert fleet.eligible(D1)


def test_a_leg_that_times_out_again_after_a_health_probe_has_excused_it_is_verified(fleet: Driven) -> None:
    """Hung behind a /health that says 200, it would be asked for its health and excused for ever."""
    for _ in range(2):
        fleet.fail(P1, F.TIMEOUT, times=3, partner=D1)
        fleet.apply(HealthProbed(P1, ProbeResult.PASSED))
        fleet.apply(HealthAnswered(P1))
    assert fleet.holds(P1) == {HoldKind.INFERENCE_VERIFICATION}
    fleet.probed(P1, broke(P1, D1, Leg.PREFILL), broke(P1, D2, Leg.PREFILL))
    assert fleet[P1].ejection is not None
    fleet.apply(ReadmissionPassed(P1, "g1"))
    assert ordered(fleet.fail(P1, F.TIMEOUT, times=3)) == [(P1, ProbeKind.HEALTH)]


def test_the_verification_of_an_excused_leg_comes_beside_the_health_probe(fleet: Driven) -> None:
    fleet.fail(P1, F.TIMEOUT, times=3)
    fleet.apply(HealthProbed(P1, ProbeResult.PASSED))
    decisions = fleet.fail(P1, F.TIMEOUT, times=3, partner=D1)
    assert ordered(decisions) == [(P1, ProbeKind.HEALTH), (P1, ProbeKind.INFERENCE)]
    assert HoldPlaced(P1, HoldKind.INFERENCE_VERIFICATION, F.TIMEOUT) in decisions


def test_time_outs_of_the_other_leg_and_overload_are_excused_every_time(fleet: Driven) -> None:
    fleet.fail(D1, F.TIMEOUT, times=3, leg=Leg.DECODE)
    fleet.apply(HealthProbed(D1, ProbeResult.PASSED))
    assert ordered(fleet.fail(D1, F.TIMEOUT, times=3, leg=Leg.PREFILL)) == [(D1, ProbeKind.HEALTH)]
    for _ in range(3):
        assert ordered(fleet.fail(D2, F.OVERLOAD, times=3)) == [(D2, ProbeKind.HEALTH)]
        fleet.apply(HealthProbed(D2, ProbeResult.PASSED))


def test_a_passed_inference_probe_confirms_the_excuse(fleet: Driven) -> None:
    for _ in range(2):
        fleet.fail(P1, F.TIMEOUT, times=3)
        fleet.apply(HealthProbed(P1, ProbeResult.PASSED))
    fleet.probed(P1, served(P1, D1))
    assert fleet.eligible(P1)
    assert ordered(fleet.fail(P1, F.TIMEOUT, times=3)) == [(P1, ProbeKind.HEALTH)]


def test_a_passed_health_probe_clears_both_streaks_of_everything_that_health_clears(fleet: Driven) -> None:
    """Otherwise a class that filled up while another class's probe ran would order a new probe at its next failure."""
    fleet.fail(D1, F.TIMEOUT, times=3)
    fleet.fail(D1, F.OVERLOAD, times=3)
    fleet.apply(HealthProbed(D1, ProbeResult.PASSED))
    assert fleet.fail(D1, F.OVERLOAD, times=2) == []
    assert fleet.fail(D1, F.TIMEOUT, times=2) == []


def test_a_passed_health_probe_does_not_end_a_verification(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.fail(D1, F.TIMEOUT, times=3)
    fleet.apply(HealthProbed(D1, ProbeResult.PASSED))
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    assert fleet[D1].streaks.by_class == {F.STREAM: 3}


def test_a_passed_inference_probe_clears_the_recorded_inference_failures_and_the_hold(fleet: Driven) -> None:
    for failure_class in VERIFIES:
        fleet.fail(D1, failure_class, times=3)
    fleet.fail(D1, F.OVERLOAD, times=2)
    fleet.probed(D1, served(P1, D1))
    assert fleet.holds(D1) == set()
    assert fleet[D1].streaks.by_class == {F.OVERLOAD: 2}
    assert all(fleet[D1].streaks.longest(failure_class) == 0 for failure_class in VERIFIES)
    assert fleet.eligible(D1)


@pytest.mark.parametrize("suspect", [P1, D1])
def test_a_failed_leg_of_the_suspect_ejects_it(fleet: Driven, suspect: str) -> None:
    engine = fleet[suspect].id
    fleet.fail(engine, F.INFERENCE_STATUS, times=3)
    decisions = fleet.probed(engine, broke(P1, D1, Leg(fleet[suspect].role.value)))
    assert [d.cause for d in decisions if isinstance(d, EngineEjected)] == [EjectionCause.INFERENCE_PROBE]
    assert not fleet.eligible(suspect)


def test_an_inconclusive_leg_leaves_the_hold_and_schedules_another_probe(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3, partner=P1)
    fleet.probed(D1, unclear(P1, D1))
    assert fleet.holds(D1) == {HoldKind.INFERENCE_VERIFICATION}
    assert fleet.eligible(D2)
    assert fleet.fleet.probing.due(now=fleet.now) == []
    again = fleet.fleet.probing.next_at(fleet[D1], ProbeKind.INFERENCE)
    assert again == fleet.now + fleet.fleet.recovery.retry_backoff_s
    assert ordered(fleet.fleet.probing.due(now=again)) == [(D1, ProbeKind.INFERENCE)]
