"""A router's client-facing side over stub engines, alone in this process: what its clients see and what it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
from structlog.testing import capture_logs

from narwhal.config import Config, parse_config
from narwhal.core.control_plane import ControlPlane
from narwhal.core.events import FleetEvent, LegFailed
from narwhal.core.vocabulary import EngineId, FailureClass, Leg, RouterRole
from narwhal.engine.client import EngineClient
from narwhal.serving.app import build_app
from narwhal.serving.deps import ServingDeps
from narwhal.serving.lifeline import Lifeline
from narwhal.serving.metrics import Metrics
from narwhal.serving.server import HttpServer
from narwhal.testing.stub_engine import StubEngine, StubSettings, parse_fault

MODEL = "stub-model"
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 6}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the quick brown fox"}],
    "max_tokens": 6,
}


def lease_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def until(condition: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Return when `condition` holds; fail when it does not within `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class World:
    """Two prefill and two decode stubs, one router in role `solo`, and its clients."""

    engines: dict[str, StubEngine] = field(default_factory=dict)
    events: list[FleetEvent] = field(default_factory=list)
    stale_tokens: int = 0
    cards: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def start(self, *, stub: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        """Start the engines with `stub` settings, and the router with `sections` over its defaults."""
        for name in ("p1", "p2", "d1", "d2"):
            role = "prefill" if name.startswith("p") else "decode"
            self.engines[name] = StubEngine(StubSettings(role=role, model=MODEL, **(stub or {})))  # type: ignore[arg-type]
            await self.engines[name].start()
        self.config = self._configure(sections)
        self.plane = ControlPlane(self.config)
        self.plane.tenure.solo()
        self.plane.role = RouterRole.SOLO
        self.plane.ineligible = None
        self.client = EngineClient(self.config)
        self.metrics = Metrics(self.plane, clock=lease_clock)
        self.metrics.watch_pool(self.client.data)
        self.app = build_app(
            ServingDeps(
                plane=self.plane,
                engines=self.client.data,
                report=self._report,
                clock=lease_clock,
                metrics=self.metrics,
                lifeline=Lifeline(router="router-a", incarnation="inc"),
                model_cards=lambda: self.cards,
                on_stale_token=self._overtaken,
            )
        )
        self.server = HttpServer(self.app, host="127.0.0.1", port=0)
        self.url = f"http://127.0.0.1:{await self.server.start()}"
        self.http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=20))
        self._openai: openai.AsyncOpenAI | None = None

    @property
    def openai(self) -> openai.AsyncOpenAI:
        """The official client, built when it is first used: it takes its time."""
        if self._openai is None:
            url = f"{self.url}/v1"
            self._openai = openai.AsyncOpenAI(base_url=url, api_key="a client's key", max_retries=0, timeout=20)
        return self._openai

    async def stop(self) -> None:
        """Stop everything that was started."""
        if self._openai is not None:
            await self._openai.close()
        await self.http.close()
        await self.server.finish(timeout_s=0, hurry=asyncio.Event())
        await self.client.aclose()
        for engine in self.engines.values():
            await engine.stop()

    async def fault(self, engine: str, *specs: str) -> None:
        """Put exactly these faults in force at one engine."""
        await self.engines[engine].set_faults([parse_fault(spec) for spec in specs])

    async def fault_all(self, role: str, *specs: str) -> None:
        """Put exactly these faults in force at every engine whose name starts with `role`."""
        for name in self.engines:
            if name.startswith(role):
                await self.fault(name, *specs)

    def failures(self) -> list[tuple[Leg, FailureClass]]:
        """What was reported against engines, in order."""
        return [(event.leg, event.failure_class) for event in self.events if isinstance(event, LegFailed)]

    def requests(self, leg: str) -> int:
        """How many requests of `leg` reached any engine."""
        return sum(engine.state.requests[leg] for engine in self.engines.values())

    def seen(self, leg: str) -> list[Any]:
        """The requests of `leg` that reached any engine."""
        return [seen for engine in self.engines.values() for seen in engine.state.seen if seen.leg.value == leg]

    def idle(self) -> bool:
        """Whether nothing is in flight, anywhere."""
        fleet = self.plane.fleet.engines.values()
        return (
            self.client.data.in_use == 0
            and self.app.in_flight == 0
            and all(engine.resident == 0 for engine in fleet)
            and all(sum(engine.state.resident.values()) == 0 for engine in self.engines.values())
        )

    def eject(self, *engines: str) -> None:
        """Take engines out of placement."""
        for name in engines:
            self.plane.fleet.engines[EngineId(name)].blocked_until = float("inf")

    def _report(self, event: FleetEvent) -> None:
        self.events.append(event)
        self.plane.apply(event, now=asyncio.get_running_loop().time())

    def _overtaken(self) -> None:
        self.stale_tokens += 1

    def _configure(self, sections: dict[str, dict[str, Any]]) -> Config:
        data: dict[str, Any] = {
            "serving": {"models": [MODEL]},
            "engines": [
                {"id": name, "url": engine.url, "role": engine.settings.role} for name, engine in self.engines.items()
            ],
        }
        for name, section in sections.items():
            data[name] = {**data.get(name, {}), **section}
        return parse_config(data, source="test")


def finished(logs: list[Any]) -> list[Any]:
    """The canonical lines among captured log events."""
    return [line for line in logs if line["event"] == "request_finished"]


__all__ = ["CHAT", "COMPLETION", "MODEL", "World", "capture_logs", "finished", "until"]
