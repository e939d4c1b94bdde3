"""One completion request from its head to its last byte.

Readiness is asked before the body is read, and again when it has come. Nothing of an answer is sent before the first
real token, so every failure up to there is a proper HTTP error. One attempt is made; saturation is reported.
Source: source, "Serving saturation and retries"; decisions 11, 20, 22, 23 and 38.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from aiohttp import web

from narwhal.core.counters import CounterName
from narwhal.core.engine import Engine
from narwhal.core.faults import EngineFault
from narwhal.core.placement import Exhausted, choose, choose_decode, choose_one
from narwhal.core.readiness import exhausted
from narwhal.core.vocabulary import Role
from narwhal.ports import EngineRefusal, Legs
from narwhal.serving.attempt import Attempt, Order
from narwhal.serving.body import read_body
from narwhal.serving.delivery import deliver
from narwhal.serving.deps import ServingDeps
from narwhal.serving.headers import REQUEST_ID, SHOULD_RETRY, RequestIds, Trace
from narwhal.serving.openai import ApiError, Completion, invalid, read_completion
from narwhal.serving.outcomes import Outcome, told, unavailable
from narwhal.serving.record import RequestRecord
from narwhal.serving.replies import Replies

STALE_ROUTER: Final = b"stale_router"
CLIENT_LEFT: Final = 499
"""nginx's status for a client that left before its answer; it appears in the log only."""


class Ended(NamedTuple):
    """A request that ended in an error: what the client is told, and how it is counted."""

    answer: ApiError | EngineRefusal
    outcome: Outcome


