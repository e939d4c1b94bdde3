"""What may happen between a request's prefill and its decode: load, holds, drains, restarts, and the end of a term."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.live.world import Reply, World, Worlds, wait_until


@asynccontextmanager
async def in_prefill(world: World, count: int) -> AsyncIterator[asyncio.Task[list[Reply]]]:
    """Yield while so many requests are in their prefill leg; they go on afterwards."""
    prefills = [name for name in world.engines if name.startswith("p")]
    for name in prefills:
        await world.break_(name, "prefill:hang")
    asked = asyncio.create_task(world.ask_at_once(count))
    await wait_until(lambda: sum(world.engines[name].state.resident["prefill"] for name in prefills) == count)
    yield asked
    for name in prefills:
        await world.heal(name)


def decoded(world: World, engine: str) -> int:
    return world.engines[engine].state.requests["decode"]


async def test_a_burst_is_spread_over_the_decode_engines(worlds: Worlds) -> None:
    """All of it is in prefill before the first decode begins."""
    world = await worlds.make()
    async with in_prefill(world, 8) as asked:
        pass
    assert all(reply.served for reply in await asked)
    assert (decoded(world, "d1"), decoded(world, "d2")) == (4, 4)


async def test_an_engine_that_is_drained_during_a_prefill_gets_no_decode_leg(worlds: Worlds) -> None:
    """A drain that has settled must stay settled: the operator may stop the engine at once."""
    world = await worlds.make()
    async with in_prefill(world, 4) as asked:
        await world.post("/admin/engines/d1/drain", actor="op", reason="new driver")
    assert all(reply.served for reply in await asked)
    assert (decoded(world, "d1"), decoded(world, "d2")) == (0, 4)


async def test_an_engine_that_fails_during_a_prefill_gets_no_decode_leg(worlds: Worlds) -> None:
    """Requests that were admitted before the streak was full do not add to its cost."""
    world = await worlds.make()
    async with in_prefill(world, 4) as asked:
        await world.break_("d1", "decode:status=500")
        unsplit = await world.ask_until(lambda: not world.eligible("d1"), n=2)
        assert sum(not reply.served for reply in unsplit) == 3
    assert all(reply.served for reply in await asked)


async def test_without_a_decode_engine_left_a_request_is_answered_503_and_its_ticket_dropped(worlds: Worlds) -> None:
    world = await worlds.make(decode=1)
    async with in_prefill(world, 1) as asked:
        await world.post("/admin/engines/d1/drain", actor="op", reason="new driver")
    (reply,) = await asked
    assert (reply.status, reply.error["code"]) == (503, "no_capacity")
    assert "Retry-After" in reply.headers
    assert "X-Narwhal-Not-Executed" not in reply.headers
    assert decoded(world, "d1") == 0
    assert await world.metric("narwhal_kv_tickets_total", result="discarded") == 1
