"""A new process behind an engine's address: the old one's evidence is void, and the new one must prove itself."""

from __future__ import annotations

from narwhal.core.events import DrainOrdered, EngineEjected, EvidenceCleared, GenerationSeen, ReadmissionPassed
from narwhal.core.vocabulary import EjectionCause, FailureClass, HoldKind
from tests.core.fleets import D1, Driven, make_fleet

F = FailureClass


def seen(fleet: Driven, generation: str = "g1") -> Driven:
    fleet.apply(GenerationSeen(D1, generation))
    return fleet


def test_the_first_sight_of_a_process_is_taken_as_it_is() -> None:
    fleet = Driven(make_fleet())
    assert fleet.apply(GenerationSeen(D1, "g1")) == []
    assert fleet[D1].generation == "g1"
    assert fleet.eligible(D1)


def test_the_same_process_decides_nothing() -> None:
    fleet = seen(Driven(make_fleet()))
    fleet.fail(D1, F.STREAM, times=2)
    assert fleet.apply(GenerationSeen(D1, "g1")) == []
    assert fleet[D1].streaks.by_class == {F.STREAM: 2}


def test_another_process_is_ejected_until_it_is_readmitted() -> None:
    fleet = seen(Driven(make_fleet()))
    (decision,) = fleet.apply(GenerationSeen(D1, "g2"))
    assert isinstance(decision, EngineEjected)
    assert decision.cause is EjectionCause.GENERATION_CHANGED
    assert "g1" in decision.detail
    assert "g2" in decision.detail
    assert not fleet.eligible(D1)


def test_evidence_of_the_old_process_does_not_count_against_the_new_one() -> None:
    fleet = seen(Driven(make_fleet()))
    fleet.fail(D1, F.STREAM, times=2)
    decisions = fleet.apply(GenerationSeen(D1, "g2"))
    assert EvidenceCleared(D1, (F.STREAM,), "new process") in decisions
    fleet.apply(ReadmissionPassed(D1, "g2"))
    assert fleet.fail(D1, F.STREAM, times=2) == []


def test_an_ejected_engine_that_restarts_stays_ejected_and_loses_its_old_evidence() -> None:
    fleet = seen(Driven(make_fleet()))
    fleet.fail(D1, F.CONNECTION, times=3)
    assert fleet.apply(GenerationSeen(D1, "g2")) == [EvidenceCleared(D1, (F.CONNECTION,), "new process")]
    ejection = fleet[D1].ejection
    assert ejection is not None
    assert ejection.cause is EjectionCause.CONNECTION
    assert fleet[D1].generation == "g2"


def test_a_drain_survives_a_restart_of_the_engine() -> None:
    fleet = seen(Driven(make_fleet()))
    fleet.apply(DrainOrdered(D1, "op", "upgrade"))
    fleet.apply(GenerationSeen(D1, "g2"))
    fleet.apply(ReadmissionPassed(D1, "g2"))
    assert fleet.holds(D1) == {HoldKind.OPERATOR_DRAIN}


def test_a_verification_of_the_old_process_ends_with_it() -> None:
    fleet = seen(Driven(make_fleet()))
    fleet.fail(D1, F.STREAM, times=3)
    fleet.apply(GenerationSeen(D1, "g2"))
    assert fleet.holds(D1) == set()
    assert fleet[D1].probes == {}
