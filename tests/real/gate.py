"""A gate in front of one engine: while it is shut, requests for tokens, or their answers, wait; all else passes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

import aiohttp
from aiohttp import web

from narwhal.demo.ports import is_free

PATIENCE_S: Final = 600.0


class Gate:
    """Passes every request on to `target`, whole answers and streams alike."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._port = next(port for port in range(29_500, 29_900) if is_free(port))
        self._requests = _opened()
        self._answers = _opened()
        self._waiting = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Let no request for tokens pass within this context."""
        with _closed(self._requests):
            yield

    @contextmanager
    def answers_held(self) -> Iterator[None]:
        """Let the engine answer, and nobody see the answer, within this context."""
        with _closed(self._answers):
            yield

    async def holds(self, count: int) -> bool:
        """Whether so many requests wait."""
        return self._waiting >= count

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S), auto_decompress=False)
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._pass_on)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST":
            await self._wait_for(self._requests)
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("its client has given up")
        headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Content-Length")}
        try:
            async with self._session.request(
                request.method, f"{self._target}{request.path_qs}", data=body, headers=headers
            ) as answer:
                if request.method == "POST" and not self._answers.is_set():
                    whole = await answer.read()
                    await self._wait_for(self._answers)
                    return web.Response(status=answer.status, body=whole, content_type=answer.content_type)
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response
        except aiohttp.ClientConnectionError:
            assert request.transport is not None
            request.transport.abort()
            raise

    async def _wait_for(self, door: asyncio.Event) -> None:
        self._waiting += 1
        await door.wait()
        self._waiting -= 1


def _opened() -> asyncio.Event:
    door = asyncio.Event()
    door.set()
    return door


@contextmanager
def _closed(door: asyncio.Event) -> Iterator[None]:
    door.clear()
    try:
        yield
    finally:
        door.set()
