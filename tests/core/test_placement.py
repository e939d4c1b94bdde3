"""Placement: who is eligible, who is chosen, and how ties end."""

from __future__ import annotations

import pytest

from narwhal.core.events import DrainCancelled, DrainOrdered, LegReleased, LegStarted, ReadmissionPassed
from narwhal.core.placement import Exhausted, Pair, choose, choose_one, eligible, missing_roles
from narwhal.core.vocabulary import EngineId, FailureClass, Leg, Role
from tests.core.fleets import D1, D2, P1, P2, Driven, leg_of, make_fleet

F = FailureClass


def chosen(fleet: Driven, *exclude: EngineId) -> tuple[str, str]:
    pair = choose(fleet.fleet, now=fleet.now, exclude=frozenset(exclude))
    assert isinstance(pair, Pair)
    return pair.prefill.id, pair.decode.id


def serve(fleet: Driven, engine: EngineId) -> None:
    """One leg from start to end."""
    fleet.apply(LegStarted(engine, leg_of(fleet[engine])))
    fleet.apply(LegReleased(engine, leg_of(fleet[engine])))


def test_the_least_loaded_engines_are_chosen() -> None:
    fleet = Driven(make_fleet())
    fleet.apply(LegStarted(P1, Leg.PREFILL))
    fleet.apply(LegStarted(D1, Leg.DECODE))
    assert chosen(fleet) == (P2, D2)
    fleet.apply(LegStarted(P2, Leg.PREFILL))
    fleet.apply(LegStarted(P2, Leg.PREFILL))
    assert chosen(fleet) == (P1, D2)


def test_ties_on_a_fresh_fleet_go_by_id() -> None:
    assert chosen(Driven(make_fleet(prefill=3, decode=3))) == (P1, D1)


def test_ties_go_to_the_engine_that_was_placed_longest_ago() -> None:
    fleet = Driven(make_fleet(prefill=1, decode=3))
    order = []
    for _ in range(7):
        _, decode = chosen(fleet)
        order.append(decode)
        serve(fleet, EngineId(decode))
    assert order == ["d1", "d2", "d3", "d1", "d2", "d3", "d1"]


@pytest.mark.parametrize("absence", ["ejected", "drained"])
def test_an_engine_that_returns_gets_its_share_and_not_all_that_it_missed(absence: str) -> None:
    fleet = Driven(make_fleet())
    if absence == "ejected":
        fleet.fail(D1, F.CONNECTION, times=3)
    else:
        fleet.apply(DrainOrdered(D1, "op", "test"))
    for _ in range(1000):
        serve(fleet, D2)
    fleet.apply(ReadmissionPassed(D1, "g1") if absence == "ejected" else DrainCancelled(D1, "op", "test"))
    order = []
    for _ in range(6):
        order.append(chosen(fleet)[1])
        serve(fleet, EngineId(order[-1]))
    assert order == ["d1", "d2", "d1", "d2", "d1", "d2"]


def test_the_same_fleet_answers_the_same() -> None:
    fleet = Driven(make_fleet(prefill=3, decode=3))
    serve(fleet, P1)
    assert {chosen(fleet) for _ in range(5)} == {(P2, D1)}


def test_an_excluded_pair_is_avoided_where_another_exists() -> None:
    fleet = Driven(make_fleet())
    assert chosen(fleet, P1, D1) == (P2, D2)
    assert chosen(fleet, P1) == (P2, D1)


def test_an_excluded_engine_is_better_than_none() -> None:
    fleet = Driven(make_fleet(decode=1))
    fleet[P2].resident = 50
    assert chosen(fleet, P1, D1) == (P2, D1)
    assert chosen(fleet, P1, P2, D1) == (P1, D1)


@pytest.mark.parametrize(
    ("out", "missing"),
    [
        ([P1, P2], (Role.PREFILL,)),
        ([D1, D2], (Role.DECODE,)),
        ([P1, P2, D1, D2], (Role.PREFILL, Role.DECODE)),
    ],
)
def test_without_an_engine_of_a_role_nothing_is_chosen_and_the_roles_are_named(
    out: list[EngineId], missing: tuple[Role, ...]
) -> None:
    fleet = Driven(make_fleet())
    for engine in out:
        fleet.apply(DrainOrdered(engine, "op", "test"))
    assert choose(fleet.fleet, now=fleet.now) == Exhausted(missing)
    assert missing_roles(fleet.fleet, now=fleet.now) == missing


def test_one_engine_per_role_is_enough() -> None:
    fleet = Driven(make_fleet())
    for engine in (P1, D2):
        fleet.apply(DrainOrdered(engine, "op", "test"))
    assert chosen(fleet) == (P2, D1)
    assert missing_roles(fleet.fleet, now=fleet.now) == ()


def test_choosing_one_engine_asks_only_its_role() -> None:
    fleet = Driven(make_fleet())
    for engine in (P1, P2):
        fleet.apply(DrainOrdered(engine, "op", "test"))
    assert choose_one(fleet.fleet, Role.PREFILL, now=fleet.now) is None
    decode = choose_one(fleet.fleet, Role.DECODE, now=fleet.now)
    assert decode is fleet[D1]
    assert eligible(fleet.fleet, Role.DECODE, now=fleet.now) == [fleet[D1], fleet[D2]]


def test_what_is_in_flight_is_counted_by_leg_and_in_whole() -> None:
    fleet = Driven(make_fleet())
    fleet.apply(LegStarted(D1, Leg.DECODE))
    fleet.apply(LegStarted(D1, Leg.DECODE))
    fleet.apply(LegReleased(D1, Leg.DECODE))
    assert fleet[D1].inflight == {Leg.PREFILL: 0, Leg.DECODE: 1}
    assert fleet[D1].resident == 1


def test_a_leg_that_is_released_twice_is_our_own_bug() -> None:
    fleet = Driven(make_fleet())
    with pytest.raises(AssertionError, match="released twice"):
        fleet.apply(LegReleased(D1, Leg.DECODE))