class Relay:
    """Serves completions, streaming and not."""

    def __init__(self, deps: ServingDeps, replies: Replies) -> None:
        self._deps = deps
        self._plane = deps.plane
        self._serving = deps.plane.config.serving
        self._replies = replies
        self._ids = RequestIds()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; its record is written however it ends."""
        loop = asyncio.get_running_loop()
        record = RequestRecord(self._ids.public(request.headers.get(REQUEST_ID)), request.path, loop.time())
        try:
            result = await self._answer(request, record)
            if not isinstance(result, Ended):
                return result
            answer, outcome = result
            record.ended(answer.status, outcome, answer.message if isinstance(answer, ApiError) else None)
            return self._replies.error(answer, record.request_id)
        except (asyncio.CancelledError, ConnectionError):
            record.ended(CLIENT_LEFT, Outcome.DISCONNECTED)
            raise
        finally:
            record.write(self._plane, self._deps.metrics, now=loop.time())

    async def _answer(self, request: web.BaseRequest, record: RequestRecord) -> web.StreamResponse | Ended:
        if (closed := self._closed()) is not None:
            return closed
        arrived = request.content.is_eof()
        completion = await self._read(request, record)
        if isinstance(completion, Ended):
            return completion
        if not arrived and (closed := self._closed()) is not None:
            return closed
        try:
            with self._deps.engines.reserve() as legs:
                order = self._admit(request, record, completion)
                placed = self._place(record, legs, order)
                if isinstance(placed, Ended):
                    return placed
                return await self._attempt(request, record, placed, order)
        except EngineFault as fault:
            error, outcome = told(fault, sent=False)
            return Ended(error, outcome)

    def _closed(self) -> Ended | None:
        """Return the refusal of every new request while this router does not admit, else None."""
        plane = self._plane
        answer = plane.readiness(now=asyncio.get_running_loop().time(), lease_now=self._deps.clock())
        if answer.ready:
            return None
        outcome = Outcome.NO_CAPACITY if answer.control_ready and plane.serving else Outcome.NOT_READY
        return Ended(unavailable(answer.reason, outcome, executed=False), outcome)

    async def _read(self, request: web.BaseRequest, record: RequestRecord) -> Completion | Ended:
        raw = await read_body(request, self._serving.max_body_bytes)
        if isinstance(raw, ApiError):
            return Ended(raw, Outcome.REJECTED)
        completion = read_completion(record.path, raw, self._serving.models)
        if isinstance(completion, ApiError):
            return Ended(completion, Outcome.REJECTED)
        record.model, record.stream, record.whole = completion.model, completion.stream, completion.whole
        if completion.whole is not None and self._serving.whole_requests == "refuse":
            text = f"this request cannot be split between prefill and decode engines: {completion.whole}"
            return Ended(invalid(text, status=501, code="not_supported"), Outcome.REJECTED)
        return completion

    def _admit(self, request: web.BaseRequest, record: RequestRecord, completion: Completion) -> Order:
        """Take the request in, under the term that holds now."""
        record.token = token = self._plane.tenure.token
        record.admitted_at = self._deps.clock()
        self._plane.counters.add(CounterName.REQUESTS_ADMITTED)
        return Order(
            completion,
            token,
            record.began_at + self._serving.request_timeout_s,
            self._ids.internal(record.request_id),
            Trace(request.headers),
        )

    def _place(self, record: RequestRecord, legs: Legs, order: Order) -> Attempt | Ended:
        fleet, now = self._plane.fleet, asyncio.get_running_loop().time()
        prefill: Engine | None = None
        if order.completion.whole is not None:
            decode = choose_one(fleet, Role.DECODE, now=now)
            missing: tuple[Role, ...] = (Role.DECODE,)
        else:
            pair = choose(fleet, now=now)
            if isinstance(pair, Exhausted):
                decode, missing = None, pair.roles
            else:
                prefill, decode = pair.prefill, pair.decode
        if decode is None:
            return Ended(
                unavailable(exhausted(missing).reason, Outcome.NO_CAPACITY, executed=False), Outcome.NO_CAPACITY
            )
        record.attempts += 1
        record.prefill, record.decode = prefill.id if prefill is not None else None, decode.id
        return Attempt(self._deps, legs, order, prefill=prefill, decode=decode)

    async def _attempt(
        self, request: web.BaseRequest, record: RequestRecord, attempt: Attempt, order: Order
    ) -> web.StreamResponse | Ended:
        try:
            refusal = await attempt.run_prefill()
            if refusal is not None:
                return self._refused(refusal)
            if (fenced := self._fenced(order)) is not None:
                return fenced
            if (gone := self._place_decode(record, attempt)) is not None:
                return gone
            return await self._decode(request, record, attempt)
        except EngineFault as fault:
            error, outcome = told(fault, sent=attempt.prefilled)
            return Ended(error, outcome)
        finally:
            if attempt.ticket is not None:
                self._deps.metrics.ticket_ended(attempt.ticket.fate, attempt.ticket.age_s)

    def _place_decode(self, record: RequestRecord, attempt: Attempt) -> Ended | None:
        """Choose the decode engine anew after a prefill leg; return the end of a request that has none any more.

        Meanwhile the first choice may have been drained, held or ejected, and everything that came during the prefill
        was promised to the same least loaded engine. A ticket is good for any decode engine.
        """
        if attempt.prefill is None:
            return None
        engine = choose_decode(self._plane.fleet, attempt.prefill, now=asyncio.get_running_loop().time())
        if engine is None:
            if attempt.ticket is not None:
                attempt.ticket.discard()
            reason = exhausted((Role.DECODE,)).reason
            return Ended(unavailable(reason, Outcome.NO_CAPACITY, executed=True), Outcome.NO_CAPACITY)
        attempt.decode, record.decode = engine, engine.id
        return None

    async def _decode(
        self, request: web.BaseRequest, record: RequestRecord, attempt: Attempt
    ) -> web.StreamResponse | Ended:
        with attempt.watch_decode() as watch:
            if record.stream:
                stream = await attempt.run_decode_stream()
                if not isinstance(stream, EngineRefusal):
                    try:
                        return await deliver(stream, request, self._replies.headers(record.request_id), record, watch)
                    finally:
                        stream.close()
                watch.refused()
                return self._refused(stream)
            answer = await attempt.run_decode()
            if isinstance(answer, EngineRefusal):
                watch.refused()
                return self._refused(answer)
            watch.succeeded()
        record.usage = answer.usage
        record.ended(200, Outcome.SERVED)
        return self._replies.whole(answer.body, record.request_id)

    def _fenced(self, order: Order) -> Ended | None:
        """Return the end of a request whose term is over between its legs, else None. Source: decision 23."""
        tenure = self._plane.tenure
        if tenure.token == order.token and tenure.held(self._deps.clock()):
            return None
        return Ended(unavailable("fenced between prefill and decode", Outcome.FENCED, executed=True), Outcome.FENCED)

    def _refused(self, refusal: EngineRefusal) -> Ended:
        """Pass an engine's refusal on, unless it concerns us and not the client."""
        if refusal.status == 409 and STALE_ROUTER in refusal.body:
            self._deps.on_stale_token()
            text = "an engine has seen a newer router than this one"
            return Ended(unavailable(text, Outcome.FENCED, executed=True), Outcome.FENCED)
        if refusal.status in (401, 403):
            text = f"the engine refused the router's own credentials ({refusal.status})"
            error = ApiError(502, text, "engine_error", "engine_credentials", headers={SHOULD_RETRY: "false"})
            return Ended(error, Outcome.FAILED)
        return Ended(refusal, Outcome.REFUSED_BY_ENGINE)
