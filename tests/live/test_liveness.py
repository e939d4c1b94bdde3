"""Liveness: engines that fall silent, and engines whose health is only slow now and then."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from narwhal.core.events import EngineEjected, EvidenceCleared
from narwhal.core.vocabulary import EjectionCause, FailureClass
from tests.live.world import Worlds, wait_until

BRISK: Final = {
    "engine": {"health_timeout_s": 0.25},
    "recovery": {"liveness_every_s": 0.3, "liveness_timeout_s": 0.25, "liveness_misses": 3},
}


@pytest.mark.parametrize("fault", ["health:hang", "health:status=503", "health:reset"])
async def test_a_silent_engine_is_ejected_after_so_many_sweeps_and_costs_no_client_a_request(
    worlds: Worlds, fault: str
) -> None:
    world = await worlds.make(BRISK)
    await world.break_("d1", fault)
    replies = await world.ask_until(lambda: not world.eligible("d1"))
    (ejected,) = world.decided(EngineEjected)
    assert (ejected.engine, ejected.cause, ejected.streak) == ("d1", EjectionCause.LIVENESS, 3)
    replies += await world.ask_often(4)
    assert all(reply.served for reply in replies)
    await world.heal("d1")
    await wait_until(lambda: world.eligible("d1"))


async def test_health_that_is_slow_one_time_in_three_under_load_never_ejects(worlds: Worlds) -> None:
    world = await worlds.make(BRISK)
    for name in world.engines:
        await world.break_(name, "health:delay=500,every=3")
    engines = world.engines.values()
    asked = asyncio.create_task(
        world.ask_until(lambda: min(e.state.requests["health"] for e in engines) >= 30, within_s=30)
    )
    replies = await asked
    assert all(reply.served for reply in replies)
    assert all(engine.book.fired["delay"] >= 8 for engine in engines)
    assert not world.decided(EngineEjected)


async def test_any_successful_health_response_resets_the_count_of_misses(worlds: Worlds) -> None:
    """A sweep follows each health check, and every other answer is bad: the sweeps miss again and again."""
    world = await worlds.make({"recovery": {"liveness_every_s": 0.1, "liveness_misses": 3}})
    await world.break_("d1", "health:status=503,every=2")
    await wait_until(lambda: world.engines["d1"].state.requests["health"] >= 20)
    cleared = [c for c in world.decided(EvidenceCleared, "d1") if FailureClass.LIVENESS in c.classes]
    assert cleared
    assert not world.decided(EngineEjected)


async def test_an_engine_that_is_silent_to_sweeps_alone_does_not_delay_those_of_others(worlds: Worlds) -> None:
    world = await worlds.make(BRISK)
    await world.break_("d1", "health:hang")
    await world.break_("d2", "health:status=503")
    await wait_until(lambda: world["d1"].ejection is not None and world["d2"].ejection is not None)
    causes = {ejected.engine: ejected.cause for ejected in world.decided(EngineEjected)}
    assert causes == {"d1": EjectionCause.LIVENESS, "d2": EjectionCause.LIVENESS}
    assert world.eligible("p1")
    assert world.eligible("p2")
    assert world.plane.monitoring.failures == {}
