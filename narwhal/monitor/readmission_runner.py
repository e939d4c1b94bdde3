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


class CheckFailed(Exception):
    """A check did not pass; ends the attempt."""


class ReadmissionRunner:
    """Validates ejected engines. `report` takes the verdict to the core."""

    def __init__(self, plane: ControlPlane, control: EngineControl, report: Callable[[FleetEvent], None]) -> None:
        self._plane = plane
        self._control = control
        self._report = report

    async def attempt(self, engine_id: EngineId) -> None:
        """Run every check for `engine_id` and report how it ended.

        It reports whatever happens, else no other attempt would follow. Raises what a check raised unexpectedly.
        """
        attempt = _Attempt(self._plane, self._control, self._plane.fleet.engines[engine_id])
        failure = "the attempt was cut short"
        try:
            await attempt.run()
        except CheckFailed as error:
            failure = str(error)
        except Exception as error:
            failure = f"the check crashed: {error!r}"
            raise
        else:
            failure = ""
        finally:
            self._report(
                ReadmissionFailed(engine_id, attempt.step, failure)
                if failure
                else ReadmissionPassed(engine_id, attempt.generation)
            )


class _Attempt:
    """One attempt on its way: `step` is the check that runs, `generation` the process that is being validated."""

    def __init__(self, plane: ControlPlane, control: EngineControl, engine: Engine) -> None:
        self._plane = plane
        self._control = control
        self._engine = engine
        self._timeout_s = plane.config.engine.health_timeout_s
        self.step = ReadmissionStep.HEALTH
        self.generation: str | None = None

    async def run(self) -> None:
        """Run the checks in order. Raises CheckFailed at the first that does not pass."""
        checks = (
            (ReadmissionStep.HEALTH, self._healthy),
            (ReadmissionStep.MODEL_IDENTITY, self._right_model),
            (ReadmissionStep.GENERATION_IDENTITY, self._known_process),
            (ReadmissionStep.KV_TRANSFER, self._kv_transfer),
            (ReadmissionStep.GENERATION_IDENTITY, self._same_process),
            (ReadmissionStep.FINAL_HEALTH, self._healthy),
        )
        for step, check in checks:
            self.step = step
            await check()

    async def _healthy(self) -> None:
        answer = await self._control.health(address(self._engine), timeout_s=self._timeout_s)
        if not (answer.healthy and answer.conclusive):
            raise CheckFailed(answer.detail or "no health 200")

    async def _right_model(self) -> None:
        """Model identity: the engine offers the fleet's model by name."""
        wanted = self._plane.config.serving.models[0]
        cards = await self._control.models(address(self._engine), timeout_s=self._timeout_s)
        if cards is None:
            raise CheckFailed("/v1/models gave no readable answer")
        offered = [str(card.get("id")) for card in cards]
        if wanted not in offered:
            raise CheckFailed(f"offers {', '.join(offered) or 'nothing'}, not {wanted}")

    async def _known_process(self) -> None:
        self.generation = await self._seen_process()

    async def _same_process(self) -> None:
        if await self._seen_process() != self.generation:
            raise CheckFailed("the process changed during the checks")

    async def _seen_process(self) -> str | None:
        telemetry = await self._control.telemetry(address(self._engine), timeout_s=self._timeout_s)
        if telemetry is None:
            raise CheckFailed("/metrics gave no readable answer")
        return telemetry.generation

    async def _kv_transfer(self) -> None:
        """As its role permits: a prefill engine gives its KV to a decode engine, a decode engine takes it."""
        engine, now = self._engine, asyncio.get_running_loop().time()
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
        raise CheckFailed("; ".join(reasons) or "no engine of the other role")
