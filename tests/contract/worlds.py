"""The places where a cluster's lease may live, each reached by several routers and broken by the test."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis

from narwhal.ports import HandoffStore, LeaseStore
from narwhal.store.connection import RedisLink, connect
from narwhal.store.keys import Keys
from narwhal.store.redis_store import RedisHandoffStore, RedisLeaseStore
from narwhal.testing.memory_store import MemoryHandoffStore, MemoryLeaseStore, MemoryLink, MemoryRedis

OP_TIMEOUT_S = 5.0
"""Long: these tests are about answers, not about waiting for them, and the machine may be busy."""


class World(Protocol):
    """One cluster's store with its faults."""

    def stores(self) -> tuple[LeaseStore, HandoffStore]:
        """Give another router its way in."""
        ...

    async def lose_data(self) -> None:
        """Lose everything, as FLUSHALL does."""
        ...

    async def drop_lease(self) -> None:
        """Lose the lease key alone."""
        ...

    async def drop_token(self) -> None:
        """Lose the token key alone."""
        ...

    async def event_types(self) -> Sequence[str]:
        """Return the `type` of each event in the stream, oldest first."""
        ...

    async def aclose(self) -> None:
        """Leave nothing behind."""
        ...


class MemoryWorld:
    """The memory twin."""

    def __init__(self) -> None:
        self.redis = MemoryRedis()

    def stores(self) -> tuple[LeaseStore, HandoffStore]:
        link = MemoryLink(self.redis)
        return MemoryLeaseStore(link), MemoryHandoffStore(link)

    async def lose_data(self) -> None:
        self.redis.flush()

    async def drop_lease(self) -> None:
        self.redis.drop_lease()

    async def drop_token(self) -> None:
        self.redis.drop_token()

    async def event_types(self) -> Sequence[str]:
        return [event["type"] for event in self.redis.events]

    async def aclose(self) -> None:
        pass


class RedisWorld:
    """A cluster of its own in a Redis that others may use as well: it never touches a key that is not its own."""

    script_flags = True

    def __init__(self) -> None:
        self.keys = Keys.of(f"test-{uuid.uuid4().hex[:12]}")
        self._links: list[RedisLink] = []
        self._admin = self.client()

    def client(self) -> Redis:
        raise NotImplementedError

    def stores(self) -> tuple[LeaseStore, HandoffStore]:
        links = [
            RedisLink(
                self.client(), address="the test's Redis", op_timeout_s=OP_TIMEOUT_S, script_flags=self.script_flags
            )
            for _ in range(3)
        ]
        self._links += links
        return RedisLeaseStore(links[0], links[1], links[2], self.keys), RedisHandoffStore(links[1], self.keys)

    async def lose_data(self) -> None:
        async for key in self._admin.scan_iter(match=self.keys.prefix + "*"):
            await self._admin.delete(key)

    async def drop_lease(self) -> None:
        await self._admin.delete(self.keys.lease)

    async def drop_token(self) -> None:
        await self._admin.delete(self.keys.token)

    async def event_types(self) -> Sequence[str]:
        entries: Any = await self._admin.xrange(self.keys.events)
        return [fields[b"type"].decode() for _, fields in entries]

    async def aclose(self) -> None:
        await self.lose_data()
        await self._admin.aclose()
        for link in self._links:
            await link.aclose()


class RealWorld(RedisWorld):
    """A real server."""

    def __init__(self, url: str) -> None:
        self._url = url
        super().__init__()

    def client(self) -> Redis:
        return connect(self._url, timeout_s=OP_TIMEOUT_S, client_name="narwhal-contract-test")


class FakeWorld(RedisWorld):
    """fakeredis: the scripts in a Lua interpreter, without a process."""

    script_flags = False

    def __init__(self) -> None:
        self._server = FakeServer(version=(7,))
        super().__init__()

    def client(self) -> Redis:
        return FakeAsyncRedis(server=self._server)
