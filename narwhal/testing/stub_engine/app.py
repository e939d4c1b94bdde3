"""The routes of a stub engine: what vLLM serves, and under /stub and /fence what only a stub has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from narwhal.testing.stub_engine import endpoints
from narwhal.testing.stub_engine.answers import json_answer
from narwhal.testing.stub_engine.engine import StubEngine
from narwhal.testing.stub_engine.faults import Fault, FaultKind, FaultLeg, FaultSpecError, fault_from_json
from narwhal.testing.stub_engine.generation import answer_generation
from narwhal.testing.stub_engine.state import Residence
from narwhal.testing.stub_engine.trouble import meet

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_BODY_MAX_BYTES = 1 << 30
_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
_OWN_PREFIXES = ("/stub/", "/fence")


def build_app(engine: StubEngine) -> web.Application:
    """Return the application that serves `engine`."""
    app = web.Application(client_max_size=_BODY_MAX_BYTES, middlewares=[_busy(engine), _wire_errors, _guard(engine)])
    app.on_response_prepare.append(_wire_headers)
    engine_routes = endpoints.Endpoints(engine)
    own = _OwnEndpoints(engine)

    async def completions(request: web.Request) -> web.StreamResponse:
        return await answer_generation(engine, request, chat=False)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await answer_generation(engine, request, chat=True)

    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat),
            *engine_routes.routes(),
            web.get("/stub/state", own.state, allow_head=False),
            web.get("/stub/requests", own.requests, allow_head=False),
            web.get("/stub/faults", own.faults, allow_head=False),
            web.post("/stub/faults", own.set_faults),
            web.delete("/stub/faults", own.clear_faults),
            web.post("/stub/restart", own.restart),
            web.get("/stub/ticket/{id}", own.ticket, allow_head=False),
            web.post("/fence", own.fence),
        ]
    )
    return app


def _busy(engine: StubEngine) -> Any:
    """Return the middleware that marks connections which wait for an answer."""

    @web.middleware
    async def busy(request: web.Request, handler: Handler) -> web.StreamResponse:
        with engine.busy(request.transport):
            return await handler(request)

    return busy


@web.middleware
async def _wire_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer unknown paths and methods as FastAPI does."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        headers = {"Allow": error.headers["Allow"]}
        return json_answer({"detail": "Method Not Allowed"}, status=405, headers=headers)
    except web.HTTPNotFound:
        return json_answer({"detail": "Not Found"}, status=404)


async def _wire_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "uvicorn"
    response.headers["Vary"] = "Origin"
    if response.headers.get("Content-Type") == "application/octet-stream":
        del response.headers["Content-Type"]


def _guard(engine: StubEngine) -> Any:
    """Return the middleware that asks for the key under /v1 and lets faults meet what is not generation."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if path.startswith(_OWN_PREFIXES):
            return await handler(request)
        key = engine.settings.api_key
        if key is not None and path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}":
            return json_answer({"error": "Unauthorized"}, status=401)
        if path in _GENERATION_PATHS and request.method == "POST":
            return await handler(request)
        leg = FaultLeg.HEALTH if path in ("/health", "/ping") else FaultLeg.INFO
        engine.state.note(leg, path, request.headers.copy())
        early = await meet(engine, request, engine.book.draw(leg), Residence())
        return await handler(request) if early is None else early

    return guard


class _OwnEndpoints:
    """Scripting, looking inside, and the side channel over which tickets are honoured."""

    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine

    async def state(self, _request: web.Request) -> web.Response:
        return json_answer(self._engine.describe())

    async def requests(self, _request: web.Request) -> web.Response:
        return json_answer([seen.describe() for seen in self._engine.state.seen])

    async def faults(self, _request: web.Request) -> web.Response:
        return json_answer(self._engine.describe_faults())

    async def set_faults(self, request: web.Request) -> web.Response:
        """Put exactly the posted faults in force: an object, a string, or a list of them."""
        try:
            faults = _posted_faults(await request.read())
        except FaultSpecError as error:
            return _complaint(str(error))
        await self._engine.set_faults(faults)
        return json_answer(self._engine.describe_faults())

    async def clear_faults(self, _request: web.Request) -> web.Response:
        await self._engine.set_faults()
        return json_answer([])

    async def restart(self, request: web.Request) -> web.Response:
        """Start a new generation; the answer comes from it, so the connection that asked is spared."""
        await self._engine.restart_generation(spare=request.transport)
        return json_answer(self._engine.describe())

    async def fence(self, request: web.Request) -> web.Response:
        """Raise the hard floor to the posted token."""
        try:
            token = orjson.loads(await request.read())["token"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            token = None
        if type(token) is not int or token < 0:
            return _complaint('post {"token": N} with the lowest fencing token that is still allowed')
        self._engine.fence.raise_hard(token)
        return json_answer(self._engine.fence.describe())

    async def ticket(self, request: web.Request) -> web.Response:
        """Hand out the KV of a ticket, once. A frozen engine does not answer here either."""
        frozen = self._engine.book.standing(FaultKind.HANG)
        if frozen is not None and frozen.fault.leg is FaultLeg.ANY:
            await frozen.lifted.wait()
        return json_answer(asdict(self._engine.honour(request.match_info["id"], request.query.get("engine_id", ""))))


def _posted_faults(content: bytes) -> list[Fault]:
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise FaultSpecError(f"the body must be JSON: one fault or a list of faults ({error})") from error
    return [fault_from_json(one) for one in (document if isinstance(document, list) else [document])]


def _complaint(message: str) -> web.Response:
    return json_answer(
        {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}, status=400
    )
