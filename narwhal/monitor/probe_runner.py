"""Carries ordered probes out, on the control pool, never awaited by a client.

Every ordered probe is reported exactly once, also when the router is shutting down or our own pool was full: the core
keeps an engine held until it hears.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import FleetEvent, HealthProbed, InferenceProbed, PairFinding, ProbeOrdered
from narwhal.core.vocabulary import ProbeKind, ProbeResult
from narwhal.ports import EngineAddress, EngineControl

log = structlog.get_logger()


def address(engine: Engine) -> EngineAddress:
    """Return where `engine` is spoken to."""
    return EngineAddress(engine.id, engine.url)


class ProbeRunner:
    """One task per probe; `report` is the way back into the core, set once it exists."""

    def __init__(self, plane: ControlPlane, control: EngineControl) -> None:
        self._plane = plane
        self._control = control
        self._tasks: set[asyncio.Task[FleetEvent]] = set()
        self.report: Callable[[FleetEvent], None] = _unconnected

    def start(self, order: ProbeOrdered) -> None:
        """Start the probe that the core ordered."""
        task = asyncio.create_task(self._carry_out(order), name=f"probe-{order.kind}-{order.engine}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(order, done))

    async def cancel(self) -> None:
        """Stop every probe that is running and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, order: ProbeOrdered, task: asyncio.Task[FleetEvent]) -> None:
        """Report, whatever became of the task: a cancelled one may not even have begun."""
        self._tasks.discard(task)
        if task.cancelled():
            self.report(_nothing_learnt(order, "the probe was cut short"))
        elif (error := task.exception()) is not None:
            log.warning("probe_crashed", engine=order.engine, kind=order.kind, error=repr(error))
            self.report(_nothing_learnt(order, f"the probe crashed: {error!r}"))
        else:
            self.report(task.result())

    async def _carry_out(self, order: ProbeOrdered) -> FleetEvent:
        return await (self._health(order) if order.kind is ProbeKind.HEALTH else self._inference(order))

    async def _health(self, order: ProbeOrdered) -> HealthProbed:
        timeout_s = self._plane.config.engine.health_timeout_s
        answer = await self._control.health(address(self._plane.fleet.engines[order.engine]), timeout_s=timeout_s)
        if not answer.conclusive:
            return HealthProbed(order.engine, ProbeResult.INCONCLUSIVE, answer.detail, order.number)
        result = ProbeResult.PASSED if answer.healthy else ProbeResult.FAILED
        return HealthProbed(order.engine, result, answer.detail, order.number)

    async def _inference(self, order: ProbeOrdered) -> InferenceProbed:
        findings: list[PairFinding] = []
        now = asyncio.get_running_loop().time()
        for prefill, decode in self._plane.fleet.probing.plan(order.engine, order.partner, now=now):
            finding = await self._control.infer(
                address(prefill),
                address(decode),
                model=self._plane.config.serving.models[0],
                timeout_s=self._plane.config.engine.probe_timeout_s,
            )
            findings.append(finding)
            if finding.conclusive and finding.failed_leg is None and order.engine in (prefill.id, decode.id):
                break
        return InferenceProbed(order.engine, tuple(findings), order.number)


def _nothing_learnt(order: ProbeOrdered, why: str) -> FleetEvent:
    if order.kind is ProbeKind.HEALTH:
        return HealthProbed(order.engine, ProbeResult.INCONCLUSIVE, why, order.number)
    return InferenceProbed(order.engine, (), order.number)


def _unconnected(event: FleetEvent) -> None:
    raise AssertionError(f"no reporter was connected for {event}")
