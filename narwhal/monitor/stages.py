"""The stages of a monitor pass: each asks the core what is due, does the IO, and tells the core.

Work on engines runs as one task per engine; a stage waits for it only briefly, so one hung engine holds up neither the
pass nor the others. What a task raises is raised by the stage's next run.
Source: source, "Monitoring and readiness"; decisions 3, 31 and 32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import GenerationSeen, HealthAnswered, LivenessSilent
from narwhal.core.vocabulary import EngineId, Role, Stage
from narwhal.monitor.engine_tasks import EngineTasks
from narwhal.monitor.handoff_writer import HandoffWriter
from narwhal.monitor.probe_runner import address
from narwhal.monitor.readmission_runner import ReadmissionRunner
from narwhal.monitor.reporter import Reporter
from narwhal.ports import EngineControl, EngineTelemetry

WARM_STAGES = frozenset({Stage.HEALTH, Stage.TELEMETRY})
"""What a standby does: it keeps engines in view, and leaves every decision to the active."""

SWEEP_SHARE = 0.9
"""Part of the time between two sweeps that one may last: a look that is still out would make the next one skip it."""


@dataclass(slots=True)
class EngineView:
    """What the monitor last saw of an engine, for metrics, status and a standby's own judgement."""

    healthy: bool | None = None
    telemetry: EngineTelemetry | None = None
    cards: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class Schedule:
    """When stages that do not run on every pass are due next, in loop seconds."""

    due_at: dict[Stage, float] = field(default_factory=dict)

    def due(self, stage: Stage, *, every_s: float, now: float) -> bool:
        """Whether `stage` is due at `now`; if so, its next time is `every_s` later."""
        if self.due_at.get(stage, now) > now:
            return False
        self.due_at[stage] = now + every_s
        return True


