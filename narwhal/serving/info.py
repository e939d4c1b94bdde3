"""What a router says of itself: readiness, health, version, models.

| `/ready` | 200 | 503, with `Retry-After` |
|---|---|---|
| plain | this router admits now | it does not; `reason` has the forms of `core/readiness` |
| `?role=warm` | it admits, or it is a standby that could take over | else |

The answer waits for nothing and nobody. Source: decisions 6, 34 and 40.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from narwhal import __version__
from narwhal.core.vocabulary import RouterRole
from narwhal.serving.deps import ServingDeps
from narwhal.serving.headers import RETRY_AFTER
from narwhal.serving.openai import invalid
from narwhal.serving.replies import Replies

FRESH: Final = {"Cache-Control": "no-store"}


class Info:
    """The reading endpoints."""

    def __init__(self, deps: ServingDeps, replies: Replies) -> None:
        self._deps = deps
        self._plane = deps.plane
        self._replies = replies

    async def ready(self, request: web.BaseRequest) -> web.Response:
        """Say whether this router serves; the same function decides about admission."""
        plane = self._plane
        answer = plane.readiness(now=asyncio.get_running_loop().time(), lease_now=self._deps.clock())
        warm = plane.role is RouterRole.STANDBY and plane.ineligible is None and answer.control_ready
        good = answer.ready or (warm and not plane.stopping and request.query.get("role") == "warm")
        document = {
            "status": "ready" if answer.ready else "not ready",
            "reason": answer.reason,
            "control_ready": answer.control_ready,
            "role": plane.role,
            "router": plane.config.router.id,
            "fencing_token": plane.tenure.token,
            "term_over": plane.tenure.over,
            "cluster": plane.config.ha.cluster,
            "warm": answer.ready or warm,
        }
        headers = FRESH if good else {**FRESH, RETRY_AFTER: "1"}
        return self._replies.document(document, status=200 if good else 503, headers=headers)

    async def health(self, request: web.BaseRequest) -> web.Response:
        """Say that the process lives and its loop turns, whatever its role."""
        return self._replies.document({"status": "alive"}, headers=FRESH)

    async def version(self, request: web.BaseRequest) -> web.Response:
        """Say which version this is."""
        return self._replies.document({"name": "narwhal", "version": __version__})

    async def models(self, request: web.BaseRequest) -> web.Response:
        """List the models that clients may ask for, with the engines' own facts about them where they are known."""
        return self._replies.document({"object": "list", "data": self._cards()})

    async def model(self, request: web.BaseRequest) -> web.Response:
        """Describe one model."""
        wanted = request.path.removeprefix("/v1/models/")
        for card in self._cards():
            if card["id"] == wanted:
                return self._replies.document(card)
        text = f"The model `{wanted[:100]}` does not exist."
        return self._replies.error(invalid(text, param="model", status=404, code="model_not_found"))

    def _cards(self) -> Sequence[Mapping[str, Any]]:
        known = {card.get("id"): card for card in self._deps.model_cards()}
        return [known.get(name) or _minimal_card(name) for name in self._plane.config.serving.models]


def _minimal_card(name: str) -> Mapping[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "narwhal"}
