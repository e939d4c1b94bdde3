"""One generation request from first to last byte: the prefill leg with its ticket, the decode leg with its KV."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import orjson
from aiohttp import web

from narwhal.testing.stub_engine.answers import ENGINE_DEAD, INTERNAL_ERROR, error_document, json_answer, whole_answer
from narwhal.testing.stub_engine.bodies import Job, WireError, check_content_type, parse_job
from narwhal.testing.stub_engine.engine import StubEngine
from narwhal.testing.stub_engine.faults import FaultKind, FaultLeg
from narwhal.testing.stub_engine.schedule import Plan
from narwhal.testing.stub_engine.state import Residence, wall_s
from narwhal.testing.stub_engine.streaming import TokenStream
from narwhal.testing.stub_engine.text import corrupted, words_for
from narwhal.testing.stub_engine.tickets import KvOutcome, Scrutiny, scrutinise, ticket_params
from narwhal.testing.stub_engine.trouble import meet, never, sever

_BODY_KEPT_MAX_BYTES: Final = 65_536


class KvLoadFailed(Exception):
    """The KV of a ticket could not be loaded; the message is what the client is told."""


async def answer_generation(engine: StubEngine, request: web.Request, *, chat: bool) -> web.StreamResponse:
    """Answer one request to /v1/completions or /v1/chat/completions."""
    content = await request.read()
    body = _peek(content)
    leg = _leg_of(body, engine)
    engine.state.note(leg, request.path, request.headers.copy(), body if len(content) <= _BODY_KEPT_MAX_BYTES else None)
    with engine.state.residing(leg) as residence:
        try:
            engine.fence.check(request.headers)
            plan = engine.book.draw(leg)
            early = await meet(engine, request, plan, residence)
            if early is not None:
                return early
            await engine.until_resumed()
            check_content_type(request.content_type)
            job = parse_job(
                content,
                chat=chat,
                request_id=request.headers.get("X-Request-Id") or uuid4().hex,
                model=engine.model,
                max_model_len=engine.settings.max_model_len,
            )
            return await _Generation(engine, request, job, plan, residence).answer()
        except WireError as error:
            return json_answer(error.document, status=error.status)


def _peek(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


def _leg_of(body: Any, engine: StubEngine) -> FaultLeg:
    params = body.get("kv_transfer_params") if isinstance(body, dict) else None
    if not isinstance(body, dict):
        return FaultLeg(engine.settings.role)
    return FaultLeg.PREFILL if isinstance(params, dict) and params.get("do_remote_decode") else FaultLeg.DECODE


class _Generation:
    """The work of one accepted request."""

    def __init__(self, engine: StubEngine, request: web.Request, job: Job, plan: Plan, residence: Residence) -> None:
        self._engine = engine
        self._request = request
        self._job = job
        self._plan = plan
        self._residence = residence
        slow = plan.get(FaultKind.SLOW)
        self._itl_s = (engine.settings.itl_ms if slow is None else slow.itl_ms) / 1000

    async def answer(self) -> web.StreamResponse:
        """Return the answer, streamed or whole."""
        if broken := self._plan.get(FaultKind.BAD_200):
            return web.Response(body=_BAD_BODIES[broken.variant], content_type="application/json")
        if self._job.stream:
            return await self._stream()
        try:
            return await self._whole()
        except KvLoadFailed as error:
            return json_answer(error_document(str(error)), status=500)

    async def _whole(self) -> web.StreamResponse:
        words = await self._words()
        for kind in (FaultKind.NO_FIRST_TOKEN, FaultKind.SILENCE):
            await self._plan.until_lifted(kind)
        await asyncio.sleep(self._itl_s * (self._job.max_tokens - 1))
        if self._plan.get(FaultKind.ERROR_FRAME):
            raise KvLoadFailed(INTERNAL_ERROR)
        self._engine.state.tokens_generated += len(words) * self._job.max_tokens
        document = whole_answer(
            self._job,
            ["".join(islice(choice, self._job.max_tokens)) for choice in words],
            model=self._engine.model,
            created=int(wall_s()),
            fingerprint=self._engine.fingerprint,
            finish_reason=None if self._plan.get(FaultKind.NO_FINISH) else self._job.finish_reason,
        )
        if self._job.ticket.get("do_remote_decode"):
            self._put_ticket(document)
        if self._plan.get(FaultKind.CUT):
            await self._cut(orjson.dumps(document))
        return json_answer(document, headers=self._headers())

    async def _cut(self, content: bytes) -> None:
        """Send half of `content` under a length that promises all of it."""
        response = web.StreamResponse(headers={"Content-Length": str(len(content)), "Content-Type": "application/json"})
        await response.prepare(self._request)
        await response.write(content[: len(content) // 2])
        await sever(self._request, self._residence, with_reset=False)

    async def _stream(self) -> web.StreamResponse:
        stream = TokenStream(self._engine, self._request, self._job, self._plan, self._residence)
        await stream.open(self._headers())
        try:
            words = await self._words()
        except KvLoadFailed as error:
            return await stream.fail(str(error))
        return await stream.run(words, itl_s=self._itl_s)

    def _headers(self) -> dict[str, str]:
        if not self._engine.settings.request_id_headers:
            return {}
        return {"X-Request-Id": self._job.request_id.partition("-")[2]}

    async def _words(self) -> list[Iterator[str]]:
        """Return the tokens of each choice, once their KV is there. Raises KvLoadFailed."""
        digests = [prompt.digest for prompt in self._job.prompts]
        if self._job.ticket.get("do_remote_prefill"):
            digests[0] = await self._fetch_kv()
        else:
            self._engine.state.tokens_local += self._job.prompt_tokens
            self._engine.state.decode_alone += not self._job.ticket.get("do_remote_decode")
            await asyncio.sleep(self._engine.settings.prefill_ms / 1000)
        return [words_for(digest, choice) for digest in digests for choice in range(self._job.n)]

    async def _fetch_kv(self) -> str:
        """Return the identity of the prompt whose KV the ticket led to. Raises KvLoadFailed."""
        state = self._engine.state
        prompt = self._job.prompts[0]
        await self._refuse_malformed(len(prompt.tokens))
        found = await self._engine.fetcher.fetch(self._job.ticket, prompt)
        match found.outcome:
            case KvOutcome.UNREACHABLE | KvOutcome.WRONG_ENGINE:
                state.kv_load_failures += 1
                raise KvLoadFailed(INTERNAL_ERROR)
            case KvOutcome.REUSED:
                state.tickets_reused += 1
            case KvOutcome.EXPIRED:
                state.tickets_expired += 1
            case KvOutcome.UNKNOWN:
                state.tickets_unknown += 1
            case KvOutcome.FRESH if found.digest != prompt.digest:
                state.tickets_mismatched += 1
            case KvOutcome.FRESH:
                state.tickets_consumed += 1
                state.tokens_transferred += found.tokens
                return prompt.digest
        return corrupted(prompt.digest)

    async def _refuse_malformed(self, prompt_tokens: int) -> None:
        """Do to a ticket of bad shape what a real engine does; without strict death, only say so."""
        state = self._engine.state
        strict = self._engine.settings.strict_death
        match scrutinise(self._job.ticket, prompt_tokens):
            case Scrutiny.GOOD:
                return
            case Scrutiny.SHORT:
                state.tickets_mismatched += 1
                await never()
            case Scrutiny.PARKED if strict:
                state.tickets_malformed += 1
                try:
                    await never()
                finally:
                    self._engine.die()
            case Scrutiny.FATAL | Scrutiny.PARKED:
                state.tickets_malformed += 1
                if strict:
                    self._engine.die()
                raise KvLoadFailed(ENGINE_DEAD)

    def _put_ticket(self, document: dict[str, Any]) -> None:
        """Issue a ticket for the first prompt into `document`, or what a fault makes of it."""
        prompt = self._job.prompts[0]
        prefix = "1_" if self._job.n > 1 else ""
        remote_request_id = f"{prefix}{self._job.request_id}-{uuid4().hex[:8]}"
        self._engine.ledger.issue(remote_request_id, prompt)
        self._engine.state.tickets_issued += 1
        stub_url = self._engine.url_for(self._request)
        params = ticket_params(
            prompt=prompt,
            engine_id=self._engine.generation.engine_id,
            remote_request_id=remote_request_id,
            host=urlsplit(stub_url).hostname or "",
            stub_url=stub_url,
        )
        if self._plan.get(FaultKind.STALE_TICKET):
            params["remote_engine_id"] = str(uuid4())
        document["kv_transfer_params"] = params
        if bad := self._plan.get(FaultKind.BAD_TICKET):
            _spoil(document, bad.variant)


def _spoil(document: dict[str, Any], variant: str) -> None:
    params = document["kv_transfer_params"]
    match variant:
        case "absent":
            del document["kv_transfer_params"]
        case "null":
            document["kv_transfer_params"] = None
        case "not_a_dict":
            document["kv_transfer_params"] = "ticket"
        case "missing_key":
            del params["remote_request_id"]
        case "empty_blocks":
            params["remote_block_ids"] = []
        case "empty_group":
            params["remote_block_ids"] = [[]]
        case _:
            raise AssertionError(f"unknown variant {variant}")


_BAD_BODIES: Final[dict[str, bytes]] = {
    "error": orjson.dumps(error_document("The server had an error while processing your request.")),
    "null_choices": b'{"id":"cmpl-stub","object":"text_completion","model":"stub-model","choices":null}',
    "not_json": b"<html>Bad Gateway</html>",
    "empty": b"",
}
