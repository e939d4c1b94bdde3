"""Readmission and drains: the way back into placement, and what only an operator ends."""

from __future__ import annotations

import pytest

from narwhal.core.events import (
    DrainCancelled,
    DrainOrdered,
    EjectionOrdered,
    EngineEjected,
    EngineReadmitted,
    FleetEvent,
    HealthAnswered,
    HoldLifted,
    HoldPlaced,
    LivenessSilent,
    ReadmissionBlocked,
    ReadmissionFailed,
    ReadmissionPassed,
)
from narwhal.core.vocabulary import EjectionCause, FailureClass, HoldKind, ProbeKind, ReadmissionStep
from tests.core.fleets import D1, D2, EVIDENCE, P1, P2, Driven, make_fleet, ordered, served

F = FailureClass
DRAIN = HoldKind.OPERATOR_DRAIN


@pytest.fixture
def fleet() -> Driven:
    return Driven(make_fleet(retry_backoff_s=1.0, retry_backoff_max_s=5.0))


def eject(fleet: Driven) -> None:
    fleet.fail(D1, F.CONNECTION, times=3)


def blocked(fleet: Driven, step: ReadmissionStep, reason: str = "no") -> ReadmissionBlocked:
    (decision,) = fleet.apply(ReadmissionFailed(D1, step, reason))
    assert isinstance(decision, ReadmissionBlocked)
    return decision


def test_the_checks_are_in_the_order_of_the_source() -> None:
    assert list(ReadmissionStep) == [
        "health",
        "attestation",
        "model_identity",
        "generation_identity",
        "kv_transfer",
        "final_health",
    ]


def test_an_ejected_engine_is_due_at_once_and_handed_out_once(fleet: Driven) -> None:
    eject(fleet)
    assert fleet.fleet.readmission.take_due(now=fleet.now) == [D1]
    assert fleet.fleet.readmission.take_due(now=fleet.now + 1000) == []


