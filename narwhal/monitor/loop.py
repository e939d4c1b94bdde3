"""The monitor loop: one pass after another, every stage on its own.

A stage that raises or overruns its bound is recorded and the pass goes on. This is the one place in the project where
every exception is caught. Source: source, "Monitoring and readiness".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from narwhal.core.control_plane import ControlPlane
from narwhal.core.counters import CounterName
from narwhal.core.vocabulary import Stage
from narwhal.monitor.reporter import Reporter
from narwhal.monitor.stages import Stages

log = structlog.get_logger()


class MonitorLoop:
    """Runs passes until it is cancelled; a change of the control plane that must not be lost starts one early."""

    def __init__(self, plane: ControlPlane, stages: Stages, reporter: Reporter) -> None:
        self._plane = plane
        self._stages = stages
        self._reporter = reporter

    async def run(self) -> None:
        """Run passes every `controller.pass_every_s`, or as soon as something changed."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                await self.run_pass()
                await self._pause(started_at + self._plane.config.controller.pass_every_s - loop.time())
        finally:
            await self._stages.cancel()

    async def run_pass(self) -> None:
        """Run every stage that is due and let the core judge the pass."""
        self._reporter.changed.clear()
        results: dict[Stage, str | None] = dict.fromkeys(self._stages.resting)
        for stage, work in self._stages.due(now=asyncio.get_running_loop().time()):
            results[stage] = await self._run_stage(stage, work)
        self._plane.counters.add(CounterName.MONITOR_PASSES)
        self._reporter.carry_out(self._plane.monitoring.finish_pass(results))

    async def _run_stage(self, stage: Stage, work: Callable[[], Awaitable[None]]) -> str | None:
        try:
            async with asyncio.timeout(self._plane.config.controller.stage_timeout_s):
                await work()
        except asyncio.CancelledError as error:
            if _told_to_end():
                raise
            return self._failed(stage, error)
        except Exception as error:  # noqa: BLE001 - whatever a stage raises degrades the router, never the pass
            return self._failed(stage, error)
        return None

    def _failed(self, stage: Stage, error: BaseException) -> str:
        self._plane.counters.add(CounterName.MONITOR_STAGE_FAILURES)
        log.warning("stage_failed", stage=stage, error_class=type(error).__name__, error=str(error))
        return type(error).__name__

    async def _pause(self, timeout_s: float) -> None:
        """Wait for the next pass; after a change it comes at once, but never sooner than a tenth of the interval."""
        soonest_s = self._plane.config.controller.pass_every_s / 10
        await asyncio.sleep(min(soonest_s, max(timeout_s, 0)))
        try:
            async with asyncio.timeout(max(0.0, timeout_s - soonest_s)):
                await self._reporter.changed.wait()
        except TimeoutError:
            return


def _told_to_end() -> bool:
    """Whether this task was cancelled, and not just something that a stage waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
