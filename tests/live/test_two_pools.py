"""The data pool and the control pool: what shares the one, and what a full data pool does not keep from the other."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from narwhal.core.events import EngineEjected, EngineReadmitted
from narwhal.core.vocabulary import EjectionCause
from tests.live.world import World, Worlds, wait_until

ONE: Final = {"serving": {"max_connections": 1}}


async def count_tokens(world: World) -> tuple[int, Any]:
    body = {"model": world.config.serving.models[0], "prompt": "one two three"}
    async with world.http.post(world.router.url + "/tokenize", json=body) as answer:
        return answer.status, await answer.json()


async def fill(world: World) -> asyncio.Task[Any]:
    """Let a request wait for ever in p1's prefill, which takes the only slot of the data pool."""
    await world.break_("p1", "prefill:hang")
    waiting = asyncio.create_task(world.ask())
    await wait_until(lambda: world.engines["p1"].state.resident["prefill"] == 1)
    return waiting


async def test_a_completion_and_a_token_count_share_the_data_pool(worlds: Worlds) -> None:
    world = await worlds.make(ONE)
    assert (await count_tokens(world))[0] == 200
    waiting = await fill(world)
    status, document = await count_tokens(world)
    assert (status, document["error"]["code"]) == (503, "saturated")
    assert (await world.ask()).error["code"] == "saturated"
    await world.heal("p1")
    assert (await waiting).served
    assert (await count_tokens(world))[0] == 200


async def test_engines_are_looked_after_while_the_data_pool_is_full(worlds: Worlds) -> None:
    """Silence is found, and the engine is checked through and readmitted, on the reserved control pool."""
    world = await worlds.make(ONE, {"recovery": {"liveness_every_s": 0.1, "liveness_misses": 3}})
    waiting = await fill(world)
    await world.break_("d1", "refuse")
    await wait_until(lambda: world.decided(EngineEjected, "d1"))
    assert world.decided(EngineEjected, "d1")[0].cause is EjectionCause.LIVENESS
    await world.heal("d1")
    await wait_until(lambda: world.decided(EngineReadmitted, "d1"))
    assert world.eligible("d1")
    assert (await world.ask()).error["code"] == "saturated"
    assert not waiting.done()
    await world.heal("p1")
    assert (await waiting).served
