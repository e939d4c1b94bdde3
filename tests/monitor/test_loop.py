"""A pass runs every stage whatever the others do, and what a pass says of the monitor decides about admission."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from narwhal.core.counters import CounterName
from narwhal.core.events import DrainOrdered, MonitoringDegraded, MonitoringRecovered
from narwhal.core.vocabulary import RouterRole, Stage
from narwhal.monitor.stages import WARM_STAGES
from narwhal.testing.memory_engines import Condition
from tests.core.fleets import D1, P1
from tests.ha.parts import now, until
from tests.monitor.parts import Monitored
from tests.virtual import virtual

Work = Callable[[], Awaitable[None]]


class Staged(Monitored):
    """A monitor whose stages may be replaced; `ran` lists what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Stage] = []
        self.instead: dict[Stage, Work] = {}
        due = self.stages.due

        def replaced(*, now: float) -> list[tuple[Stage, Work]]:
            return [(stage, self._noted(stage, self.instead.get(stage, work))) for stage, work in due(now=now)]

        self.stages.due = replaced  # type: ignore[method-assign]

    def _noted(self, stage: Stage, work: Work) -> Work:
        async def run() -> None:
            self.ran.append(stage)
            await work()

        return run

    def crash(self, stage: Stage) -> None:
        self.instead[stage] = raising(RuntimeError("a bug"))


def raising(error: BaseException) -> Work:
    async def run() -> None:
        raise error

    return run


async def hang() -> None:
    await asyncio.Event().wait()


@virtual
async def test_a_pass_runs_the_stages_in_the_source_s_order() -> None:
    a = Staged()
    await a.serve()
    await a.loop.run_pass()
    assert a.ran == [
        Stage.CONTROLLER,
        Stage.HEALTH,
        Stage.DRAINS,
        Stage.ROLLOVER,
        Stage.READMISSION,
        Stage.LIVENESS,
        Stage.TELEMETRY,
        Stage.HANDOFF,
    ]


@pytest.mark.parametrize("stage", list(Stage))
@virtual
async def test_a_stage_that_raises_stops_no_other_and_is_counted(stage: Stage) -> None:
    a = Staged()
    await a.serve()
    a.crash(stage)
    await a.loop.run_pass()
    assert a.ran == list(Stage)
    assert a.plane.monitoring.streak == 1
    assert a.plane.counters.values[CounterName.MONITOR_STAGE_FAILURES] == 1
    assert a.plane.monitoring.failures == {(stage, "RuntimeError"): 1}


@pytest.mark.parametrize("stage", list(Stage))
@virtual
async def test_a_stage_that_hangs_is_cut_at_its_bound_and_stops_no_other(stage: Stage) -> None:
    a = Staged()
    await a.serve()
    a.instead[stage] = hang
    await a.loop.run_pass()
    assert a.ran == list(Stage)
    assert a.plane.monitoring.failures == {(stage, "TimeoutError"): 1}
    assert now() == pytest.approx(a.plane.config.controller.stage_timeout_s, abs=0.2)


@virtual
async def test_a_cancelled_future_inside_a_stage_is_a_failure_and_not_the_end_of_the_monitor() -> None:
    a = Staged()
    await a.serve()
    a.instead[Stage.CONTROLLER] = raising(asyncio.CancelledError())
    async with a.running() as running:
        await asyncio.sleep(2.5)
        assert not running.done()
    assert (Stage.CONTROLLER, "CancelledError") in a.plane.monitoring.failures


@virtual
async def test_the_loop_ends_when_it_is_told_to_even_in_a_stage() -> None:
    a = Staged()
    await a.serve()
    a.instead[Stage.HEALTH] = hang
    async with a.running() as running:
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
    assert now() == pytest.approx(0.1, abs=0.01)


@virtual
async def test_failing_passes_close_admission_at_the_limit_and_not_before() -> None:
    a = Staged()
    await a.serve()
    a.crash(Stage.ROLLOVER)
    for _ in range(2):
        await a.loop.run_pass()
        assert a.plane.readiness(now=now(), lease_now=now()).ready
    await a.loop.run_pass()
    answer = a.plane.readiness(now=now(), lease_now=now())
    assert (answer.ready, answer.reason) == (False, "monitoring degraded: rollover RuntimeError")
    assert a.decided(MonitoringDegraded) == [MonitoringDegraded(Stage.ROLLOVER, "RuntimeError", 3)]


