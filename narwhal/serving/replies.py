"""Builds answers: every one names this router, and one that does not serve says who does and closes the connection.

A keep-alive connection would tie a client to a router that cannot help it. Source: decision 38.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from narwhal.core.control_plane import ControlPlane
from narwhal.ports import EngineRefusal
from narwhal.serving.headers import OWNER, REQUEST_ID, ROUTER
from narwhal.serving.openai import ApiError

JSON: Final = "application/json"


class Replies:
    """Answers of one router."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._router = plane.config.router.id

    def headers(self, request_id: str | None = None) -> dict[str, str]:
        """Return what every answer carries."""
        headers = {ROUTER: self._router}
        if request_id is not None:
            headers[REQUEST_ID] = request_id
        return headers

    def whole(self, body: bytes, request_id: str | None = None) -> web.Response:
        """Return a successful JSON answer."""
        headers = self.headers(request_id)
        headers["Content-Type"] = JSON
        return web.Response(body=body, headers=headers)

    def document(self, document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
        """Return `document` as JSON."""
        fields = {**self.headers(), "Content-Type": JSON, **(headers or {})}
        return self._closing(web.Response(body=orjson.dumps(document), status=status, headers=fields))

    def error(self, answer: ApiError | EngineRefusal, request_id: str | None = None) -> web.Response:
        """Return an error in OpenAI's shape, ours or an engine's."""
        headers = self.headers(request_id)
        headers["Content-Type"] = JSON
        if isinstance(answer, EngineRefusal):
            return web.Response(body=answer.body, status=answer.status, headers=headers)
        headers.update(answer.headers)
        return self._closing(web.Response(body=answer.body(), status=answer.status, headers=headers))

    def _closing(self, response: web.Response) -> web.Response:
        plane = self._plane
        if plane.serving and not plane.stopping:
            return response
        if plane.owner is not None:
            response.headers[OWNER] = plane.owner
        if response.status >= 400:
            response.force_close()
        return response
