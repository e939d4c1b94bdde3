"""The client-facing surface: which path and method does what. Everything unknown is answered in OpenAI's error shape.

A plain table instead of a web framework's router: it is asked for every request, and it has two dozen entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from narwhal.serving.deps import ServingDeps
from narwhal.serving.info import Info
from narwhal.serving.openai import CHAT, COMPLETIONS, invalid, not_allowed
from narwhal.serving.relay import Relay
from narwhal.serving.replies import Replies
from narwhal.serving.tokenize import Tokenizer

__all__ = ["App", "ServingDeps", "build_app"]

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

NOT_SPLIT: Final = (
    "/v1/audio/",
    "/v1/batches",
    "/v1/chat/completions/batch",
    "/v1/classify",
    "/v1/embeddings",
    "/v1/files",
    "/v1/images/",
    "/v1/messages",
    "/v1/moderations",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
"""Paths that inference servers know and that this router does not offer: 501 instead of 404."""


class App:
    """The surface as one handler.

    `bytes_max` bounds a request body; `in_flight` counts requests being answered, lifelines aside: they never end.
    """

    def __init__(self, deps: ServingDeps) -> None:
        self.in_flight = 0
        self._drained: asyncio.Event | None = None
        self.bytes_max = deps.plane.config.serving.max_body_bytes
        self._replies = Replies(deps.plane)
        relay = Relay(deps, self._replies).handle
        info = Info(deps, self._replies)
        tokenize = Tokenizer(deps, self._replies).handle
        self._routes: dict[str, dict[str, Handler]] = {
            COMPLETIONS: {"POST": relay},
            CHAT: {"POST": relay},
            "/tokenize": {"POST": tokenize},
            "/v1/models": _reading(info.models),
            "/ready": _reading(info.ready),
            "/health": _reading(info.health),
            "/version": _reading(info.version),
            "/metrics": _reading(deps.metrics.handle),
            "/ha/lifeline": {"GET": deps.lifeline.handle},
        }
        self._model = info.model
        self.lifeline = deps.lifeline

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        methods = self._routes.get(request.path)
        if methods is None and request.path.startswith("/v1/models/"):
            methods = _reading(self._model)
        if methods is None:
            return self._unknown(request)
        handler = methods.get(request.method)
        if handler is None:
            return self._replies.error(not_allowed(request.method, request.path, ", ".join(methods)))
        if handler == self.lifeline.handle:
            return await handler(request)
        self.in_flight += 1
        try:
            return await handler(request)
        finally:
            self.in_flight -= 1
            if self._drained is not None and self.in_flight == 0:
                self._drained.set()

    async def drained(self) -> None:
        """Return when no request is being answered."""
        if self.in_flight > 0:
            self._drained = asyncio.Event()
            await self._drained.wait()

    def _unknown(self, request: web.BaseRequest) -> web.Response:
        path = request.path[:200]
        if path.startswith(NOT_SPLIT):
            return self._replies.error(invalid(f"{path} is not served here", status=501, code="not_supported"))
        return self._replies.error(invalid(f"there is no {path}", status=404, code="not_found"))


def build_app(deps: ServingDeps) -> App:
    """Return the surface; it must be served by `HttpServer`."""
    return App(deps)


def _reading(handler: Handler) -> dict[str, Handler]:
    return {"GET": handler, "HEAD": handler}
