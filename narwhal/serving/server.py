"""A listening socket with an application behind it: traffic or admin. It stops gently: listen no more, then finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from narwhal.serving.app import App

KEEPALIVE_S: Final = 75.0
"""Idle client connections live longer than any load balancer keeps its own, so that the balancer closes first."""

BACKLOG: Final = 4096
CANCEL_GRACE_S: Final = 1.0


class HttpServer:
    """Serves `app` on host and port. A client that leaves cancels the handler of its request."""

    def __init__(self, app: App | web.Application, *, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._runner: web.AppRunner | web.ServerRunner | None = None
        self._site: web.TCPSite | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises OSError when it is taken."""
        options: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_S, "access_log": None, "handler_cancellation": True}
        if isinstance(self._app, App):
            server = web.Server(self._app, request_factory=_bounded(self._app.bytes_max), **options)
            self._runner = web.ServerRunner(server, shutdown_timeout=CANCEL_GRACE_S)
        else:
            self._runner = web.AppRunner(self._app, shutdown_timeout=CANCEL_GRACE_S, **options)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG, reuse_port=False)
        await self._site.start()
        return self._site.port

    async def stop_listening(self) -> None:
        """Take no new connection. Open ones stay: what comes over them is answered with readiness' 503 and a close."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def finish(self, *, timeout_s: float, hurry: asyncio.Event) -> None:
        """Stop listening, let requests run to their end for `timeout_s` or until `hurry`, then cut what is left."""
        await self.stop_listening()
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        if isinstance(self._app, App):
            self._app.lifeline.close()
        if isinstance(self._app, App) and timeout_s > 0:
            await _first_of(self._app.drained(), hurry.wait(), timeout_s=timeout_s)
        await runner.cleanup()


def _bounded(bytes_max: int) -> Callable[..., web.BaseRequest]:
    """Return a factory of requests whose bodies may be `bytes_max` long; a body is then measured as it is read."""
    loop = asyncio.get_running_loop()

    def make(
        message: RawRequestMessage, payload: StreamReader, protocol: Any, writer: AbstractStreamWriter, task: Any
    ) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=bytes_max)

    return make


async def _first_of(*works: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
