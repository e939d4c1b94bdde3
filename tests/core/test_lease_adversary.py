"""Thousands of seeded schedules against the lease protocol, and proof that the adversary would notice a broken one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

import pytest

from narwhal.core.lease import LeaseObservation
from narwhal.core.takeover import Takeover
from narwhal.core.tenure import Tenure
from narwhal.core.vocabulary import RouterId
from tests.core.adversary import NAMES, RATES, Protocol, World
from tests.core.leases import A, B

STEPS_S: Final = (0.001, 0.05, 0.1, 0.19, 0.21, 0.4, 0.8, 1.2, 1.6, 1.7, 1.79, 1.9, 2.0, 2.02)
USUAL: Final = ("wait", "attend", "exchange", "exchange", "send", "answer", "deliver") * 2 + (
    "stop",
    "lose",
    "stray",
    "peer",
)


def breaks(seed: int, protocol: Protocol) -> bool:
    """Play the schedule `seed`; say whether two routers held at once."""
    choose = random.Random(seed)
    world = World([choose.choice(RATES) for _ in NAMES], protocol)
    world.bring_up()
    names = [A, B] if choose.random() < 0.7 else list(NAMES)
    moves = USUAL + ("delete",) * choose.choice([0, 1, 2]) + ("lose_data",) * choose.choice([0, 0, 1])
    for _ in range(choose.choice([10, 20, 30])):
        move(world, choose.choice(moves), choose.choice(names), choose)
        if len(world.holding) > 1:
            return True
    return False


def move(world: World, what: str, name: RouterId, choose: random.Random) -> None:
    match what:
        case "wait":
            world.now += choose.choice(STEPS_S)
        case "attend":
            world.attend(name, choose.choice(STEPS_S))
        case "exchange" | "send" | "answer" | "deliver" | "stop" | "lose":
            getattr(world, what)(name)
        case "stray" if world.strays:
            world.let_stray_arrive(choose.randrange(len(world.strays)))
        case "peer":
            world.look_at_peer(name, choose.choice(NAMES))
        case "delete":
            world.store.lease = None
        case "lose_data":
            world.lose_data()
        case _:
            assert what == "stray"


@pytest.mark.parametrize("start", range(0, 900, 300))
def test_no_schedule_lets_two_routers_hold(start: int) -> None:
    broken = [seed for seed in range(start, start + 300) if breaks(seed, Protocol())]
    assert broken == []


class Eager(Takeover):
    """Takes any missing lease for one that ran out."""

    def _ran_out(self, seen: LeaseObservation, *, now: float) -> bool:
        return True


class Stale(Takeover):
    """Takes a lease for one that ran out although it did not see the last margin."""

    def _ran_out(self, seen: LeaseObservation, *, now: float) -> bool:
        if self._sight is not None:
            self._sight = replace(self._sight, overdue=True)
        return super()._ran_out(seen, now=now)


class Revivable(Tenure):
    """Believes a confirmation that came after its deadline."""

    def renewed(self, *, sent_at: float, now: float) -> None:
        super().renewed(sent_at=sent_at, now=sent_at)


class Endless(Tenure):
    """Believes in its term until it is told otherwise."""

    def held(self, now: float) -> bool:
        return self.record is not None


FOUND_BY_CHANCE = {
    "a missing lease is taken at once": Protocol(takeover=Eager),
    "the last margin need not be seen": Protocol(takeover=Stale),
    "there is no local deadline": Protocol(tenure=Endless),
    "an attempt is granted whatever came since the look": Protocol(compares_token=False),
}


@pytest.mark.parametrize("protocol", FOUND_BY_CHANCE.values(), ids=FOUND_BY_CHANCE)
def test_the_adversary_finds_a_protocol_that_is_broken(protocol: Protocol) -> None:
    assert any(breaks(seed, protocol) for seed in range(10_000)), "no schedule broke it"


Steps = list[tuple[float, str, RouterId]]
"""When after the grant to A, what, by whom."""

CONFIRMED_AFTER_THE_DEADLINE: Steps = [
    (1.75, "send", A),  # a renewal leaves just before the deadline ...
    (1.85, "exchange", B),  # ... B sees the last margin ...
    (1.90, "answer", A),  # ... the renewal reaches the store after that ...
    (1.91, "deliver", A),
    (1.92, "delete", B),  # ... and the extended lease is deleted by hand
    (2.01, "exchange", B),
    (2.02, "exchange", B),
]
ANSWERED_LATE: Steps = [
    (1.00, "send", A),
    (1.00, "answer", A),
    (1.77, "deliver", A),
    (2.90, "exchange", B),
    (3.01, "exchange", B),
    (3.02, "exchange", B),
]
DIRECTED = {
    "a late confirmation revives": (CONFIRMED_AFTER_THE_DEADLINE, Protocol(tenure=Revivable)),
    "the deadline counts from the reply": (ANSWERED_LATE, Protocol(counts_from_reply=True)),
}


def holders_after(steps: Steps, protocol: Protocol) -> list[RouterId]:
    world = World([1.0, 1.0, 1.0], protocol)
    world.bring_up()
    granted_at = world.now
    for at, what, name in steps:
        world.now = granted_at + at
        move(world, what, name, random.Random(0))
    return world.holding


@pytest.mark.parametrize(("steps", "mutant"), DIRECTED.values(), ids=DIRECTED)
def test_a_schedule_made_for_a_broken_protocol_breaks_it_and_not_the_real_one(steps: Steps, mutant: Protocol) -> None:
    assert holders_after(steps, mutant) == [A, B]
    assert holders_after(steps, Protocol()) == [B]
