"""The operator's door: status, engines, drains. On a port of its own, loopback by default.

An action is applied by the active only, written to the handoff before it is acknowledged, and idempotent; a standby
answers who is active. With a token configured every call must bear it.
Source: source, "Readmission and drains"; decision 19.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine
from narwhal.core.events import DrainCancelled, DrainOrdered, FleetEvent
from narwhal.core.vocabulary import EngineId
from narwhal.errors import NarwhalError
from narwhal.ports import Clock
from narwhal.serving.status import engine_status, router_status

log = structlog.get_logger()

BODY_BYTES_MAX = 64 * 1024
WORDS_MAX = 200


@dataclass(frozen=True, slots=True)
class AdminDeps:
    """What the admin endpoints work with. `persist` writes the handoff; `health` is the monitor's view."""

    plane: ControlPlane
    report: Callable[[FleetEvent], None]
    persist: Callable[[], Awaitable[None]]
    health: Callable[[], Mapping[EngineId, bool | None]]
    clock: Clock
    metrics: Callable[[web.Request], Awaitable[web.StreamResponse]]
    token: str | None = None


def build_admin_app(deps: AdminDeps) -> web.Application:
    """Return the application of the admin port."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_json, _bearer(deps.token)])
    admin = Admin(deps)
    app.router.add_get("/admin/status", admin.status)
    app.router.add_get("/admin/engines", admin.engines)
    app.router.add_get("/admin/engines/{engine}", admin.engine)
    app.router.add_post("/admin/engines/{engine}/drain", admin.drain)
    app.router.add_post("/admin/engines/{engine}/undrain", admin.undrain)
    app.router.add_get("/metrics", deps.metrics)
    return app


class Admin:
    """The handlers."""

    def __init__(self, deps: AdminDeps) -> None:
        self._deps = deps

    async def status(self, request: web.Request) -> web.Response:
        """Answer this router's own status."""
        return web.json_response(
            router_status(self._deps.plane, now=_now(), lease_now=self._deps.clock()), dumps=_dumps
        )

    async def engines(self, request: web.Request) -> web.Response:
        """Answer every engine's place in the control plane."""
        plane = self._deps.plane
        return web.json_response(
            {"engines": [self._describe(engine) for engine in plane.fleet.engines.values()]}, dumps=_dumps
        )

    async def engine(self, request: web.Request) -> web.Response:
        """Answer one engine's place in the control plane."""
        return web.json_response(self._describe(self._named(request)), dumps=_dumps)

    async def drain(self, request: web.Request) -> web.Response:
        """Take an engine out of placement; resident work goes on."""
        engine = self._named(request)
        actor, reason = await self._signed(request)
        return await self._act(engine, DrainOrdered(engine.id, actor, reason), "drain")

    async def undrain(self, request: web.Request) -> web.Response:
        """Put a drained engine back into placement."""
        engine = self._named(request)
        actor, reason = await self._signed(request)
        return await self._act(engine, DrainCancelled(engine.id, actor, reason), "undrain")

    async def _act(self, engine: Engine, event: DrainOrdered | DrainCancelled, action: str) -> web.Response:
        self._only_active()
        self._deps.report(event)
        log.info("operator_acted", action=action, engine=engine.id, actor=event.actor, reason=event.reason)
        try:
            await self._deps.persist()
        except NarwhalError as error:
            raise _problem(
                web.HTTPServiceUnavailable,
                f"{action} of {engine.id} is in force here but not yet in the handoff: {error}",
            ) from error
        self._only_active()
        return web.json_response(self._describe(engine), dumps=_dumps)

    def _only_active(self) -> None:
        plane = self._deps.plane
        if plane.serving and plane.tenure.held(self._deps.clock()):
            return
        raise _problem(
            web.HTTPConflict,
            f"{plane.config.router.id} is {plane.role}, not active; ask {plane.owner or 'the active router'}",
            owner=plane.owner,
        )

    def _named(self, request: web.Request) -> Engine:
        name = EngineId(request.match_info["engine"])
        engines = self._deps.plane.fleet.engines
        if name not in engines:
            raise _problem(web.HTTPNotFound, f"there is no engine {name[:64]!r}; engines: {', '.join(engines)}")
        return engines[name]

    async def _signed(self, request: web.Request) -> tuple[str, str]:
        """Return actor and reason of an action; both may be left out, neither may be long or of another type."""
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else {}
            actor, reason = body.get("actor", "operator"), body.get("reason", "")
        except (ValueError, AttributeError) as error:
            raise _problem(web.HTTPBadRequest, f"the body must be a JSON object: {error}") from error
        for word, value in (("actor", actor), ("reason", reason)):
            if not isinstance(value, str) or len(value) > WORDS_MAX:
                raise _problem(web.HTTPBadRequest, f"{word} must be text of at most {WORDS_MAX} characters")
        return actor, reason

    def _describe(self, engine: Engine) -> dict[str, Any]:
        return engine_status(self._deps.plane, engine, self._deps.health(), now=_now())


def _bearer(token: str | None) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if token is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise _problem(web.HTTPUnauthorized, "this port asks for 'Authorization: Bearer <NARWHAL_ADMIN_TOKEN>'")
        return await handler(request)  # type: ignore[no-any-return]

    return check


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except web.HTTPException as error:
        if error.status < 400 or error.content_type == "application/json":
            raise
        message = f"{request.method} {request.path[:128]}: {error.reason}"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response({"error": {"message": message}}, status=error.status, headers=allow)


def _problem(kind: type[web.HTTPError], message: str, **facts: Any) -> web.HTTPError:
    return kind(text=json.dumps({"error": {"message": message, **facts}}), content_type="application/json")


def _dumps(document: Any) -> str:
    return json.dumps(document, indent=1)


def _now() -> float:
    return asyncio.get_running_loop().time()