class Stages:
    """The eight stages, by name. `due` says which of them belong to a pass."""

    def __init__(
        self,
        plane: ControlPlane,
        control: EngineControl,
        reporter: Reporter,
        readmission: ReadmissionRunner,
        handoff: HandoffWriter,
    ) -> None:
        self._plane = plane
        self._control = control
        self._reporter = reporter
        self._readmission = readmission
        self._handoff = handoff
        self._schedule = Schedule()
        self._tasks = {
            stage: EngineTasks(stage) for stage in (Stage.HEALTH, Stage.READMISSION, Stage.LIVENESS, Stage.TELEMETRY)
        }
        self.views: dict[EngineId, EngineView] = {engine: EngineView() for engine in plane.fleet.engines}

    def due(self, *, now: float) -> list[tuple[Stage, Callable[[], Awaitable[None]]]]:
        """Return the stages of the pass that starts at `now`, in the source's order."""
        work: dict[Stage, Callable[[], Awaitable[None]]] = {
            Stage.CONTROLLER: self.controller,
            Stage.HEALTH: self.health,
            Stage.DRAINS: self.drains,
            Stage.ROLLOVER: self.rollover,
            Stage.READMISSION: self.readmission,
            Stage.LIVENESS: self.liveness,
            Stage.TELEMETRY: self.telemetry,
            Stage.HANDOFF: self.handoff,
        }
        every = {
            Stage.LIVENESS: self._plane.config.recovery.liveness_every_s,
            Stage.TELEMETRY: self._plane.config.controller.telemetry_every_s,
        }
        return [
            (stage, work[stage])
            for stage in Stage
            if (self._plane.serving or stage in WARM_STAGES)
            and (stage not in every or self._schedule.due(stage, every_s=every[stage], now=now))
        ]

    @property
    def resting(self) -> frozenset[Stage]:
        """The stages that this router does not run in its present role: what they last did no longer counts."""
        return frozenset() if self._plane.serving else frozenset(Stage) - WARM_STAGES

    async def cancel(self) -> None:
        """Stop everything that runs beside the passes."""
        for tasks in self._tasks.values():
            await tasks.cancel()

    def could_serve(self) -> str | None:
        """Return why this router could not serve if it took over now, or None if it could."""
        for role in Role:
            if not any(self.views[engine.id].healthy for engine in self._plane.fleet.by_role[role]):
                return f"no healthy {role} engine in view"
        return None

    def model_cards(self) -> list[Mapping[str, Any]]:
        """Return the engines' cards of /v1/models as last read, decode engines first: they say what clients get."""
        engines = [*self._plane.fleet.by_role[Role.DECODE], *self._plane.fleet.by_role[Role.PREFILL]]
        return [card for engine in engines for card in self.views[engine.id].cards]

    async def controller(self) -> None:
        """Look at the fleet as a whole."""
        self._reporter.carry_out(self._plane.controller.review(now=self._now()))

    async def health(self) -> None:
        """Let time pass in the core, start the probes that are due, and ask every engine for its health."""
        if self._plane.serving:
            decisions = self._plane.fleet.tick(now=self._now())
            self._plane.count(decisions)
            self._reporter.carry_out([*decisions, *self._plane.fleet.probing.due(now=self._now())])
        await self._each_engine(Stage.HEALTH, self._check_health)

    async def drains(self) -> None:
        """Say which drains have settled."""
        self._reporter.carry_out(self._plane.controller.settle_drains())

    async def rollover(self) -> None:
        """Begin a new interval of request tallies when the old one is over."""
        self._plane.controller.roll_over(now=self._now())

    async def readmission(self) -> None:
        """Start the validation of ejected engines that are due; it goes on beside the passes."""
        tasks = self._tasks[Stage.READMISSION]
        for engine in self._plane.fleet.readmission.take_due(now=self._now()):
            tasks.start(engine, partial(self._readmission.attempt, engine))
        await tasks.settle(timeout_s=0)

    async def liveness(self) -> None:
        """Sweep: an engine without a successful health response to it is silent."""
        await self._each_engine(Stage.LIVENESS, self._sweep)

    async def telemetry(self) -> None:
        """Read what the engines say of themselves, above all whether they are still the same process."""
        await self._each_engine(Stage.TELEMETRY, self._read_telemetry)

    async def handoff(self) -> None:
        """Persist the control plane, as long as it is this router's to persist."""
        if self._handoff.may_write:
            await self._handoff.write()

    async def _each_engine(self, stage: Stage, work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        for engine in self._plane.fleet.engines.values():
            self._tasks[stage].start(engine.id, partial(work, engine))
        await self._tasks[stage].settle(timeout_s=self._plane.config.controller.pass_every_s / 4)

    async def _check_health(self, engine: Engine) -> None:
        timeout_s = self._plane.config.engine.health_timeout_s
        answer = await self._control.health(address(engine), timeout_s=timeout_s)
        if not answer.conclusive:
            return
        self.views[engine.id].healthy = answer.healthy
        if answer.healthy and self._plane.serving:
            self._reporter.report(HealthAnswered(engine.id))

    async def _sweep(self, engine: Engine) -> None:
        """One look of a sweep; it ends before the next sweep, which would otherwise skip a hung engine."""
        recovery = self._plane.config.recovery
        timeout_s = min(recovery.liveness_timeout_s, SWEEP_SHARE * recovery.liveness_every_s)
        answer = await self._control.health(address(engine), timeout_s=timeout_s)
        if answer.conclusive and self._plane.serving:
            event = HealthAnswered(engine.id) if answer.healthy else LivenessSilent(engine.id, answer.detail)
            self._reporter.report(event)

    async def _read_telemetry(self, engine: Engine) -> None:
        timeout_s = self._plane.config.engine.health_timeout_s
        view = self.views[engine.id]
        view.telemetry = telemetry = await self._control.telemetry(address(engine), timeout_s=timeout_s)
        if telemetry is not None and telemetry.generation is not None and self._plane.serving:
            self._reporter.report(GenerationSeen(engine.id, telemetry.generation))
        view.cards = await self._control.models(address(engine), timeout_s=timeout_s) or view.cards

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
