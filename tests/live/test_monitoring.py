"""A monitor whose stage fails: the router says so, admits nothing, finishes what it has, and recovers by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest

from narwhal.core.events import MonitoringDegraded, MonitoringRecovered
from narwhal.core.vocabulary import Stage
from narwhal.monitor.loop import MonitorLoop
from narwhal.monitor.stages import Stages
from tests.live.world import LiveRouter, World, Worlds, wait_until

LIMIT: Final = 3


class FailingStages(Stages):
    """Stages of which some do something else instead; only between tests and never in the product."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.instead: dict[Stage, Callable[[], Awaitable[None]]] = {}

    def due(self, *, now: float) -> list[tuple[Stage, Callable[[], Awaitable[None]]]]:
        return [(stage, self.instead.get(stage, work)) for stage, work in super().due(now=now)]


class FailingRouter(LiveRouter):
    """A router whose stages can be made to fail."""

    failing: FailingStages

    def _build_monitor(self) -> None:
        super()._build_monitor()
        stages = self._stages
        parts = (stages._plane, stages._control, stages._reporter, stages._readmission, stages._handoff)
        self._stages = self.failing = FailingStages(*parts)
        self._monitor = MonitorLoop(self._plane, self._stages, self._reporter)


def stages_of(world: World) -> FailingStages:
    assert isinstance(world.router, FailingRouter)
    return world.router.failing


async def fail() -> None:
    raise LookupError("a stage that was made to fail")


async def hang() -> None:
    await asyncio.Event().wait()


async def degraded(world: World) -> str | None:
    status, document = await world.ready()
    return str(document["reason"]) if status == 503 else None


@pytest.mark.parametrize("stage", Stage)
async def test_a_failing_stage_degrades_the_router_and_one_clean_pass_recovers_it(worlds: Worlds, stage: Stage) -> None:
    world = await worlds.make(router=FailingRouter)
    await world.break_("d1", "decode:silence=3")
    stream = asyncio.create_task(world.ask())
    await wait_until(lambda: world.engines["d1"].state.resident["decode"] == 1)
    stages_of(world).instead[stage] = fail
    await wait_until(partial(degraded, world))
    status, document = await world.ready()
    assert (status, document["reason"]) == (503, f"monitoring degraded: {stage} LookupError")
    assert document["control_ready"] is False
    (decision,) = world.decided(MonitoringDegraded)
    assert (decision.stage, decision.error_class, decision.streak) == (stage, "LookupError", LIMIT)
    refused = await world.ask()
    assert (refused.status, refused.error["code"]) == (503, "not_ready")
    assert refused.error["message"] == f"monitoring degraded: {stage} LookupError"
    assert refused.headers["X-Narwhal-Not-Executed"] == "1"
    await check_the_other_stages_run(world, stage)
    failures = await world.metric("narwhal_monitor_stage_errors_total", stage=stage, **{"class": "LookupError"})
    assert failures >= LIMIT
    assert await world.metric("narwhal_monitor_stage_errors_total") >= failures
    assert await world.metric("narwhal_monitor_failure_streak") >= LIMIT
    assert not stream.done()
    await world.heal("d1")
    assert (await stream).served
    stages_of(world).instead.clear()
    await wait_until(world.is_ready)
    assert len(world.decided(MonitoringRecovered)) == 1
    assert await world.metric("narwhal_monitor_failure_streak") == 0
    assert (await world.ask()).served


async def check_the_other_stages_run(world: World, failing: Stage) -> None:
    """Engines are looked after and the handoff is written while the router is degraded."""
    version, passes = world.plane.version, world.plane.monitoring.passes
    engine = world.engines["d1"].state
    asked = engine.requests["health"], engine.requests["info"]
    await wait_until(lambda: world.plane.monitoring.passes >= passes + 3)
    assert (world.plane.version > version) == (failing is not Stage.HANDOFF)
    await wait_until(lambda: engine.requests["health"] > asked[0])
    if failing is not Stage.TELEMETRY:
        await wait_until(lambda: engine.requests["info"] > asked[1])


async def test_an_engine_that_fails_while_the_router_is_degraded_is_ejected_and_returns(worlds: Worlds) -> None:
    fast = {"recovery": {"liveness_every_s": 0.1, "liveness_misses": 3}}
    world = await worlds.make(fast, router=FailingRouter)
    stages_of(world).instead[Stage.CONTROLLER] = fail
    await wait_until(partial(degraded, world))
    await world.break_("d1", "refuse")
    await wait_until(lambda: world["d1"].ejection is not None)
    await world.heal("d1")
    await wait_until(lambda: world.eligible("d1"))
    assert await degraded(world) == "monitoring degraded: controller LookupError"


async def test_a_stage_that_does_not_end_is_cut_off_and_counts_as_failed(worlds: Worlds) -> None:
    world = await worlds.make({"controller": {"stage_timeout_s": 0.2}}, router=FailingRouter)
    stages_of(world).instead[Stage.DRAINS] = hang
    await wait_until(partial(degraded, world))
    assert await degraded(world) == "monitoring degraded: drains TimeoutError"
    await check_the_other_stages_run(world, Stage.DRAINS)
    stages_of(world).instead.clear()
    await wait_until(world.is_ready)


async def test_a_stage_that_runs_rarely_and_always_fails_degrades_the_router_too(worlds: Worlds) -> None:
    """Passes in which it is not due do not wipe out that it failed."""
    world = await worlds.make({"controller": {"telemetry_every_s": 0.4}}, router=FailingRouter)
    stages_of(world).instead[Stage.TELEMETRY] = fail
    await wait_until(partial(degraded, world))
    assert world.plane.monitoring.passes > 2 * LIMIT
    stages_of(world).instead.clear()
    await wait_until(world.is_ready)


async def test_fewer_failed_passes_than_the_limit_change_nothing(worlds: Worlds) -> None:
    world = await worlds.make({"controller": {"monitor_failure_limit": 1000}}, router=FailingRouter)
    stages_of(world).instead[Stage.ROLLOVER] = fail
    await wait_until(lambda: world.plane.monitoring.streak >= 5)
    assert (await world.ask()).served
    stages_of(world).instead.clear()
    await wait_until(lambda: world.plane.monitoring.streak == 0)
    assert not world.decided(MonitoringDegraded)


async def test_a_handoff_that_cannot_be_written_degrades_the_router_until_it_can(worlds: Worlds) -> None:
    """Nothing is made up here: something stands where the file belongs."""
    world = await worlds.make()
    file = worlds.folder / "handoff.json"
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    await wait_until(partial(degraded, world))
    assert await degraded(world) == "monitoring degraded: handoff StoreUnavailable"
    (file / "in the way").rmdir()
    file.rmdir()
    await wait_until(world.is_ready)
    await wait_until(file.is_file)


async def test_a_restarted_router_starts_with_fresh_monitor_counters(worlds: Worlds) -> None:
    world = await worlds.make(router=FailingRouter)
    stages_of(world).instead[Stage.CONTROLLER] = fail
    await wait_until(partial(degraded, world))
    await world.end()
    again = await worlds.front(world.engines, resume=True)
    assert again.plane.monitoring.failures == {}
    assert await again.is_ready()
    assert (await again.ask()).served
