"""The timed hold of a failed engine, if `recovery.failure_quarantine_s` is set, and the protection of last engines."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Final

from narwhal.core.events import EngineEjected, HoldLifted, HoldPlaced, LegFailed, ProbeOrdered
from narwhal.core.vocabulary import FailureClass, HoldKind, Leg, ProbeKind
from tests.live.world import Reply, Settings, World, Worlds, wait_until

QUARANTINE: Final = HoldKind.FAILURE_QUARANTINE

BUSY_AND_MUTE: Final = ("decode:status=429", "health:hang")
"""It fails as overloaded, and nothing is heard of its health: neither the probe nor a sweep comes to an end."""


def settings(quarantine_s: float) -> Settings:
    return {
        "engine": {"health_timeout_s": 60.0},
        "recovery": {"failure_quarantine_s": quarantine_s, "liveness_misses": 1000},
    }


def failed(replies: list[Reply]) -> int:
    return sum(not reply.served for reply in replies)


def held(world: World, kind: HoldKind, engine: str) -> list[HoldPlaced]:
    return [placed for placed in world.decided(HoldPlaced, engine) if placed.kind is kind]


async def test_a_failed_engine_is_out_until_its_deadline_and_then_on_probation(worlds: Worlds) -> None:
    """Its evidence still stands: an inference probe decides before it gets all its work back."""
    world = await worlds.make(settings(0.8))
    await world.break_("d1", *BUSY_AND_MUTE)
    assert failed(await world.ask_until(lambda: not world.eligible("d1"))) == 3
    (placed,) = held(world, QUARANTINE, "d1")
    assert placed.reason == "overload"
    assert not failed(await world.ask_often(4))
    hold = world["d1"].holds[QUARANTINE]
    assert hold.until < inf
    await world.break_("d1", "health:hang")
    await wait_until(lambda: held(world, HoldKind.INFERENCE_VERIFICATION, "d1"))
    assert asyncio.get_running_loop().time() >= hold.until
    lifted = world.decided(HoldLifted, "d1")[0]
    assert (lifted.kind, lifted.reason) == (QUARANTINE, "deadline passed")
    assert ProbeKind.INFERENCE in {order.kind for order in world.decided(ProbeOrdered, "d1")}
    await wait_until(lambda: world.eligible("d1"))
    assert not failed(await world.ask_often(4))
    assert not world.decided(EngineEjected)


async def test_an_engine_that_is_still_sick_after_its_quarantine_is_not_given_clients(worlds: Worlds) -> None:
    world = await worlds.make(settings(0.5))
    await world.break_("d1", "decode:status=408", "health:hang")
    await world.ask_until(lambda: not world.eligible("d1"))
    await world.break_("d1", "decode:status=500", "health:hang")
    await wait_until(lambda: world["d1"].ejection is not None)
    assert not failed(await world.ask_often(4))
    await world.heal("d1")
    await wait_until(lambda: world.eligible("d1"))


async def test_a_failure_in_quarantine_extends_it(worlds: Worlds) -> None:
    """What was in flight when the hold was placed fails later."""
    world = await worlds.make(settings(30.0))
    await world.break_("d1", "decode:delay=800", *BUSY_AND_MUTE)
    await world.break_("d2", "decode:delay=400")
    late = asyncio.create_task(world.ask_at_once(2))
    await wait_until(lambda: world.engines["d1"].state.resident["decode"] == 1)
    await world.break_("d1", *BUSY_AND_MUTE)
    # While d2 is slow, at least every other of these goes to d1.
    assert failed(await world.ask_at_once(8)) >= 3
    first = world["d1"].holds[QUARANTINE].until
    assert failed(await late) == 1
    now = asyncio.get_running_loop().time()
    assert first < world["d1"].holds[QUARANTINE].until <= now + 30.0
    assert len(held(world, QUARANTINE, "d1")) == 1


async def test_health_ends_a_quarantine_before_its_deadline(worlds: Worlds) -> None:
    world = await worlds.make(settings(60.0))
    await world.break_("d1", *BUSY_AND_MUTE)
    await world.ask_until(lambda: not world.eligible("d1"))
    await world.heal("d1")
    await wait_until(lambda: world.eligible("d1"))
    assert [(lifted.kind, lifted.reason) for lifted in world.decided(HoldLifted, "d1")] == [(QUARANTINE, "health 200")]
    assert not failed(await world.ask_often(4))


async def test_a_router_that_resumes_keeps_what_is_left_of_a_quarantine(worlds: Worlds) -> None:
    world = await worlds.make(settings(60.0))
    await world.break_("d1", *BUSY_AND_MUTE)
    await world.ask_until(lambda: not world.eligible("d1"))
    version = world.plane.version
    await wait_until(lambda: world.plane.version > version + 1)
    loop = asyncio.get_running_loop()
    left_s = world["d1"].holds[QUARANTINE].until - loop.time()
    await world.end()
    again = await worlds.front(world.engines, settings(60.0), resume=True)
    assert not again.eligible("d1")
    assert left_s - 5 < again["d1"].holds[QUARANTINE].until - loop.time() <= left_s + 0.5
    assert not failed(await again.ask_often(4))
    late = LegFailed(again["d1"].id, Leg.DECODE, FailureClass.OVERLOAD)
    again.plane.apply(late, now=loop.time())
    assert 59.0 < again["d1"].holds[QUARANTINE].until - loop.time() <= 60.0


async def test_the_last_engine_of_a_role_is_not_quarantined(worlds: Worlds) -> None:
    world = await worlds.make(settings(60.0), decode=1)
    await world.break_("d1", *BUSY_AND_MUTE)
    replies = await world.ask_often(6)
    assert {reply.error["code"] for reply in replies} == {"engine_overloaded"}
    assert world.eligible("d1")
    await world.break_("d1", "health:hang")
    assert not failed(await world.ask_often(4))


async def test_a_quarantine_yields_when_the_other_engine_of_its_role_is_ejected(worlds: Worlds) -> None:
    world = await worlds.make(settings(60.0))
    await world.break_("d1", *BUSY_AND_MUTE)
    await world.ask_until(lambda: not world.eligible("d1"))
    await world.break_("d1", "health:hang")
    await world.break_("d2", "refuse")
    replies = await world.ask_until(lambda: not world.eligible("d2"))
    assert failed(replies) == 3
    assert world.eligible("d1")
    assert [lifted.reason for lifted in world.decided(HoldLifted, "d1")] == ["last decode engine"]
    assert not failed(await world.ask_often(4))


async def test_a_confirmed_failure_removes_the_last_engine_and_recovery_needs_nobody(worlds: Worlds) -> None:
    world = await worlds.make(decode=1)
    await world.break_("d1", "decode:status=500")
    await world.ask_until(lambda: world["d1"].ejection is not None)
    status, document = await world.ready()
    assert (status, document["reason"], document["control_ready"]) == (503, "no eligible decode engine", True)
    refused = await world.ask()
    assert (refused.status, refused.error["code"]) == (503, "no_capacity")
    assert refused.error["message"] == "no eligible decode engine"
    assert refused.headers["X-Narwhal-Not-Executed"] == "1"
    assert "Retry-After" in refused.headers
    await wait_until(lambda: (out := world["d1"].ejection) is not None and out.attempts >= 2)
    await world.heal("d1")
    await wait_until(world.is_ready)
    assert not failed(await world.ask_often(4))
