"""The controller's review of the whole fleet: consolidation risk, settled drains, intervals."""

from __future__ import annotations

from narwhal.core.controller import Controller
from narwhal.core.events import (
    ConsolidationRiskChanged,
    DrainCancelled,
    DrainOrdered,
    DrainSettled,
    LegReleased,
    LegStarted,
)
from narwhal.core.vocabulary import FailureClass, Leg, Role
from tests.core.fleets import D1, D2, P1, Driven, make_fleet

F = FailureClass


def controlled(**counts: int) -> tuple[Driven, Controller]:
    fleet = Driven(make_fleet(**counts))
    return fleet, Controller(fleet.fleet, interval_s=10.0)


def test_a_role_that_rests_on_one_engine_is_at_risk_from_then_on() -> None:
    fleet, controller = controlled()
    assert controller.review(now=fleet.now) == []
    fleet.apply(DrainOrdered(D1, "op", "test"))
    assert controller.review(now=fleet.now) == [ConsolidationRiskChanged(Role.DECODE, at_risk=True)]
    assert controller.review(now=fleet.now + 5) == []
    assert controller.risk_since == {Role.DECODE: fleet.now}


def test_a_role_without_any_engine_is_at_risk() -> None:
    fleet, controller = controlled()
    for engine in (D1, D2):
        fleet.apply(DrainOrdered(engine, "op", "test"))
    assert controller.review(now=fleet.now) == [ConsolidationRiskChanged(Role.DECODE, at_risk=True)]


def test_the_risk_ends_when_a_second_engine_returns() -> None:
    fleet, controller = controlled()
    fleet.apply(DrainOrdered(D1, "op", "test"))
    controller.review(now=fleet.now)
    fleet.apply(DrainCancelled(D1, "op", "test"))
    assert controller.review(now=fleet.now) == [ConsolidationRiskChanged(Role.DECODE, at_risk=False)]
    assert controller.risk_since == {}


def test_a_small_fleet_is_always_at_risk() -> None:
    _, controller = controlled(prefill=1, decode=1)
    assert {change.role for change in controller.review(now=1.0)} == set(Role)


def test_a_drain_settles_once_when_its_work_has_ended() -> None:
    fleet, controller = controlled()
    fleet.apply(LegStarted(D1, Leg.DECODE))
    fleet.apply(DrainOrdered(D1, "op", "test"))
    assert controller.settle_drains() == []
    fleet.apply(LegReleased(D1, Leg.DECODE))
    assert controller.settle_drains() == [DrainSettled(D1)]
    assert controller.settle_drains() == []


def test_a_second_drain_settles_again() -> None:
    fleet, controller = controlled()
    for _ in range(2):
        fleet.apply(DrainOrdered(D1, "op", "test"))
        assert controller.settle_drains() == [DrainSettled(D1)]
        fleet.apply(DrainCancelled(D1, "op", "test"))


def test_a_quiet_engine_that_is_not_drained_does_not_settle() -> None:
    _, controller = controlled()
    assert controller.settle_drains() == []


def test_an_interval_rolls_over_when_it_is_full() -> None:
    fleet, controller = controlled()
    assert controller.roll_over(now=0.0)
    fleet.succeed(P1)
    fleet.succeed(P1)
    fleet.fail(P1, F.TIMEOUT)
    assert not controller.roll_over(now=9.9)
    assert controller.roll_over(now=10.0)
    last = fleet[P1].last_interval
    assert (last.succeeded, last.failed) == (2, 1)
    assert (fleet[P1].interval.succeeded, fleet[P1].interval.failed) == (0, 0)
