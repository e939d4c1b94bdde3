"""What clears what, through the whole fleet: each row of the clearing table, both directions."""

from __future__ import annotations

import pytest

from narwhal.core.events import (
    EvidenceCleared,
    FleetEvent,
    HealthAnswered,
    HealthProbed,
    LegRefused,
    LegSucceeded,
)
from narwhal.core.vocabulary import FailureClass, Leg, ProbeResult
from tests.core.fleets import D1, EVIDENCE, P1, Driven, make_fleet

F = FailureClass


@pytest.mark.parametrize(
    ("event", "cleared"),
    [
        (LegRefused(D1, Leg.DECODE), {F.CONNECTION, F.INFERENCE_STATUS}),
        (HealthAnswered(D1), {F.CONNECTION, F.TIMEOUT, F.OVERLOAD, F.LIVENESS}),
        (LegSucceeded(P1, Leg.PREFILL), {F.CONNECTION, F.INFERENCE_STATUS, F.KV_HANDOFF}),
        (LegSucceeded(D1, Leg.DECODE), {F.CONNECTION, F.INFERENCE_STATUS, F.STREAM}),
    ],
    ids=["client-error", "health", "prefill", "decode"],
)
def test_a_successful_response_clears_its_row_and_leaves_the_rest(event: FleetEvent, cleared: set[F]) -> None:
    fleet = Driven(make_fleet(eject_after=3, liveness_misses=3))
    engine = event.engine
    fleet.silent(engine, times=2)
    for failure_class in EVIDENCE:
        fleet.fail(engine, failure_class, times=2)
    (decision,) = fleet.apply(event)
    assert isinstance(decision, EvidenceCleared)
    assert set(decision.classes) == cleared
    assert fleet[engine].streaks.by_class == dict.fromkeys((c for c in FailureClass if c not in cleared), 2)


def test_a_success_without_evidence_decides_nothing() -> None:
    fleet = Driven(make_fleet())
    assert fleet.succeed(D1) == []
    assert fleet.apply(HealthAnswered(D1)) == []


def test_a_success_concerns_only_its_engine() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, F.STREAM, times=2)
    fleet.succeed(P1)
    assert fleet[D1].streaks.by_class == {F.STREAM: 2}


def test_a_cleared_streak_starts_from_zero() -> None:
    fleet = Driven(make_fleet(eject_after=3))
    for _ in range(10):
        assert fleet.fail(D1, F.STREAM, times=2) == []
        fleet.succeed(D1)
    assert fleet.eligible(D1)


def test_an_unsolicited_health_verdict_counts_as_a_health_response() -> None:
    fleet = Driven(make_fleet())
    fleet.silent(D1, times=2)
    fleet.apply(HealthProbed(D1, ProbeResult.PASSED))
    assert fleet[D1].streaks.by_class == {}
