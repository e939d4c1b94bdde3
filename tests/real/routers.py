"""A pair of real `narwhal-serve` processes in front of real engines, with a private Redis."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from openai import AsyncOpenAI

from narwhal.demo.children import Child
from narwhal.demo.ports import is_free
from narwhal.demo.redis_server import RedisServer
from tests.real.engines import MODEL, RealEngine

ROUTER_IDS: Final = ("router-a", "router-b")
CLUSTER: Final = "real"
READY_S: Final = 30.0
STOP_S: Final = 15.0
LOOK_S: Final = 5.0
PAUSE_S: Final = 0.05

Settings = Mapping[str, Mapping[str, Any]]
Document = dict[str, Any]

PATIENT: Final[dict[str, Mapping[str, Any]]] = {
    "serving": {"prefill_timeout_s": 40.0, "first_token_timeout_s": 40.0, "stream_silence_timeout_s": 10.0}
}
"""Serving deadlines for engines on a busy CPU, short enough to wait for. Everything else is the default."""


class Router:
    """One process. `log` is what it wrote so far."""

    def __init__(self, name: str, folder: Path, document: Document) -> None:
        self.name = name
        config = folder / f"{name}.json"
        config.write_text(json.dumps(document))
        self.url = f"http://127.0.0.1:{document['router']['port']}"
        self.admin_url = f"http://127.0.0.1:{document['router']['admin_port']}"
        command = [sys.executable, "-m", "narwhal", "serve", "--config", str(config)]
        self.child = Child(name, command, log=folder / f"{name}.log", environ=os.environ)

    @property
    def log(self) -> list[Document]:
        """Every log line so far."""
        lines = self.child.log.read_text(errors="replace").splitlines() if self.child.log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def said(self, event: str, **facts: Any) -> list[Document]:
        """Return the log lines of `event` with these facts."""
        return [
            line
            for line in self.log
            if line.get("event") == event and all(line.get(name) == value for name, value in facts.items())
        ]

    async def ready(self) -> tuple[int, Document]:
        """Return status and document of /ready; status 0 when nobody answers."""
        return await _get(f"{self.url}/ready")

    async def engine(self, name: str) -> Document:
        """Return what this router knows of an engine."""
        status, document = await _get(f"{self.admin_url}/admin/engines/{name}")
        assert status == 200, (self.name, status, document)
        return document

    async def state(self, name: str) -> str:
        """Return `eligible`, `ejected`, or the hold that keeps an engine out."""
        return str((await self.engine(name))["state"])

    def client(self, *, timeout_s: float = 120.0) -> AsyncOpenAI:
        """Return the official client, told nothing but the address, and not to try again by itself."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout_s)


class Pair:
    """Two routers over the same fleet."""

    def __init__(self, folder: Path, redis: RedisServer, engines: Sequence[RealEngine], settings: Settings) -> None:
        ports = _free_ports(4)
        self.routers = [
            Router(name, folder, _document(name, folder, redis.url, engines, settings, (next(ports), next(ports))))
            for name in ROUTER_IDS
        ]

    async def start(self) -> None:
        """Return when one router serves and the other follows."""
        first, second = self.routers
        first.child.start()
        await eventually(self.active, within_s=READY_S, what="a router serves")
        second.child.start()
        await eventually(lambda: _follows(second), within_s=READY_S, what=f"the other one follows: {second.child.log}")

    async def stop(self) -> None:
        """End both."""
        await asyncio.gather(*(router.child.stop(timeout_s=STOP_S) for router in self.routers))

    async def active(self) -> Router | None:
        """Return the router that admits now."""
        for router in self.routers:
            status, _ = await router.ready()
            if status == 200:
                return router
        return None

    async def serving(self) -> Router:
        """Return the router that admits, once there is one."""
        router = await eventually(self.active, within_s=READY_S, what="a router serves")
        assert isinstance(router, Router)
        return router


@asynccontextmanager
async def running(pair: Pair) -> AsyncIterator[Pair]:
    """Run a pair within this context."""
    try:
        await pair.start()
        yield pair
    finally:
        await pair.stop()


def patient(**more: Mapping[str, Any]) -> Settings:
    """Return the patient settings with some more, by section."""
    return {name: {**PATIENT.get(name, {}), **more.get(name, {})} for name in PATIENT | more}


async def eventually(
    condition: Callable[[], Awaitable[Any]], *, within_s: float, what: str, pause_s: float = PAUSE_S
) -> Any:
    """Return the first true value of `condition`; fail when there was none in time."""
    last: Any = None
    try:
        async with asyncio.timeout(within_s):
            while not (last := await condition()):
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what} (last seen: {last!r})") from None
    return last


async def _follows(router: Router) -> bool:
    status, document = await router.ready()
    return status == 503 and document.get("role") == "standby" and document.get("reason") == "standby"


async def _get(url: str) -> tuple[int, Document]:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_S)) as session,
            session.get(url) as answer,
        ):
            return answer.status, await answer.json()
    except (aiohttp.ClientError, TimeoutError):
        return 0, {}


def _document(
    name: str,
    folder: Path,
    redis_url: str,
    engines: Sequence[RealEngine],
    settings: Settings,
    ports: tuple[int, int],
) -> Document:
    document: Document = {
        "router": {"id": name, "port": ports[0], "admin_port": ports[1], "state_dir": str(folder / "state")},
        "serving": {"models": [MODEL]},
        "ha": {"cluster": CLUSTER, "redis_url": redis_url},
        "engines": [{"id": engine.name, "url": engine.url, "role": engine.role} for engine in engines],
    }
    for section, values in settings.items():
        document[section] = {**document.get(section, {}), **values}
    return document


def _free_ports(count: int) -> Iterator[int]:
    found = [port for port in range(21_000, 29_000) if is_free(port)][:count]
    assert len(found) == count, "no free ports"
    return iter(found)