@virtual
async def test_one_clean_pass_opens_admission_again() -> None:
    a = Staged()
    await a.serve()
    a.crash(Stage.ROLLOVER)
    for _ in range(5):
        await a.loop.run_pass()
    a.instead.clear()
    await a.loop.run_pass()
    assert a.plane.readiness(now=now(), lease_now=now()).ready
    assert a.decided(MonitoringRecovered) == [MonitoringRecovered()]


@virtual
async def test_a_degraded_router_goes_on_monitoring_and_writing_its_handoff() -> None:
    a = Staged()
    await a.serve()
    a.crash(Stage.CONTROLLER)
    async with a.running():
        await asyncio.sleep(10)
        assert a.plane.monitoring.degraded is not None
        a.report(DrainOrdered(P1, "op", "test"))
        version = a.plane.version
        await until(lambda: a.plane.version > version, within_s=1)
        assert a.writer.written == a.shared.redis.get_handoff()


@virtual
async def test_a_rare_stage_that_always_fails_degrades_the_router_too() -> None:
    a = Staged()
    await a.serve()
    a.crash(Stage.LIVENESS)
    async with a.running():
        await asyncio.sleep(12)
        assert a.plane.monitoring.degraded == "liveness RuntimeError"


@virtual
async def test_passes_start_a_second_apart() -> None:
    a = Staged()
    await a.serve()
    async with a.running():
        await asyncio.sleep(0.5)
        for passes in range(1, 30):
            assert a.plane.monitoring.passes == passes
            await asyncio.sleep(1)


@virtual
async def test_a_change_is_in_the_handoff_a_tenth_of_a_pass_later() -> None:
    a = Staged()
    await a.serve()
    async with a.running():
        await asyncio.sleep(5.3)
        a.report(DrainOrdered(P1, "op", "test"))
        await asyncio.sleep(0.12)
        document = a.shared.redis.get_handoff()
        assert document is not None
        assert any(part.holds for part in document.engines if part.id == P1)


@virtual
async def test_a_stream_of_changes_does_not_make_passes_run_without_a_pause() -> None:
    a = Staged()
    await a.serve()
    async with a.running():
        for _ in range(1000):
            a.reporter.changed.set()
            await asyncio.sleep(0.01)
    assert a.plane.monitoring.passes <= 101


@virtual
async def test_a_hung_engine_delays_no_other_engine_and_no_pass() -> None:
    a = Staged()
    await a.serve()
    a.engines[P1].condition = Condition.HUNG
    async with a.running():
        await asyncio.sleep(30.5)
        assert a.plane.monitoring.passes >= 30
        assert a.plane.monitoring.streak == 0
        asked = [name for method, name in a.engines.asked if method == "health"]
        assert asked.count(D1) >= 30
        assert a.stages.views[D1].healthy
        assert a.plane.fleet.engines[P1].ejection is not None, "three silent sweeps eject it"
        assert a.writer.written_at == pytest.approx(now(), abs=1.1)


@virtual
async def test_a_standby_runs_the_warm_stages_only() -> None:
    a = Staged()
    async with a.running():
        await asyncio.sleep(20)
    assert set(a.ran) == WARM_STAGES
    assert a.shared.redis.get_handoff() is None


@virtual
async def test_a_router_that_was_fenced_is_clean_again_although_a_stage_that_it_no_longer_runs_had_failed() -> None:
    """Else a fenced router would call itself unfit for ever, and no standby would be left to claim."""
    a = Staged()
    await a.serve()
    a.host.disk.full = True
    async with a.running():
        await asyncio.sleep(5)
        assert a.plane.monitoring.degraded == "handoff StoreUnavailable"
        a.plane.tenure.fence("test")
        a.plane.role = RouterRole.STANDBY
        await asyncio.sleep(2)
        assert a.plane.monitoring.clean


@virtual
async def test_a_standby_whose_warm_stage_fails_is_not_clean() -> None:
    a = Staged()
    a.crash(Stage.TELEMETRY)
    async with a.running():
        await asyncio.sleep(5)
        assert not a.plane.monitoring.clean


@virtual
async def test_a_restarted_router_starts_with_fresh_monitor_counters() -> None:
    a = Staged()
    await a.serve()
    a.crash(Stage.CONTROLLER)
    for _ in range(3):
        await a.loop.run_pass()
    document = a.shared.redis.get_handoff()
    assert document is not None
    again = Monitored()
    again.plane.restore(document, now=now())
    assert again.plane.monitoring.degraded is None
    assert again.plane.monitoring.streak == 0
