"""A fleet of stub engines with one router in front of it, all in this process over real HTTP, and a client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from narwhal.config import Config, parse_config
from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import Decision
from narwhal.core.vocabulary import EngineId
from narwhal.router import Router, ServeOptions
from narwhal.testing.stub_engine import StubEngine, StubSettings, parse_fault

DecisionT = TypeVar("DecisionT", bound=Decision)

BODY: Final = {"model": "stub-model", "prompt": "the tusk of the whale points north", "max_tokens": 6}

Settings = Mapping[str, Mapping[str, Any]]

QUICK: Final[Settings] = {
    "serving": {
        "models": ["stub-model"],
        "request_timeout_s": 20.0,
        "prefill_timeout_s": 10.0,
        "first_token_timeout_s": 10.0,
        "stream_silence_timeout_s": 10.0,
        "graceful_timeout_s": 0.2,
    },
    "engine": {"connect_timeout_s": 5.0, "health_timeout_s": 5.0, "probe_timeout_s": 5.0},
    "recovery": {
        "eject_after": 3,
        "liveness_every_s": 0.2,
        "liveness_timeout_s": 5.0,
        "retry_backoff_s": 0.1,
        "retry_backoff_max_s": 0.3,
    },
    "controller": {"pass_every_s": 0.1, "telemetry_every_s": 0.2, "monitor_failure_limit": 3},
}
"""Quick where waiting is all that happens; patient where a slow machine could be mistaken for a sick engine."""

IMPATIENT: Final[Settings] = {
    "serving": {"prefill_timeout_s": 0.4, "first_token_timeout_s": 0.4, "stream_silence_timeout_s": 0.4},
    "engine": {"probe_timeout_s": 0.5},
}
"""For tests in which an engine keeps a client waiting."""


async def wait_until(condition: Callable[[], object], *, within_s: float = 10.0) -> None:
    """Return once `condition` holds, or fail after `within_s`. A condition that is awaitable is awaited."""
    try:
        async with asyncio.timeout(within_s):
            while not await _value(condition()):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it did not come to pass within {within_s} s") from None


async def _value(result: object) -> object:
    return await result if isinstance(result, Awaitable) else result


class LiveRouter(Router):
    """A router that a test can look into and stop. `decisions` is all that its core has decided."""

    def __init__(self, config: Config, options: ServeOptions, folder: Path) -> None:
        super().__init__(config, options, folder)
        self.decisions: list[Decision] = []
        self._reporter.watch(self.decisions.append)

    @property
    def url(self) -> str:
        return self._url

    @property
    def admin_url(self) -> str:
        return self._admin_url

    @property
    def plane(self) -> ControlPlane:
        return self._plane

    @property
    def listens(self) -> bool:
        return hasattr(self, "_admin_url")

    def stop(self) -> None:
        self._stop.set()


RouterKind = Callable[[Config, ServeOptions, Path], LiveRouter]


@dataclass(frozen=True)
class Reply:
    """What a client got. `served` is all that it cares for: a complete answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    stream: bool

    @property
    def frames(self) -> list[Any]:
        """The events of a stream: parsed JSON, or the string "[DONE]"."""
        events = [event[6:] for event in self.content.decode().split("\n\n") if event.startswith("data: ")]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Every choice of every frame of a stream."""
        return [choice for frame in self.frames if frame != "[DONE]" for choice in frame.get("choices", ())]

    @property
    def served(self) -> bool:
        if self.status != 200:
            return False
        if not self.stream:
            return bool(json.loads(self.content)["choices"][0]["finish_reason"])
        frames = self.frames
        finished = any(choice["finish_reason"] for choice in self.choices)
        return finished and frames[-1] == "[DONE]" and not any("error" in frame for frame in frames[:-1])

    @property
    def error(self) -> dict[str, Any]:
        """The error that the client was told, as a document or as the last frame of a stream."""
        document = json.loads(self.content) if self.status != 200 else self.frames[-1]
        error = document["error"]
        assert isinstance(error, dict)
        return error


@dataclass
class World:
    """Engines by name (p1, p2, d1, ...), a router, and a client of both its ports."""

    engines: dict[str, StubEngine]
    router: LiveRouter
    http: aiohttp.ClientSession
    config: Config
    running: asyncio.Task[int] | None = None

    async def end(self) -> None:
        """Stop the router and its client; the engines go on."""
        await self.http.close()
        if self.running is not None:
            self.router.stop()
            running, self.running = self.running, None
            assert await asyncio.wait_for(running, timeout=10) == 0

    @property
    def plane(self) -> ControlPlane:
        return self.router.plane

    def __getitem__(self, engine: str) -> Engine:
        return self.plane.fleet.engines[EngineId(engine)]

    def decided(self, kind: type[DecisionT], engine: str | None = None) -> list[DecisionT]:
        """The decisions of this kind in order, only those about `engine` if one is named."""
        found = [decision for decision in self.router.decisions if isinstance(decision, kind)]
        return [decision for decision in found if engine in (None, getattr(decision, "engine", None))]

    async def ask(self, *, stream: bool = True, chat: bool = False, **more: Any) -> Reply:
        """Send one completion request and return its whole answer."""
        body = {**BODY, "stream": stream, **more}
        path = "/v1/completions"
        if chat:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        async with self.http.post(self.router.url + path, json=body) as answer:
            return Reply(answer.status, answer.headers.copy(), await answer.read(), stream)

    async def ask_often(self, times: int, **more: Any) -> list[Reply]:
        """Send requests one after another."""
        return [await self.ask(**more) for _ in range(times)]

    async def ask_at_once(self, times: int, **more: Any) -> list[Reply]:
        """Send requests all at the same time."""
        return await asyncio.gather(*(self.ask(**more) for _ in range(times)))

    async def ask_until(self, condition: Callable[[], object], *, within_s: float = 10.0, **more: Any) -> list[Reply]:
        """Send requests one after another until `condition` holds; return all answers."""
        replies = []
        async with asyncio.timeout(within_s):
            while not condition():
                replies.append(await self.ask(**more))
        return replies

    async def break_(self, engine: str, *faults: str) -> None:
        """Put exactly these faults in force."""
        await self.engines[engine].set_faults([parse_fault(text) for text in faults])

    async def heal(self, engine: str) -> None:
        await self.engines[engine].set_faults()

    def eligible(self, engine: str) -> bool:
        """Whether placement may choose the engine now."""
        return self[engine].eligible(asyncio.get_running_loop().time())

    async def show(self, engine: str) -> dict[str, Any]:
        """What the admin port says of an engine."""
        return await self._document(f"{self.router.admin_url}/admin/engines/{engine}")

    async def ready(self) -> tuple[int, dict[str, Any]]:
        async with self.http.get(self.router.url + "/ready") as answer:
            return answer.status, await answer.json()

    async def is_ready(self) -> bool:
        return (await self.ready())[0] == 200

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Act as an operator."""
        async with self.http.post(self.router.admin_url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            document = await answer.json()
            assert isinstance(document, dict)
            return document

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that carry `labels`."""
        async with self.http.get(self.router.admin_url + "/metrics") as answer:
            page = await answer.text()
        total = 0.0
        for found, inside, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE):
            carried = dict(re.findall(r'(\w+)="([^"]*)"', inside))
            if found == name and labels.items() <= carried.items():
                total += float(value)
        return total

    async def _document(self, url: str) -> dict[str, Any]:
        async with self.http.get(url) as answer:
            document = await answer.json()
            assert isinstance(document, dict)
            return document


@dataclass
class Worlds:
    """Makes worlds, and takes them down again in the reverse order."""

    folder: Path
    _takedown: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def make(
        self,
        *layers: Settings,
        prefill: int = 2,
        decode: int = 2,
        router: RouterKind = LiveRouter,
        stub_kind: Callable[[StubSettings], StubEngine] = StubEngine,
        **stub: Any,
    ) -> World:
        """Start engines with `stub` settings, and a router in front of them; `layers` lie on top of QUICK."""
        engines: dict[str, StubEngine] = {}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(1, count + 1):
                one = stub_kind(StubSettings(role=role, **stub))  # type: ignore[arg-type]
                self._takedown.append(one.stop)
                await one.start()
                engines[f"{role[0]}{number}"] = one
        return await self.front(engines, *layers, router=router)

    async def front(
        self,
        engines: dict[str, StubEngine],
        *layers: Settings,
        router: RouterKind = LiveRouter,
        resume: bool = False,
        urls: Mapping[str, str] | None = None,
    ) -> World:
        """Put a router in front of running engines, and wait for its first passes.

        `resume` lets it take up the state of a router before it; `urls` replaces the addresses of some engines.
        """
        addresses = {name: ((urls or {}).get(name, e.url), e.settings.role) for name, e in engines.items()}
        config = make_config(addresses, *layers)
        running = router(config, ServeOptions(solo=True, resume=resume), self.folder)
        world = World(engines, running, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)), config)
        self._takedown.append(world.end)
        world.running = asyncio.create_task(running.run())
        await wait_until(lambda: running.listens and running.plane.serving)
        await wait_until(lambda: world.plane.monitoring.passes >= 2)
        return world

    async def take_down(self) -> None:
        while self._takedown:
            await self._takedown.pop()()


def make_config(engines: Mapping[str, tuple[str, str]], *layers: Settings) -> Config:
    """A configuration for engines given by (url, role), with free ports and `layers` on top of QUICK."""
    data: dict[str, Any] = {"router": {"id": "router-a", "port": 0, "admin_port": 0}}
    data["engines"] = [{"id": name, "url": url, "role": role} for name, (url, role) in engines.items()]
    for layer in (QUICK, *layers):
        for section, settings in layer.items():
            data[section] = {**data.get(section, {}), **settings}
    return parse_config(data, source="test")


@asynccontextmanager
async def worlds_in(folder: Path) -> AsyncIterator[Worlds]:
    """Yield a maker of worlds whose routers keep their state in `folder`."""
    maker = Worlds(folder)
    try:
        yield maker
    finally:
        await maker.take_down()
