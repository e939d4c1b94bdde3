"""Liveness: its own counter, its own limit, and any successful health response resets it."""

from __future__ import annotations

import pytest

from narwhal.core.events import EngineEjected, FleetEvent, HealthAnswered, HealthProbed
from narwhal.core.vocabulary import EjectionCause, FailureClass, Leg, ProbeResult
from tests.core.fleets import D1, Driven, make_fleet

F = FailureClass


@pytest.mark.parametrize("misses", [1, 3, 7])
def test_an_engine_is_ejected_after_the_configured_silent_sweeps(misses: int) -> None:
    fleet = Driven(make_fleet(liveness_misses=misses, eject_after=2))
    assert fleet.silent(D1, times=misses - 1) == []
    assert fleet.silent(D1) == [EngineEjected(D1, EjectionCause.LIVENESS, streak=misses)]


@pytest.mark.parametrize(
    "answer", [HealthAnswered(D1), HealthProbed(D1, ProbeResult.PASSED)], ids=["any-answer", "probe"]
)
def test_any_successful_health_response_resets_the_misses(answer: FleetEvent) -> None:
    fleet = Driven(make_fleet(liveness_misses=3))
    for _ in range(5):
        assert fleet.silent(D1, times=2) == []
        fleet.apply(answer)
    assert fleet.eligible(D1)


def test_one_slow_answer_in_three_never_ejects() -> None:
    fleet = Driven(make_fleet(liveness_misses=3))
    for _ in range(100):
        fleet.silent(D1)
        fleet.apply(HealthAnswered(D1))
        fleet.apply(HealthAnswered(D1))
    assert fleet.eligible(D1)


def test_serving_does_not_reset_the_misses() -> None:
    fleet = Driven(make_fleet(liveness_misses=3))
    fleet.silent(D1, times=2)
    fleet.succeed(D1)
    assert [type(d) for d in fleet.silent(D1)] == [EngineEjected]


def test_misses_do_not_add_to_failure_streaks() -> None:
    fleet = Driven(make_fleet(liveness_misses=9, eject_after=2))
    fleet.silent(D1, times=8)
    assert fleet.fail(D1, F.CONNECTION, leg=Leg.DECODE) == []
    assert fleet.eligible(D1)


def test_an_ejected_engine_is_not_ejected_again_by_silence() -> None:
    fleet = Driven(make_fleet(liveness_misses=2))
    fleet.fail(D1, F.CONNECTION, times=3)
    assert fleet.silent(D1, times=5) == []
    ejection = fleet[D1].ejection
    assert ejection is not None
    assert ejection.cause is EjectionCause.CONNECTION
