"""Random histories: the memory twin answers as the Lua scripts do, and no history lets a token or an order fall."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from narwhal.core.lease import Claim, DataLost, Granted, LeaseRecord, Occupied
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.errors import HandoffRefused
from tests.contract.samples import candidate, handoff
from tests.contract.worlds import FakeWorld, MemoryWorld, World

ABOVE_ANY_CLOCK = 2**50
"""As a floor it makes tokens independent of each world's clock, so that they can be compared."""

LIVES = [("router-a", "first"), ("router-a", "second"), ("router-b", "first")]


@dataclass(frozen=True)
class Step:
    """One thing that happens. `life` acts, on the `term`-th latest granted term where one is needed."""

    action: str
    life: int = 0
    term: int = 0
    version: int = 1


steps = st.lists(
    st.builds(
        Step,
        action=st.sampled_from(
            ["acquire"] * 3
            + ["renew", "release", "claim", "put"] * 2
            + ["acquire_elsewhere", "drop_lease", "lose_data"]
        ),
        life=st.integers(0, len(LIVES) - 1),
        term=st.integers(0, 2),
        version=st.integers(1, 4),
    ),
    max_size=25,
)


class Teller:
    """Plays a history in one world and tells what was answered, without what worlds may choose freely."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lease, self._mirror = world.stores()
        self._terms: list[LeaseRecord] = []
        self._epochs: list[str | None] = [None]
        self.tokens: list[int] = []
        self.orders: list[tuple[int, int]] = []

    async def play(self, history: Sequence[Step]) -> list[Any]:
        return [(await self._take(step), await self._look()) for step in history]

    async def _take(self, step: Step) -> Any:
        router, incarnation = LIVES[step.life]
        me = candidate(router, incarnation=incarnation)
        term = self._terms[-1 - step.term] if step.term < len(self._terms) else me.with_token(FencingToken(1))
        match step.action:
            case "acquire":
                return await self._acquire(me, epoch=None)
            case "acquire_elsewhere":
                return await self._acquire(me, epoch="another")
            case "renew":
                return await self._lease.renew(term)
            case "release":
                return await self._lease.release(term, successor=RouterId("router-b"))
            case "claim":
                return await self._lease.claim(
                    term, Claim(RouterId(router), incarnation, term.token, f"r{step.version}")
                )
            case "put":
                return await self._put(term.token, step.version, mark=step.life)
            case "drop_lease":
                return await self._world.drop_lease()
            case _:
                return await self._world.lose_data()

    async def _acquire(self, me: LeaseRecord, *, epoch: str | None) -> Any:
        floor = max([ABOVE_ANY_CLOCK, *self.tokens])
        answer = await self._lease.acquire(me, floor=FencingToken(floor), epoch=epoch)
        match answer:
            case Granted(record=record, fresh=fresh):
                if fresh:
                    self.tokens.append(record.token)
                    self._terms.append(record)
                return answer
            case Occupied():
                return replace(answer, pttl_ms=0)
            case DataLost():
                return answer

    async def _put(self, token: int, version: int, *, mark: int) -> str:
        try:
            await self._mirror.put(handoff(token, version, mark=mark))
        except HandoffRefused as refused:
            return str(refused)
        self.orders.append((token, version))
        return "stored"

    async def _look(self) -> Any:
        seen = await self._lease.observe()
        if seen.epoch not in self._epochs:
            self._epochs.append(seen.epoch)
        epoch = self._epochs.index(seen.epoch)
        return replace(seen, pttl_ms=0, epoch=str(epoch)), await self._mirror.get()


async def tell(world: World, history: Sequence[Step]) -> tuple[list[Any], Teller]:
    teller = Teller(world)
    try:
        return await teller.play(history), teller
    finally:
        await world.aclose()


async def _both(history: Sequence[Step]) -> tuple[list[Any], list[Any]]:
    return (await tell(MemoryWorld(), history))[0], (await tell(FakeWorld(), history))[0]


@settings(max_examples=40, deadline=None)
@given(steps)
def test_the_memory_twin_answers_as_the_scripts_do(history: Sequence[Step]) -> None:
    in_memory, in_scripts = asyncio.run(_both(history))
    assert in_memory == in_scripts


@settings(max_examples=150, deadline=None)
@given(steps)
def test_tokens_and_accepted_orders_only_rise(history: Sequence[Step]) -> None:
    _, teller = asyncio.run(tell(MemoryWorld(), history))
    assert teller.tokens == sorted(set(teller.tokens))
    assert teller.orders == sorted(teller.orders)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), max_size=12))
def test_tokens_rise_whatever_the_servers_clock_does(history: Sequence[tuple[float, bool]]) -> None:
    """Each step moves Redis' clock and may lose its data; the floor is what a router remembers."""

    async def play() -> list[int]:
        world = MemoryWorld()
        lease, _ = world.stores()
        tokens = [0]
        for clock_offset_s, lost in history:
            world.redis.clock_offset_s = clock_offset_s
            world.redis.drop_lease()
            if lost:
                world.redis.flush()
            answer = await lease.acquire(candidate(), floor=FencingToken(tokens[-1]), epoch=None)
            assert isinstance(answer, Granted)
            tokens.append(answer.record.token)
        return tokens

    tokens = asyncio.run(play())
    assert tokens == sorted(set(tokens))
