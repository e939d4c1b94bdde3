"""Engines that say no for a while: busy, paused or asleep. They are asked for their health, and not ejected if well."""

from __future__ import annotations

from typing import Final

import pytest

from narwhal.core.events import EngineEjected, HoldPlaced, ProbeJudged
from narwhal.core.vocabulary import EjectionCause, FailureClass, HoldKind, ProbeKind, ProbeResult
from tests.live.world import World, Worlds, wait_until

BUSY: Final = [
    "status=408",
    "status=429",
    "status=429,retry_after_s=2",
    'status=503,body={"error":{"message":"engine busy","type":"ServiceUnavailableError"}}',
    "status=503,retry_after_s=2",
]
PAUSED: Final = [
    'status=503,body={"error":{"message":"The scheduler is paused.","type":"ServiceUnavailableError"}}',
    'status=503,body={"error":{"message":"The engine is sleeping.","code":503}}',
]


def untouched(world: World) -> bool:
    return all(world.eligible(name) for name in world.engines) and not world.decided(EngineEjected)


@pytest.mark.parametrize("fault", BUSY)
@pytest.mark.parametrize("engine", ["p1", "d1"])
async def test_a_busy_engine_that_is_healthy_goes_on(worlds: Worlds, engine: str, fault: str) -> None:
    world = await worlds.make()
    await world.break_(engine, f"{world[engine].role}:{fault}")
    replies = await world.ask_until(lambda: len(world.decided(ProbeJudged, engine)) >= 2)
    refused = [reply for reply in replies if not reply.served]
    assert {(reply.status, reply.error["code"]) for reply in refused} == {(503, "engine_overloaded")}
    assert {reply.headers["Retry-After"] for reply in refused} == {"2" if "retry_after" in fault else "1"}
    probes = world.decided(ProbeJudged, engine)
    assert {(probe.kind, probe.result) for probe in probes} == {(ProbeKind.HEALTH, ProbeResult.PASSED)}
    assert world[engine].streaks.nonzero() <= {FailureClass.OVERLOAD}
    assert untouched(world)


@pytest.mark.parametrize("engine", ["p1", "d1"])
async def test_a_busy_engine_that_is_not_healthy_is_ejected(worlds: Worlds, engine: str) -> None:
    world = await worlds.make()
    await world.break_(engine, f"{world[engine].role}:status=429", "health:status=503")
    replies = await world.ask_until(lambda: not world.eligible(engine))
    (ejected,) = world.decided(EngineEjected, engine)
    assert ejected.cause is EjectionCause.HEALTH_PROBE
    # The probe runs beside the requests: one more may meet the engine before its verdict.
    assert 3 <= sum(not reply.served for reply in replies) <= 4
    assert all(reply.served for reply in await world.ask_often(4))
    await world.heal(engine)
    await wait_until(lambda: world.eligible(engine))
    assert all(reply.served for reply in await world.ask_often(4))


@pytest.mark.parametrize("fault", PAUSED, ids=["paused", "asleep"])
@pytest.mark.parametrize("engine", ["p1", "d1"])
async def test_a_paused_engine_is_held_and_not_ejected_and_returns_when_it_works_again(
    worlds: Worlds, engine: str, fault: str
) -> None:
    world = await worlds.make()
    await world.break_(engine, f"{world[engine].role}:{fault}")
    replies = await world.ask_until(lambda: not world.eligible(engine))
    refused = [reply for reply in replies if not reply.served]
    assert [(reply.status, reply.error["code"]) for reply in refused] == [(503, "engine_paused")] * 3
    (held,) = world.decided(HoldPlaced, engine)
    assert (held.kind, held.reason) == (HoldKind.INFERENCE_VERIFICATION, FailureClass.INFERENCE_STATUS)
    await wait_until(lambda: len(world.decided(ProbeJudged, engine)) >= 3)
    assert {probe.result for probe in world.decided(ProbeJudged, engine)} == {ProbeResult.INCONCLUSIVE}
    assert all(reply.served for reply in await world.ask_often(4))
    await world.heal(engine)
    await wait_until(lambda: world.eligible(engine))
    assert all(reply.served for reply in await world.ask_often(4))
    assert untouched(world)
