"""Carries one readmission attempt out: the source's checks in the source's order, the first failure names its step.

It runs beside the passes, on the control pool, so that a slow engine delays no stage.
Source: source, "Readmission and drains"; decisions 16 and 17.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import FleetEvent, ReadmissionFailed, ReadmissionPassed
from narwhal.core.vocabulary import EngineId, ReadmissionStep
from narwhal.monitor.probe_runner import address
from narwhal.ports import EngineControl

PARTNERS_MAX = 2


class StepFailed(Exception):
    """A check did not pass; ends the attempt."""

    def __init__(self, step: ReadmissionStep, reason: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(f"{step}: {reason}")


class ReadmissionRunner:
    """Validates ejected engines. `report` takes the verdict to the core."""

    def __init__(self, plane: ControlPlane, control: EngineControl, report: Callable[[FleetEvent], None]) -> None:
        self._plane = plane
        self._control = control
        self._report = report

    async def attempt(self, engine_id: EngineId) -> None:
        """Run every check for `engine_id` and report how it ended."""
        engine = self._plane.fleet.engines[engine_id]
        try:
            await self._healthy(engine, ReadmissionStep.HEALTH)
            await self._right_model(engine)
            generation = await self._generation(engine)
            await self._kv_transfer(engine)
            await self._still(engine, generation)
            await self._healthy(engine, ReadmissionStep.FINAL_HEALTH)
        except StepFailed as failure:
            self._report(ReadmissionFailed(engine_id, failure.step, failure.reason))
        else:
            self._report(ReadmissionPassed(engine_id, generation))

    async def _healthy(self, engine: Engine, step: ReadmissionStep) -> None:
        answer = await self._control.health(address(engine), timeout_s=self._plane.config.engine.health_timeout_s)
        if not (answer.healthy and answer.conclusive):
            raise StepFailed(step, answer.detail or "no health 200")

    async def _right_model(self, engine: Engine) -> None:
        """Model identity: the engine offers the fleet's model by name."""
        wanted = self._plane.config.serving.models[0]
        cards = await self._control.models(address(engine), timeout_s=self._plane.config.engine.health_timeout_s)
        if cards is None:
            raise StepFailed(ReadmissionStep.MODEL_IDENTITY, "/v1/models gave no readable answer")
        offered = [str(card.get("id")) for card in cards]
        if wanted not in offered:
            raise StepFailed(ReadmissionStep.MODEL_IDENTITY, f"offers {', '.join(offered) or 'nothing'}, not {wanted}")

    async def _generation(self, engine: Engine) -> str | None:
        telemetry = await self._control.telemetry(address(engine), timeout_s=self._plane.config.engine.health_timeout_s)
        if telemetry is None:
            raise StepFailed(ReadmissionStep.GENERATION_IDENTITY, "/metrics gave no readable answer")
        return telemetry.generation

    async def _still(self, engine: Engine, generation: str | None) -> None:
        if await self._generation(engine) != generation:
            raise StepFailed(ReadmissionStep.GENERATION_IDENTITY, "the process changed during the checks")

    async def _kv_transfer(self, engine: Engine) -> None:
        """As its role permits: a prefill engine gives its KV to a decode engine, a decode engine takes it."""
        now = asyncio.get_running_loop().time()
        reasons = []
        for partner in self._plane.fleet.readmission.partners(engine, now=now)[:PARTNERS_MAX]:
            prefill, decode = (engine, partner) if engine.role == "prefill" else (partner, engine)
            finding = await self._control.infer(
                address(prefill),
                address(decode),
                model=self._plane.config.serving.models[0],
                timeout_s=self._plane.config.engine.probe_timeout_s,
            )
            if finding.conclusive and finding.failed_leg is None:
                return
            failed = f"{finding.failed_leg} leg failed" if finding.failed_leg else "inconclusive"
            reasons.append(f"with {partner.id}: {failed}: {finding.detail}")
        raise StepFailed(ReadmissionStep.KV_TRANSFER, "; ".join(reasons) or "no engine of the other role")
