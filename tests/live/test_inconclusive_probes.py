"""Probes from which nothing follows: the hold stays, peers do the work, and the next probe is scheduled and shown."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from narwhal.core.events import EngineEjected, ProbeJudged
from narwhal.core.vocabulary import ProbeResult
from tests.live.world import World, Worlds, wait_until

UNSPLIT: Final = {"n": 2}
"""A request that goes whole to a decode engine, so that prefill engines have no part in it."""


def inconclusive(world: World, engine: str) -> list[ProbeJudged]:
    judged = world.decided(ProbeJudged, engine)
    assert {probe.result for probe in judged} <= {ProbeResult.INCONCLUSIVE}
    return judged


async def check_it_is_held_and_shown(world: World, engine: str) -> None:
    shown = await world.show(engine)
    (hold,) = shown["holds"]
    assert shown["state"] == hold["kind"] == "inference_verification"
    assert hold["age_s"] >= 0
    assert hold["inconclusive_probes"] >= 2
    (probe,) = shown["probes"]
    assert probe["running"] or 0 <= probe["next_s"] <= 0.3
    assert not world.decided(EngineEjected)


async def test_a_suspect_is_not_convicted_for_prefills_that_fail_its_probes(worlds: Worlds) -> None:
    world = await worlds.make()
    for name in ("p1", "p2"):
        await world.break_(name, "prefill:status=500")
    await world.break_("d1", "decode:status=500")
    replies = await world.ask_until(lambda: not world.eligible("d1"), **UNSPLIT)
    assert sum(not reply.served for reply in replies) == 3
    await wait_until(lambda: len(inconclusive(world, "d1")) >= 4)
    await check_it_is_held_and_shown(world, "d1")
    assert "p1" in inconclusive(world, "d1")[-1].detail
    assert all(reply.served for reply in await world.ask_often(4, **UNSPLIT))
    await world.heal("d1")
    for name in ("p1", "p2"):
        await world.heal(name)
    await wait_until(lambda: world.eligible("d1"))
    assert all(reply.served for reply in await world.ask_often(4))


async def test_the_time_to_the_next_probe_doubles_up_to_the_cap(worlds: Worlds) -> None:
    backoff = {"retry_backoff_s": 0.1, "retry_backoff_max_s": 0.3}
    world = await worlds.make({"recovery": backoff})
    await world.break_("d1", "decode:status=503,body=paused")
    await world.ask_until(lambda: not world.eligible("d1"))
    await wait_until(lambda: len(inconclusive(world, "d1")) >= 5)
    due = [probe.next_at for probe in inconclusive(world, "d1") if probe.next_at is not None]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    # From one due time to the next: the back-off, and the time until a pass starts the probe and it ends.
    assert [gap >= least for gap, least in zip(gaps, (0.2, 0.3, 0.3, 0.3), strict=False)] == [True] * len(gaps)


async def test_a_suspect_is_not_convicted_while_our_own_control_pool_is_full(worlds: Worlds) -> None:
    """One engine that never answers for its health holds the only slot of the pool."""
    pool = {"control_connections": 1, "health_timeout_s": 60.0, "probe_timeout_s": 0.3}
    world = await worlds.make({"engine": pool, "recovery": {"liveness_every_s": 60.0}})
    await world.break_("d2", "health:hang")
    await wait_until(lambda: world.engines["d2"].book.fired["hang"] == 1)
    await world.break_("d1", "decode:status=500")
    replies = await world.ask_until(lambda: not world.eligible("d1"))
    assert sum(not reply.served for reply in replies) == 3
    await wait_until(lambda: len(inconclusive(world, "d1")) >= 3)
    await check_it_is_held_and_shown(world, "d1")
    assert "control pool" in inconclusive(world, "d1")[-1].detail
    assert all(reply.served for reply in await world.ask_often(4))
    await world.heal("d1")
    await world.heal("d2")
    await wait_until(lambda: world.eligible("d1"))
    assert all(reply.served for reply in await world.ask_often(4))
