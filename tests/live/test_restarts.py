"""An engine that restarts behind the router's back is another one: its old tickets are void, it must prove itself."""

from __future__ import annotations

import asyncio

import pytest

from narwhal.core.events import EngineEjected, EngineReadmitted
from narwhal.core.vocabulary import EjectionCause
from narwhal.testing.stub_engine import StubEngine, StubSettings
from tests.live.slow_link import slow_link
from tests.live.world import World, Worlds, wait_until


def old_tickets_used(world: World) -> int:
    """How many tickets reached a decode engine that no living prefill engine would honour."""
    states = [engine.state for engine in world.engines.values()]
    return sum(state.kv_load_failures + state.tickets_unknown + state.tickets_reused for state in states)


async def until_generation_known(world: World) -> None:
    await wait_until(lambda: all(world[name].generation is not None for name in world.engines))


@pytest.mark.parametrize("engine", ["p1", "d1"])
async def test_an_engine_that_restarts_unnoticed_by_health_is_out_until_it_has_proven_itself(
    worlds: Worlds, engine: str
) -> None:
    world = await worlds.make()
    await until_generation_known(world)
    before = world[engine].generation
    await world.break_("d1" if engine == "p1" else "p1", "refuse")
    await world.break_("d2" if engine == "p1" else "p2", "refuse")
    await world.engines[engine].restart_generation()
    await wait_until(lambda: world.decided(EngineEjected, engine))
    (ejected,) = world.decided(EngineEjected, engine)
    assert ejected.cause is EjectionCause.GENERATION_CHANGED
    await wait_until(lambda: (out := world[engine].ejection) is not None and out.last_step == "kv_transfer")
    assert not world.eligible(engine)
    for name in world.engines:
        await world.heal(name)
    await wait_until(lambda: all(world.eligible(name) for name in world.engines))
    (readmitted,) = world.decided(EngineReadmitted, engine)
    assert readmitted.generation not in (None, before)
    assert all(reply.served for reply in await world.ask_often(6))
    assert old_tickets_used(world) == 0


async def test_a_restart_with_requests_in_prefill_costs_those_and_mixes_no_generations(worlds: Worlds) -> None:
    world = await worlds.make()
    await until_generation_known(world)
    for name in ("p1", "p2"):
        await world.break_(name, "prefill:hang")
    asked = asyncio.create_task(world.ask_at_once(10))
    await wait_until(lambda: sum(world.engines[p].state.resident["prefill"] for p in ("p1", "p2")) == 10)
    await world.engines["p1"].restart_generation()
    for name in ("p1", "p2"):
        await world.heal(name)
    replies = await asked
    assert sum(reply.served for reply in replies) == 5
    assert {reply.status for reply in replies if not reply.served} == {502}
    await wait_until(lambda: world.decided(EngineReadmitted, "p1"))
    await wait_until(lambda: all(world.eligible(name) for name in world.engines))
    assert world["p1"].streaks.nonzero() == frozenset()
    assert all(reply.served for reply in await world.ask_often(6))
    assert old_tickets_used(world) == 0


async def test_a_ticket_of_a_process_that_has_since_been_replaced_never_reaches_a_decode_engine(worlds: Worlds) -> None:
    """The answer was on its way for so long that the engine restarted, and was seen to, before it came."""
    engines = {name: StubEngine(StubSettings(role=role)) for name, role in (("p1", "prefill"), ("d1", "decode"))}  # type: ignore[arg-type]
    for engine in engines.values():
        await engine.start()
    try:
        async with slow_link(engines["p1"].url) as link:
            world = await worlds.front(engines, urls={"p1": link.url})
            await until_generation_known(world)
            link.hold()
            asked = asyncio.create_task(world.ask())
            await asyncio.wait_for(link.held.wait(), 10)
            await engines["p1"].restart_generation()
            await wait_until(lambda: world.decided(EngineEjected))
            assert world.decided(EngineEjected)[0].cause is EjectionCause.GENERATION_CHANGED
            link.release()
            reply = await asked
            assert (reply.status, reply.error["code"]) == (503, "kv_ticket_expired")
            assert await world.metric("narwhal_kv_tickets_total", result="discarded") == 1
            await wait_until(world.is_ready)
            assert [seen.headers["X-Request-Id"][:13] for seen in engines["d1"].state.seen if seen.leg == "decode"] == [
                "narwhal-probe"
            ]
            assert (await world.ask()).served
            assert old_tickets_used(world) == 0
            await world.end()
    finally:
        for engine in engines.values():
            await engine.stop()


@pytest.mark.parametrize(("engine", "fault"), [("p1", "prefill:hang"), ("d1", "decode:silence=3")])
async def test_an_engine_that_is_killed_costs_what_it_had_in_flight_and_returns_with_its_new_process(
    worlds: Worlds, engine: str, fault: str
) -> None:
    world = await worlds.make()
    await until_generation_known(world)
    pair = [name for name in world.engines if name[0] == engine[0]]
    for name in pair:
        await world.break_(name, fault)
    asked = asyncio.create_task(world.ask_at_once(12))
    await wait_until(lambda: all(world[name].resident == 6 for name in pair))
    await wait_until(lambda: sum(world.engines[name].state.resident.total() for name in pair) == 12)
    await world.engines[engine].stop()
    for name in pair:
        await world.heal(name)
    replies = await asked
    assert sum(not reply.served for reply in replies) == 6
    await wait_until(lambda: world[engine].ejection is not None)
    assert all(reply.served for reply in await world.ask_often(6))
    await world.engines[engine].start()
    await wait_until(lambda: world.eligible(engine))
    assert all(reply.served for reply in await world.ask_often(6))
    assert old_tickets_used(world) == 0