def test_an_engine_that_is_only_held_needs_no_readmission(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.apply(DrainOrdered(D2, "op", "test"))
    assert fleet.fleet.readmission.take_due(now=fleet.now) == []


@pytest.mark.parametrize("step", ReadmissionStep)
def test_a_failed_step_is_named_and_tried_again(fleet: Driven, step: ReadmissionStep) -> None:
    eject(fleet)
    fleet.fleet.readmission.take_due(now=fleet.now)
    decision = blocked(fleet, step, "503")
    assert (decision.step, decision.reason, decision.retry_at) == (step, "503", fleet.now + 1)
    ejection = fleet[D1].ejection
    assert ejection is not None
    assert (ejection.last_step, ejection.last_reason) == (step, "503")
    assert fleet.fleet.readmission.take_due(now=fleet.now + 0.9) == []
    assert fleet.fleet.readmission.take_due(now=fleet.now + 1) == [D1]


def test_attempts_back_off_up_to_the_cap(fleet: Driven) -> None:
    eject(fleet)
    waits = []
    for _ in range(5):
        decision = blocked(fleet, ReadmissionStep.HEALTH)
        waits.append(decision.retry_at - fleet.now)
        fleet.now = decision.retry_at
    assert waits == [1, 2, 4, 5, 5]


def test_the_history_names_each_new_reason_once(fleet: Driven) -> None:
    eject(fleet)
    for reason in ("refused", "refused", "refused", "503"):
        blocked(fleet, ReadmissionStep.HEALTH, reason)
    assert [remark.why for remark in fleet[D1].history if "readmission" in remark.what] == ["refused", "503"]


def test_a_failed_attempt_leaves_the_engine_out(fleet: Driven) -> None:
    eject(fleet)
    blocked(fleet, ReadmissionStep.FINAL_HEALTH)
    assert not fleet.eligible(D1)


def test_a_step_that_fails_without_an_ejection_changes_nothing(fleet: Driven) -> None:
    fleet.apply(DrainOrdered(D1, "op", "test"))
    assert blocked(fleet, ReadmissionStep.HEALTH).retry_at == fleet.now
    assert fleet.holds(D1) == {DRAIN}


def test_readmission_returns_the_engine_with_a_clean_record(fleet: Driven) -> None:
    for failure_class in EVIDENCE:
        fleet.fail(D1, failure_class, times=2)
    eject(fleet)
    assert fleet.apply(ReadmissionPassed(D1, "g7")) == [EngineReadmitted(D1, "g7")]
    assert fleet.eligible(D1)
    assert fleet[D1].streaks.by_class == {}
    assert fleet[D1].streaks.by_leg == {}
    assert fleet[D1].generation == "g7"


def test_an_engine_that_gives_no_identity_keeps_the_known_one(fleet: Driven) -> None:
    eject(fleet)
    fleet[D1].generation = "g7"
    assert fleet.apply(ReadmissionPassed(D1, None)) == [EngineReadmitted(D1, "g7")]


def test_an_engine_can_be_ejected_and_readmitted_again(fleet: Driven) -> None:
    for _ in range(3):
        eject(fleet)
        assert not fleet.eligible(D1)
        fleet.apply(ReadmissionPassed(D1, "g"))
        assert fleet.eligible(D1)


def test_readmission_ends_the_quarantine() -> None:
    fleet = Driven(make_fleet(failure_quarantine_s=60.0))
    eject(fleet)
    decisions = fleet.apply(ReadmissionPassed(D1, "g"))
    assert HoldLifted(D1, HoldKind.FAILURE_QUARANTINE, "readmitted") in decisions
    assert fleet.eligible(D1)


def test_the_fittest_partners_vouch_first_and_ejected_ones_last(fleet: Driven) -> None:
    fleet.fail(P1, F.CONNECTION, times=3)
    assert [e.id for e in fleet.fleet.readmission.partners(fleet[D1], now=fleet.now)] == [P2, P1]
    fleet.apply(DrainOrdered(P2, "op", "test"))
    assert [e.id for e in fleet.fleet.readmission.partners(fleet[D1], now=fleet.now)] == [P2, P1]
    assert [e.id for e in fleet.fleet.readmission.partners(fleet[P1], now=fleet.now)] == [D1, D2]


def test_a_drain_takes_the_engine_out_and_leaves_its_work(fleet: Driven) -> None:
    fleet[D1].resident = 20
    assert fleet.apply(DrainOrdered(D1, "ann", "upgrade")) == [HoldPlaced(D1, DRAIN, "upgrade")]
    assert not fleet.eligible(D1)
    assert fleet[D1].resident == 20
    assert fleet[D1].holds[DRAIN].actor == "ann"


def test_a_second_drain_changes_nothing(fleet: Driven) -> None:
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    assert fleet.apply(DrainOrdered(D1, "bob", "other")) == []
    assert (fleet[D1].holds[DRAIN].actor, fleet[D1].holds[DRAIN].reason) == ("ann", "upgrade")


def test_an_undrain_puts_the_engine_back(fleet: Driven) -> None:
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    assert fleet.apply(DrainCancelled(D1, "bob", "done")) == [HoldLifted(D1, DRAIN, "bob: done")]
    assert fleet.eligible(D1)
    assert fleet.apply(DrainCancelled(D1, "bob", "done")) == []


@pytest.mark.parametrize(
    "event",
    [HealthAnswered(D1), ReadmissionPassed(D1, "g"), LivenessSilent(D1)],
    ids=["health", "readmission-of-an-ejected-engine", "silence"],
)
def test_a_drain_survives(fleet: Driven, event: FleetEvent) -> None:
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    for _ in range(3):
        fleet.apply(event)
    assert DRAIN in fleet.holds(D1)
    assert not fleet.eligible(D1)


def test_a_drain_survives_a_passed_probe(fleet: Driven) -> None:
    fleet.fail(D1, F.STREAM, times=3)
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    fleet.probed(D1, served(P1, D1))
    assert fleet.holds(D1) == {DRAIN}


def test_a_drain_survives_an_ejection_and_the_readmission_after_it(fleet: Driven) -> None:
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    eject(fleet)
    assert fleet.apply(ReadmissionPassed(D1, "g")) == [EngineReadmitted(D1, "g")]
    assert fleet.holds(D1) == {DRAIN}
    assert not fleet.eligible(D1)


def test_the_readmission_that_an_operator_asked_for_clears_the_drain(fleet: Driven) -> None:
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    decisions = fleet.apply(ReadmissionPassed(D1, "g", clears_drain=True))
    assert decisions == [HoldLifted(D1, DRAIN, "readmitted"), EngineReadmitted(D1, "g")]
    assert fleet.eligible(D1)


def test_a_drained_engine_is_still_suspected_and_probed(fleet: Driven) -> None:
    fleet.apply(DrainOrdered(D1, "ann", "upgrade"))
    assert ordered(fleet.fail(D1, F.STREAM, times=3)) == [(D1, ProbeKind.INFERENCE)]
    assert fleet.holds(D1) == {DRAIN, HoldKind.INFERENCE_VERIFICATION}


def test_an_operator_can_eject(fleet: Driven) -> None:
    assert fleet.apply(EjectionOrdered(D1, "ann", "smells")) == [
        EngineEjected(D1, EjectionCause.OPERATOR, streak=0, detail="ann: smells")
    ]
    assert fleet.apply(EjectionOrdered(D1, "ann", "smells")) == []
    assert fleet.fleet.readmission.take_due(now=fleet.now) == [D1]
