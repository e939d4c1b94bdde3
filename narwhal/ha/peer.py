"""Reads another router's /ready, once per call, and names the sign it gives.

A 503 only because no engine can serve is not a sign against the active: the standby would have the same engines.
Source: source, "Monitoring and readiness"; decisions 6 and 7.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from narwhal.core.vocabulary import FencingToken, PeerSign, RouterRole
from narwhal.ports import PeerLook

ANSWER_BYTES_MAX = 64 * 1024
DETAIL_CHARS_MAX = 200


class HttpRouterPeer:
    """`RouterPeer` over HTTP. Every look opens a fresh connection: a dead listener must not hide behind a kept one."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def look(self, url: str, *, timeout_s: float) -> PeerLook:
        """Return what `url`/ready says within `timeout_s`."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=8), trust_env=False
            )
        try:
            async with asyncio.timeout(timeout_s), self._session.get(f"{url}/ready", allow_redirects=False) as answer:
                return read_ready(answer.status, await _read_bounded(answer.content))
        except TimeoutError:
            return PeerLook(PeerSign.TIMEOUT, detail=f"no answer in {timeout_s:g} s")
        except aiohttp.ClientConnectionError as error:
            return PeerLook(PeerSign.REFUSED, detail=str(error) or type(error).__name__)
        except aiohttp.ClientError as error:
            return PeerLook(PeerSign.UNREADABLE, detail=str(error) or type(error).__name__)

    async def aclose(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()


async def _read_bounded(content: aiohttp.StreamReader) -> bytes:
    """Return the whole body; of one that is too long, enough to be no document any more."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > ANSWER_BYTES_MAX:
            break
    return bytes(body[:ANSWER_BYTES_MAX])


def read_ready(status: int, body: bytes) -> PeerLook:
    """Return the sign in one /ready answer."""
    try:
        document: dict[str, Any] = json.loads(body)
        role = RouterRole(document["role"])
        control_ready = document["control_ready"]
        reason = str(document.get("reason", ""))
        token = _token(document.get("fencing_token"))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return PeerLook(PeerSign.UNREADABLE, detail=f"status {status}: {str(error)[:DETAIL_CHARS_MAX]}")
    if status == 200:
        return PeerLook(PeerSign.READY, token, reason)
    if role in (RouterRole.FENCED, RouterRole.STANDBY):
        return PeerLook(PeerSign.FENCED, token, reason, term_over=document.get("term_over") is True)
    if status == 503 and control_ready is True:
        return PeerLook(PeerSign.NO_CAPACITY, token, reason)
    return PeerLook(PeerSign.DEGRADED, token, reason)


def _token(value: object) -> FencingToken | None:
    """Return the token in an answer; a router that never held the lease says 0 or null."""
    if value is None or value == 0:
        return None
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"fencing_token is no number above 0: {value!r}")
    return FencingToken(value)
