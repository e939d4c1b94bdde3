"""A cluster made of a real Redis and of routers that only say what they are told."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from narwhal.cli import main
from narwhal.config import HaSection
from narwhal.core.lease import Granted, LeaseRecord
from narwhal.core.vocabulary import FencingToken
from narwhal.store.keys import Keys
from narwhal.store.opening import RedisStores, open_redis
from tests.contract.samples import candidate, handoff, member


class ScriptedRouter:
    """The two ports of a router, answering what it was given. `asked` keeps what came in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: tuple[int, Mapping[str, Any]] = (503, {})
        self.admin: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, Mapping[str, str], Any]] = []
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_route("*", "/admin/{tail:.*}", self._admin)
        self._server = TestServer(app)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        await self._server.start_server()

    async def stop(self) -> None:
        await self._server.close()

    def is_active(self, token: int) -> None:
        self.says(200, role="active", reason="active", token=token)

    def is_standby(self, reason: str = "standby", *, control_ready: bool = True) -> None:
        self.says(503, role="standby", reason=reason, control_ready=control_ready)

    def says(
        self, status: int, *, role: str, reason: str, token: int | None = None, control_ready: bool = True
    ) -> None:
        self.ready = (
            status,
            {
                "role": role,
                "reason": reason,
                "fencing_token": token,
                "control_ready": control_ready,
                "router": self.name,
            },
        )

    async def _ready(self, _request: web.Request) -> web.Response:
        status, document = self.ready
        return web.json_response(document, status=status)

    async def _admin(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((f"{request.method} {request.path}", request.headers.copy(), body))
        status, document = self.admin.get(f"{request.method} {request.path}", (404, {"error": {"message": "no such"}}))
        return web.json_response(document, status=status)


class ScriptedCluster:
    """A cluster of one name in a shared Redis; its keys are removed at the end."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.name = f"cli-{uuid.uuid4().hex[:12]}"
        self.stores: RedisStores = open_redis(HaSection(cluster=self.name, redis_url=redis_url), client_name="test")
        self.routers = {name: ScriptedRouter(name) for name in ("router-a", "router-b")}

    @property
    def words(self) -> tuple[str, ...]:
        return ("--redis", self.redis_url, "--cluster", self.name)

    def record(self, name: str) -> LeaseRecord:
        url = self.routers[name].url
        return replace(candidate(name), url=url, admin_url=url)

    async def hold(self, record: LeaseRecord) -> LeaseRecord:
        answer = await self.stores.lease.acquire(record, floor=FencingToken(0), epoch=None)
        assert isinstance(answer, Granted), answer
        return answer.record

    async def announce(self, name: str, *, role: str, url: str | None = None, **facts: Any) -> None:
        url = url or self.routers[name].url
        await self.stores.lease.announce(replace(member(name), role=role, url=url, admin_url=url, **facts))

    async def a_whole_pair(self) -> LeaseRecord:
        """router-a active with a handoff, router-b warm behind it."""
        record = await self.hold(self.record("router-a"))
        await self.stores.handoff.put(handoff(record.token, 5))
        self.routers["router-a"].is_active(record.token)
        self.routers["router-b"].is_standby()
        await self.announce("router-a", role="active", handoff=(record.token, 5))
        await self.announce("router-b", role="standby", handoff=(record.token, 4))
        return record

    async def run(self, *words: str) -> int:
        """Run `narwhal` with these words and the cluster's; return its exit code."""
        return await asyncio.to_thread(main, [*words, *self.words])

    async def close(self) -> None:
        keys = Keys.of(self.name)
        names = (keys.lease, keys.token, keys.epoch, keys.claim, keys.release, keys.handoff, keys.events, keys.members)
        await self.stores.control.run("DEL", *names, *(keys.member(name) for name in self.routers))
        await self.stores.aclose()


@asynccontextmanager
async def scripted_cluster(redis_url: str) -> AsyncIterator[ScriptedCluster]:
    cluster = ScriptedCluster(redis_url)
    for router in cluster.routers.values():
        await router.start()
    try:
        yield cluster
    finally:
        await cluster.close()
        for router in cluster.routers.values():
            await router.stop()
