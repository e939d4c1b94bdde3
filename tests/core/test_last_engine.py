"""Last-engine protection, per role and kind of hold: what yields rather than leave a role without an engine."""

from __future__ import annotations

import pytest

from narwhal.core.events import (
    Decision,
    DrainCancelled,
    DrainOrdered,
    EngineEjected,
    HoldLifted,
    HoldPlaced,
    InferenceProbed,
    ReadmissionPassed,
)
from narwhal.core.fleet import Fleet
from narwhal.core.holds import RULES, Hold
from narwhal.core.placement import Exhausted, choose
from narwhal.core.vocabulary import EngineId, FailureClass, HoldKind, Role
from tests.core.fleets import D1, D2, P1, P2, Driven, make_fleet, served

F = FailureClass
QUARANTINE = HoldKind.FAILURE_QUARANTINE
VERIFICATION = HoldKind.INFERENCE_VERIFICATION
DRIFT = HoldKind.PERFORMANCE_DRIFT
DRAIN = HoldKind.OPERATOR_DRAIN

YIELDS = {DRAIN: False, VERIFICATION: False, QUARANTINE: True, DRIFT: True}
ROLES = [(Role.PREFILL, P1, P2), (Role.DECODE, D1, D2)]


def place(fleet: Driven, engine: EngineId, kind: HoldKind, *, after_s: float = 1.0) -> list[Decision]:
    """Put a hold on an engine, a little later than the last one."""
    fleet.now += after_s
    hold = Hold(kind, since=fleet.now, until=fleet.now + 60 if kind is QUARANTINE else float("inf"), reason="test")
    return fleet.fleet.place(fleet[engine], hold, fleet.now)


def eligible_in(fleet: Fleet, role: Role, now: float) -> list[EngineId]:
    return [engine.id for engine in fleet.by_role[role] if engine.eligible(now)]


@pytest.mark.parametrize(("role", "one", "other"), ROLES)
@pytest.mark.parametrize("kind", HoldKind)
def test_only_yielding_holds_preserve_the_last_engine_of_a_role(
    kind: HoldKind, role: Role, one: EngineId, other: EngineId
) -> None:
    fleet = Driven(make_fleet())
    fleet.apply(DrainOrdered(other, "op", "test"))
    place(fleet, one, kind)
    assert eligible_in(fleet.fleet, role, fleet.now) == ([one] if YIELDS[kind] else [])
    assert RULES[kind].yields_to_last_engine is YIELDS[kind]


@pytest.mark.parametrize(("role", "one", "other"), ROLES)
@pytest.mark.parametrize("kind", HoldKind)
def test_every_hold_stands_while_another_engine_serves_the_role(
    kind: HoldKind, role: Role, one: EngineId, other: EngineId
) -> None:
    fleet = Driven(make_fleet())
    place(fleet, one, kind)
    assert eligible_in(fleet.fleet, role, fleet.now) == [other]


@pytest.mark.parametrize("kind", [kind for kind, yields in YIELDS.items() if yields])
def test_the_lifting_is_said_and_names_the_role(kind: HoldKind) -> None:
    fleet = Driven(make_fleet(decode=1))
    assert place(fleet, D1, kind) == [HoldPlaced(D1, kind, "test"), HoldLifted(D1, kind, "last decode engine")]


def test_the_other_role_does_not_count() -> None:
    fleet = Driven(make_fleet(prefill=2, decode=1))
    place(fleet, D1, DRIFT)
    assert fleet.eligible(D1)
    place(fleet, P1, DRIFT)
    assert not fleet.eligible(P1)


def test_the_engine_that_was_held_longest_returns() -> None:
    fleet = Driven(make_fleet(decode=3))
    d3 = EngineId("d3")
    place(fleet, d3, DRIFT)
    place(fleet, D1, QUARANTINE)
    assert HoldLifted(d3, DRIFT, "last decode engine") in place(fleet, D2, DRIFT)
    assert eligible_in(fleet.fleet, Role.DECODE, fleet.now) == [d3]


