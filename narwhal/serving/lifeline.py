"""The lifeline: a connection that says which process this is, and then stays open for as long as it lives.

A standby holds one to the active. The kernel closes it when the process dies, however that comes; the router itself
closes it only after it has given its lease up. Source: ha.md, 2.8, rule C.
"""

from __future__ import annotations

import asyncio
import json

from aiohttp import web


class Lifeline:
    """Answers `GET /ha/lifeline`."""

    def __init__(self, *, router: str, incarnation: str) -> None:
        self._greeting = json.dumps({"router": router, "incarnation": incarnation}).encode() + b"\n"
        self._closing = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Say who lives here, then say nothing until `close`."""
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Cache-Control": "no-store"})
        await response.prepare(request)
        await response.write(self._greeting)
        await self._closing.wait()
        return response

    def close(self) -> None:
        """End every lifeline. The lease must have been given up before."""
        self._closing.set()
