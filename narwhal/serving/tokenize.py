"""Token counting: passed through to one prefill engine on the data pool. It says nothing about engines."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from narwhal.core.faults import EngineFault
from narwhal.core.placement import choose_one
from narwhal.core.readiness import exhausted
from narwhal.core.vocabulary import Role
from narwhal.ports import EngineAddress, EngineRefusal, LegCall
from narwhal.serving.body import read_body
from narwhal.serving.deps import ServingDeps
from narwhal.serving.headers import REQUEST_ID, RequestIds
from narwhal.serving.openai import ApiError, check_model, read_object
from narwhal.serving.outcomes import Outcome, told, unavailable
from narwhal.serving.replies import Replies

TIMEOUT_S: Final = 30.0
PATH: Final = "/tokenize"


class Tokenizer:
    """POST /tokenize."""

    def __init__(self, deps: ServingDeps, replies: Replies) -> None:
        self._deps = deps
        self._replies = replies
        self._ids = RequestIds()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one token count."""
        request_id = self._ids.public(request.headers.get(REQUEST_ID))
        answer = await self._answer(request, request_id)
        if isinstance(answer, bytes):
            return self._replies.whole(answer, request_id)
        return self._replies.error(answer, request_id)

    async def _answer(self, request: web.BaseRequest, request_id: str) -> bytes | ApiError | EngineRefusal:
        plane, now = self._deps.plane, asyncio.get_running_loop().time()
        readiness = plane.readiness(now=now, lease_now=self._deps.clock())
        if not readiness.ready:
            return unavailable(readiness.reason, Outcome.NOT_READY, executed=False)
        raw = await read_body(request, plane.config.serving.max_body_bytes)
        if isinstance(raw, ApiError):
            return raw
        body = read_object(raw)
        if isinstance(body, ApiError):
            return body
        if (error := check_model(body, plane.config.serving.models)) is not None:
            return error
        engine = choose_one(plane.fleet, Role.PREFILL, now=now)
        if engine is None:
            return unavailable(exhausted((Role.PREFILL,)).reason, Outcome.NO_CAPACITY, executed=False)
        call = LegCall(PATH, body, raw, {REQUEST_ID: self._ids.internal(request_id)}, now + TIMEOUT_S)
        try:
            with self._deps.engines.reserve() as legs:
                answer = await legs.forward(EngineAddress(engine.id, engine.url), call, timeout_s=TIMEOUT_S)
        except EngineFault as fault:
            return told(fault, sent=False)[0]
        return answer if isinstance(answer, EngineRefusal) else answer.body
