"""Engines that take requests and never answer, while their /health says 200 to everybody."""

from __future__ import annotations

from typing import Final

from narwhal.core.events import EngineEjected, HoldPlaced, ProbeJudged, ProbeOrdered
from narwhal.core.vocabulary import EjectionCause, FailureClass, HoldKind, ProbeKind, ProbeResult
from tests.live.world import IMPATIENT, Reply, World, Worlds, wait_until

WHOLE_LEGS: Final = {"serving": {"request_timeout_s": 1.2}}
"""A whole answer has no deadline but the request's own."""


def failures(replies: list[Reply]) -> list[int]:
    return [reply.status for reply in replies if not reply.served]


async def test_a_hung_decode_engine_is_ejected_and_its_health_alone_does_not_readmit_it(worlds: Worlds) -> None:
    world = await worlds.make(IMPATIENT)
    await world.break_("d1", "decode:hang")
    assert failures(await world.ask_at_once(6)) == [504] * 3
    await wait_until(lambda: world["d1"].ejection is not None)
    (ejected,) = world.decided(EngineEjected)
    assert (ejected.engine, ejected.cause) == ("d1", EjectionCause.INFERENCE_PROBE)
    assert all(reply.served for reply in await world.ask_often(4))
    await wait_until(lambda: (out := world["d1"].ejection) is not None and out.last_step == "kv_transfer")
    assert (await world.show("d1"))["healthy"]
    await world.heal("d1")
    await wait_until(lambda: world.eligible("d1"))


async def test_a_hung_prefill_engine_is_excused_by_its_health_once(worlds: Worlds) -> None:
    world = await worlds.make(IMPATIENT)
    await world.break_("p1", "prefill:hang")
    await check_two_rounds(world, "p1", stream=True)


async def test_a_decode_engine_that_hangs_on_whole_answers_is_excused_by_its_health_once(worlds: Worlds) -> None:
    world = await worlds.make(IMPATIENT, WHOLE_LEGS)
    await world.break_("d1", "decode:hang")
    await check_two_rounds(world, "d1", stream=False)


async def check_two_rounds(world: World, engine: str, *, stream: bool) -> None:
    """The first full streak of time-outs asks for health, the second verifies inference."""
    assert failures(await world.ask_at_once(6, stream=stream)) == [504] * 3
    await wait_until(lambda: world.decided(ProbeJudged))
    (health,) = world.decided(ProbeJudged)
    assert (health.engine, health.kind, health.result) == (engine, ProbeKind.HEALTH, ProbeResult.PASSED)
    assert world.eligible(engine)
    assert failures(await world.ask_at_once(6, stream=stream)) == [504] * 3
    (held,) = world.decided(HoldPlaced)
    assert (held.engine, held.kind, held.reason) == (
        engine,
        HoldKind.INFERENCE_VERIFICATION,
        FailureClass.TIMEOUT,
    )
    await wait_until(lambda: world[engine].ejection is not None)
    assert all(reply.served for reply in await world.ask_often(4, stream=stream))
    await world.heal(engine)
    await wait_until(lambda: world.eligible(engine))
    assert all(reply.served for reply in await world.ask_often(4, stream=stream))


async def test_a_slow_engine_is_not_a_hung_one(worlds: Worlds) -> None:
    """Each token in time, the whole answer long after the time of a first token."""
    seconds = {"first_token_timeout_s": 1.0, "stream_silence_timeout_s": 1.0}
    world = await worlds.make({"serving": seconds}, itl_ms=50.0)
    replies = await world.ask_at_once(4, max_tokens=30)
    assert all(reply.served for reply in replies)
    assert all(not engine.streaks.nonzero() for engine in world.plane.fleet.engines.values())


async def test_comments_for_ever_are_no_token_and_both_engines_of_the_pair_are_probed(worlds: Worlds) -> None:
    world = await worlds.make(IMPATIENT)
    await world.break_("d1", "decode:no_first_token,keepalive_ms=20")
    assert failures(await world.ask_at_once(6)) == [504] * 3
    (held,) = world.decided(HoldPlaced)
    assert (held.engine, held.reason) == ("d1", FailureClass.STREAM)
    await wait_until(lambda: world.decided(ProbeJudged, "d1"))
    partner = next(order.partner for order in world.decided(ProbeOrdered, "d1"))
    assert partner is not None
    assert probed(world, partner, "prefill")
    assert probed(world, "d1", "decode")


def probed(world: World, engine: str, leg: str) -> bool:
    """Whether an inference probe has come to the engine."""
    seen = world.engines[engine].state.seen
    return any(one.leg == leg and one.headers["X-Request-Id"].startswith("narwhal-probe") for one in seen)