def test_an_engine_with_a_hold_that_does_not_yield_stays_held() -> None:
    fleet = Driven(make_fleet())
    place(fleet, D1, DRIFT)
    place(fleet, D1, DRAIN)
    assert place(fleet, D2, DRAIN) == [HoldPlaced(D2, DRAIN, "test")]
    assert fleet.holds(D1) == {DRIFT, DRAIN}


def test_every_yielding_hold_of_the_last_engine_is_lifted() -> None:
    fleet = Driven(make_fleet())
    place(fleet, D1, DRIFT)
    place(fleet, D1, QUARANTINE)
    place(fleet, D2, VERIFICATION)
    assert fleet.holds(D1) == set()
    assert fleet.eligible(D1)


@pytest.mark.parametrize("kind", [QUARANTINE, DRIFT])
def test_an_ejection_brings_a_held_engine_back(kind: HoldKind) -> None:
    fleet = Driven(make_fleet())
    place(fleet, D1, kind)
    decisions = fleet.fail(D2, F.CONNECTION, times=3)
    assert [type(decision) for decision in decisions] == [EngineEjected, HoldLifted]
    assert eligible_in(fleet.fleet, Role.DECODE, fleet.now) == [D1]


def test_a_confirmed_failure_removes_the_last_engine() -> None:
    fleet = Driven(make_fleet(decode=1))
    fleet.fail(D1, F.CONNECTION, times=3)
    assert choose(fleet.fleet, now=fleet.now) == Exhausted((Role.DECODE,))


def test_a_verification_of_the_last_engine_stands_and_its_probe_goes_on() -> None:
    fleet = Driven(make_fleet(prefill=1))
    fleet.fail(P1, F.KV_HANDOFF, times=3)
    assert choose(fleet.fleet, now=fleet.now) == Exhausted((Role.PREFILL,))
    assert fleet[P1].probes


# Whatever ends one hold may leave only yielding holds behind: those must then give way as well.


def test_an_undrained_engine_is_not_kept_out_by_its_quarantine_if_it_is_the_last() -> None:
    fleet = Driven(make_fleet())
    place(fleet, D1, QUARANTINE)
    place(fleet, D1, DRAIN)
    fleet.fail(D2, F.CONNECTION, times=3)
    fleet.apply(DrainCancelled(D1, "op", "done"))
    assert fleet.eligible(D1)


def test_a_verified_engine_is_not_kept_out_by_drift_if_it_is_the_last() -> None:
    fleet = Driven(make_fleet(eject_after=3))
    fleet.fail(D1, F.STREAM, times=3)
    place(fleet, D1, DRIFT)
    fleet.fail(D2, F.CONNECTION, times=3)
    fleet.apply(InferenceProbed(D1, (served(P1, D1),)))
    assert fleet.eligible(D1)


def test_a_quarantine_that_ran_out_does_not_stand_again_on_the_last_engine() -> None:
    """A late failure must not extend a hold that candidate selection has already ended."""
    fleet = Driven(make_fleet(failure_quarantine_s=10.0))
    fleet.fail(D1, F.TIMEOUT, times=3)
    fleet.now += 11
    assert fleet.eligible(D1)
    fleet.apply(DrainOrdered(D2, "op", "test"))
    fleet.fail(D1, F.TIMEOUT)
    assert fleet.eligible(D1)


def test_a_last_engine_that_keeps_failing_is_not_held_and_released_at_every_failure() -> None:
    fleet = Driven(make_fleet(decode=1, failure_quarantine_s=10.0))
    decisions = fleet.fail(D1, F.OVERLOAD, times=50)
    assert not [d for d in decisions if isinstance(d, HoldPlaced)]
    assert fleet.eligible(D1)


def test_readmission_leaves_no_role_empty() -> None:
    fleet = Driven(make_fleet())
    fleet.fail(D1, F.CONNECTION, times=3)
    fleet.apply(DrainOrdered(D2, "op", "test"))
    fleet.apply(ReadmissionPassed(D1, "g1"))
    assert eligible_in(fleet.fleet, Role.DECODE, fleet.now) == [D1]
