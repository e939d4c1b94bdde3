"""Sends one request to an engine over a pool and brings back one whole answer, or the fault that took its place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Final

from narwhal.core.faults import EngineFault
from narwhal.engine.classify import NEVER_TWICE, OPENS_ITS_OWN, LegKind, Mishap
from narwhal.engine.connection import Connection, ConnectionPool, WholeExchange
from narwhal.engine.http1 import Origin, encode_request
from narwhal.engine.wire import RawAnswer
from narwhal.ports import EngineAddress

ENGINES_REMEMBERED: Final = 1024

RESTED_S_MAX: Final = 1.0
"""How long a connection may have rested before a request that cannot be sent twice: engines close idle ones later."""

origin_of = lru_cache(maxsize=ENGINES_REMEMBERED)(Origin.of)
"""The parsed address of an engine; addresses come from the configuration, so they are few."""


class Caller:
    """Requests over one pool. `api_key` is what the engines ask for; it never reaches a log."""

    def __init__(self, pool: ConnectionPool, api_key: str | None = None) -> None:
        self.pool = pool
        self._loop = asyncio.get_running_loop()
        self._auth = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def encode(self, method: str, url: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the bytes of a request, with the engines' own key."""
        return encode_request(method, origin_of(url), path, {**headers, **self._auth} if self._auth else headers, body)

    async def connection(self, engine: EngineAddress, kind: LegKind, due: float) -> Connection:
        """Return an idle connection to `engine` if that will do for `kind`, or a new one."""
        origin = origin_of(engine.url)
        rested_s_max = RESTED_S_MAX if kind in NEVER_TWICE else inf
        kept = None if kind in OPENS_ITS_OWN else self.pool.take(origin, rested_s_max=rested_s_max)
        return kept or await self.pool.connect(origin, kind=kind, engine=engine.id, due=due)

    async def whole(
        self, engine: EngineAddress, request: bytes, *, kind: LegKind, due: float, late: Mishap, resend: bool = False
    ) -> RawAnswer:
        """Return the answer to `request`. Raises an EngineFault; `late` names the one at loop time `due`.

        With `resend`, a kept connection that the engine closes before it answers anything is replaced by a new one,
        once: the engine had grown tired of it, which says nothing about the engine. A request must not be sent again
        when the engine might have spent something on it that cannot be spent twice.
        """
        connection = await self.connection(engine, kind, due)
        kept = connection.reused
        exchange = self.exchange(kind, engine)
        try:
            return await self.run(connection, request, exchange, due, late)
        except EngineFault:
            if not (resend and kept and exchange.mishap is Mishap.LOST):
                raise
        connection = await self.pool.connect(origin_of(engine.url), kind=kind, engine=engine.id, due=due)
        return await self.run(connection, request, self.exchange(kind, engine), due, late)

    def exchange(self, kind: LegKind, engine: EngineAddress) -> WholeExchange:
        """Return an exchange that collects a whole answer."""
        return WholeExchange(self._loop.create_future(), kind, engine.id)

    async def run(
        self, connection: Connection, request: bytes, exchange: WholeExchange, due: float, late: Mishap
    ) -> RawAnswer:
        """Send `request` on `connection` and return the answer; the connection is closed unless it can be kept."""
        timer = self._loop.call_at(due, exchange.on_mishap, late)
        connection.start(request, exchange)
        try:
            return await exchange.answer
        finally:
            timer.cancel()
            exchange.abandon()
