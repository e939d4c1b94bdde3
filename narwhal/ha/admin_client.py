"""The operator's side of the admin port: asks a router, and turns what it refuses into words.

The port itself, and who may use it, is in `serving/admin.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from narwhal.errors import NarwhalError


class AdminUnreachable(NarwhalError):
    """The admin port gave no answer that could be read."""


class AdminRefused(NarwhalError):
    """The admin port answered no. `owner` names the active router when that is who should have been asked."""

    def __init__(self, message: str, *, status: int, owner: str | None = None) -> None:
        self.status = status
        self.owner = owner
        super().__init__(message)


class AdminClient:
    """One router's admin port. Use it as an async context manager."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def status(self) -> dict[str, Any]:
        """Return the router's own status."""
        return await self._ask("GET", "/admin/status")

    async def engines(self) -> list[dict[str, Any]]:
        """Return every engine's place in the router's control plane."""
        answer = await self._ask("GET", "/admin/engines")
        return list(answer["engines"])

    async def engine(self, engine: str) -> dict[str, Any]:
        """Return one engine's place in the router's control plane."""
        return await self._ask("GET", f"/admin/engines/{quote(engine, safe='')}")

    async def act(self, action: str, engine: str, *, actor: str, reason: str) -> dict[str, Any]:
        """Have the router `drain` or `undrain` an engine; return the engine's place afterwards."""
        path = f"/admin/engines/{quote(engine, safe='')}/{action}"
        return await self._ask("POST", path, {"actor": actor, "reason": reason})

    async def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the answer's document. Raises AdminRefused for an answer above 399, AdminUnreachable for none."""
        try:
            async with self._session.request(
                method, self.url + path, json=body, allow_redirects=False, raise_for_status=False
            ) as answer:
                status, content = answer.status, await answer.read()
        except TimeoutError as error:
            raise AdminUnreachable(f"{self.url} gave no answer in time") from error
        except aiohttp.ClientError as error:
            raise AdminUnreachable(f"{self.url} gave no answer: {str(error) or type(error).__name__}") from error
        try:
            document: dict[str, Any] = json.loads(content)
            if status < 400:
                return dict(document)
            error_part = document["error"]
            raise AdminRefused(str(error_part["message"]), status=status, owner=error_part.get("owner"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdminUnreachable(
                f"{self.url}{path} answered {status} with something else than an admin port does; is the address right?"
            ) from error
