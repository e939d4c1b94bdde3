"""Engines in memory as the control pool sees them: each is well until a test or a simulation says otherwise.

All answers take loop time; there is no network and no randomness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from narwhal.core.events import PairFinding
from narwhal.core.vocabulary import EngineId, FailureClass, Leg, Role
from narwhal.ports import EngineAddress, EngineTelemetry, HealthAnswer


class Condition(Enum):
    """How an engine is doing."""

    WELL = auto()
    GONE = auto()
    """Nothing listens: connections are refused."""
    HUNG = auto()
    """It accepts and never answers."""
    SICK = auto()
    """/health says 200, and every request fails."""
    UNHEALTHY = auto()
    """/health says 503, and requests are served."""


@dataclass
class MemoryEngine:
    """One engine. `generation` is its process; a restart makes another one."""

    id: EngineId
    role: Role
    condition: Condition = Condition.WELL
    generation: str = "process-1"
    models: tuple[str, ...] = ("m",)
    poisons: set[EngineId] = field(default_factory=set)
    """Partners with which a KV transfer fails although both engines are well."""

    def restart(self) -> None:
        """Come back as another process."""
        self.condition = Condition.WELL
        self.generation = f"process-{int(self.generation.removeprefix('process-')) + 1}"


class MemoryEngines:
    """The `EngineControl` of `narwhal.ports` over engines in memory.

    `crashing` names methods that raise, as a bug in a driver would. `full` makes our own pool refuse everything.
    `asked` lists what was asked: method and engine.
    """

    def __init__(self, engines: Iterable[tuple[str, str]], *, latency_s: float = 0.002) -> None:
        self.engines = {EngineId(name): MemoryEngine(EngineId(name), Role(role)) for name, role in engines}
        self.latency_s = latency_s
        self.crashing: dict[str, Exception] = {}
        self.full = False
        self.asked: list[tuple[str, str]] = []

    def view(self) -> MemoryEngines:
        """Return the same engines as another router sees them: with troubles of its own."""
        view = MemoryEngines((), latency_s=self.latency_s)
        view.engines = self.engines
        return view

    def __getitem__(self, name: str) -> MemoryEngine:
        return self.engines[EngineId(name)]

    async def health(self, engine: EngineAddress, *, timeout_s: float) -> HealthAnswer:
        """Ask /health once."""
        known = await self._asked("health", engine, timeout_s)
        if self.full:
            return HealthAnswer(healthy=False, conclusive=False, detail="our own pool is full")
        if known.condition in (Condition.WELL, Condition.SICK):
            return HealthAnswer(healthy=True)
        return HealthAnswer(healthy=False, detail=known.condition.name.lower())

    async def models(self, engine: EngineAddress, *, timeout_s: float) -> tuple[Mapping[str, Any], ...] | None:
        """Return the model cards."""
        known = await self._asked("models", engine, timeout_s)
        return None if self._silent(known) else tuple({"id": model} for model in known.models)

    async def telemetry(self, engine: EngineAddress, *, timeout_s: float) -> EngineTelemetry | None:
        """Return what the engine says of itself."""
        known = await self._asked("telemetry", engine, timeout_s)
        return None if self._silent(known) else EngineTelemetry(known.generation)

    async def infer(
        self, prefill: EngineAddress, decode: EngineAddress, *, model: str, timeout_s: float
    ) -> PairFinding:
        """Run one tiny request over the pair."""
        giver = await self._asked("infer", prefill, timeout_s)
        if self.full:
            return PairFinding(prefill.id, decode.id, conclusive=False, detail="our own pool is full")
        if fault := self.leg_fault(giver):
            return PairFinding(prefill.id, decode.id, Leg.PREFILL, detail=fault)
        taker = await self._asked("infer", decode, timeout_s)
        why = self.leg_fault(taker) or ("kv transfer failed" if decode.id in giver.poisons else "")
        return PairFinding(prefill.id, decode.id, Leg.DECODE if why else None, detail=why)

    @staticmethod
    def leg_fault(engine: MemoryEngine) -> FailureClass | None:
        """Return how a leg on `engine` fails, or None if it is served."""
        match engine.condition:
            case Condition.GONE:
                return FailureClass.CONNECTION
            case Condition.HUNG:
                return FailureClass.TIMEOUT
            case Condition.SICK:
                return FailureClass.INFERENCE_STATUS
            case Condition.WELL | Condition.UNHEALTHY:
                return None

    async def _asked(self, method: str, address: EngineAddress, timeout_s: float) -> MemoryEngine:
        """Take the time that the answer takes; raise what a bug raises."""
        self.asked.append((method, address.id))
        engine = self.engines[address.id]
        await asyncio.sleep(timeout_s if engine.condition is Condition.HUNG else min(self.latency_s, timeout_s))
        if method in self.crashing:
            raise self.crashing[method]
        return engine

    def _silent(self, engine: MemoryEngine) -> bool:
        return self.full or engine.condition in (Condition.GONE, Condition.HUNG)
