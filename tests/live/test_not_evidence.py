"""What is never held against an engine: clients' mistakes, departures and deadlines, our own limits, missing extras."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from narwhal.core.events import EngineEjected, EvidenceCleared, HoldPlaced, ProbeOrdered
from narwhal.core.vocabulary import FailureClass
from tests.live.world import BODY, World, Worlds, wait_until

QUESTIONABLE: Final = (EngineEjected, HoldPlaced, ProbeOrdered)


def accused(world: World) -> list[object]:
    """Every streak, and every decision against an engine."""
    streaks = [name for name in world.engines if world[name].streaks.nonzero() or world[name].streaks.by_leg]
    return [*streaks, *(decision for kind in QUESTIONABLE for decision in world.decided(kind))]


async def test_a_thousand_mistakes_of_clients_accuse_nobody(worlds: Worlds) -> None:
    """Most of them are found by the prefill engines, the rest by the decode engines."""
    world = await worlds.make()
    for role, times in (("p", 40), ("d", 10)):
        for name in world.engines:
            await world.break_(name, *([f"{world[name].role}:status=400"] if name.startswith(role) else []))
        for _ in range(times):
            assert {reply.status for reply in await world.ask_at_once(20)} == {400}
    assert accused(world) == []
    assert world.plane.monitoring.streak == 0
    assert await world.is_ready()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_an_engines_refusal_clears_connection_and_inference_status(worlds: Worlds, status: int) -> None:
    world = await worlds.make(prefill=1, decode=1)
    await world.break_("p1", "prefill:status=500,times=2", f"prefill:status={status},skip=2")
    replies = await world.ask_often(2 + 4)
    assert [reply.status for reply in replies[:2]] == [502, 502]
    (cleared,) = world.decided(EvidenceCleared, "p1")
    assert (cleared.classes, cleared.reason) == ((FailureClass.INFERENCE_STATUS,), "client_error")
    assert not world.decided(HoldPlaced)
    assert world["p1"].streaks.nonzero() == frozenset()


@pytest.mark.parametrize("when", ["in the prefill", "before the first token", "in the stream", "in a whole answer"])
async def test_clients_that_leave_accuse_nobody(worlds: Worlds, when: str) -> None:
    world = await worlds.make()
    fault: dict[str, str] = {
        "in the prefill": "prefill:hang",
        "before the first token": "decode:no_first_token",
        "in the stream": "decode:silence=3",
        "in a whole answer": "decode:hang",
    }
    for name in world.engines:
        if fault[when].startswith(world[name].role):
            await world.break_(name, fault[when])
    role = fault[when].partition(":")[0]
    asked = [asyncio.create_task(leave_unfinished(world, stream=when != "in a whole answer")) for _ in range(8)]
    await wait_until(lambda: sum(e.state.resident[role] for e in world.engines.values()) == 8)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await wait_until(lambda: all(sum(e.state.resident.values()) == 0 for e in world.engines.values()))
    await wait_until(lambda: all(world[name].resident == 0 for name in world.engines))
    assert accused(world) == []


async def leave_unfinished(world: World, *, stream: bool) -> None:
    body: dict[str, Any] = {**BODY, "stream": stream}
    async with world.http.post(world.router.url + "/v1/completions", json=body) as answer:
        await answer.read()


@pytest.mark.parametrize(
    ("engine", "fault", "stream"),
    [("p1", "prefill:hang", True), ("d1", "decode:hang", True), ("d1", "decode:hang", False)],
    ids=["prefill", "stream", "whole"],
)
async def test_the_deadline_of_a_request_accuses_nobody(worlds: Worlds, engine: str, fault: str, stream: bool) -> None:
    world = await worlds.make({"serving": {"request_timeout_s": 0.4}}, prefill=1, decode=1)
    await world.break_(engine, fault)
    replies = await world.ask_at_once(6, stream=stream)
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(504, "request_timeout")}
    assert accused(world) == []


async def test_a_full_data_pool_accuses_nobody(worlds: Worlds) -> None:
    world = await worlds.make({"serving": {"max_connections": 2}})
    for name in ("p1", "p2"):
        await world.break_(name, "prefill:hang")
    waiting = asyncio.create_task(world.ask_at_once(2))
    await wait_until(lambda: sum(e.state.resident["prefill"] for e in world.engines.values()) == 2)
    replies = await world.ask_often(6)
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(503, "saturated")}
    assert {reply.headers["X-Narwhal-Not-Executed"] for reply in replies} == {"1"}
    for name in ("p1", "p2"):
        await world.heal(name)
    assert all(reply.served for reply in await waiting)
    assert accused(world) == []


async def test_engines_without_the_optional_endpoints_are_used_and_nobody_complains(worlds: Worlds) -> None:
    with capture_logs() as logs:
        world = await worlds.make()
        for name in world.engines:
            await world.break_(name, "info:status=404")
        passes = world.plane.monitoring.passes
        await wait_until(lambda: world.plane.monitoring.passes > passes + 5)
        assert all(reply.served for reply in await world.ask_often(4))
    assert accused(world) == []
    assert world.plane.monitoring.failures == {}
    assert [
        line for line in logs if line["log_level"] in ("warning", "error") and line["event"] != "running_solo"
    ] == []


async def test_an_idle_connection_that_the_engine_closed_costs_no_client_a_request(worlds: Worlds) -> None:
    """The engine tires of idle connections before the router does; both legs find a kept one that is dead."""
    world = await worlds.make({"engine": {"keepalive_s": 60.0}}, prefill=1, decode=1)
    for _ in range(20):
        assert (await world.ask()).served
        for engine in world.engines.values():
            engine.lose_connections()
    assert accused(world) == []
