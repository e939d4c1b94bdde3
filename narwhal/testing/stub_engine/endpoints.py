"""What a vLLM server offers beside generation. Source: wire.md, 1.4 and 2.1."""

from __future__ import annotations

from uuid import uuid4

import orjson
from aiohttp import web

from narwhal.testing.stub_engine.answers import json_answer
from narwhal.testing.stub_engine.bodies import WireError, parse_job
from narwhal.testing.stub_engine.engine import VLLM_VERSION, StubEngine
from narwhal.testing.stub_engine.faults import FaultKind
from narwhal.testing.stub_engine.metrics import Exposition
from narwhal.testing.stub_engine.state import wall_s

_KV_CAPACITY_TOKENS = 1_000_000


class Endpoints:
    """Health, identity, metrics and token counting of one engine."""

    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; like FastAPI's they do not answer HEAD."""
        return [
            web.get("/health", self.health, allow_head=False),
            web.get("/ping", self.health, allow_head=False),
            web.post("/ping", self.health),
            web.get("/version", self.version, allow_head=False),
            web.get("/v1/models", self.models, allow_head=False),
            web.get("/metrics", self.metrics, allow_head=False),
            web.get("/load", self.load, allow_head=False),
            web.get("/is_paused", self.is_paused, allow_head=False),
            web.get("/kv_event_sources", self.kv_event_sources, allow_head=False),
            web.post("/tokenize", self.tokenize),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """Answer an empty 200, with the fencing floors in the headers."""
        return web.Response(headers=self._engine.fence.headers())

    async def version(self, _request: web.Request) -> web.Response:
        """Answer the version of vLLM that the stub imitates."""
        return json_answer({"version": VLLM_VERSION})

    async def models(self, _request: web.Request) -> web.Response:
        """Answer the card of the model; `created` is now at each call, as in vLLM."""
        created = int(wall_s())
        permission = {
            "id": f"modelperm-{uuid4().hex}", "object": "model_permission", "created": created,
            "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
            "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
            "organization": "*", "group": None, "is_blocking": False,
        }  # fmt: skip
        card = {
            "id": self._engine.model, "object": "model", "created": created, "owned_by": "vllm",
            "root": self._engine.model, "parent": None, "max_model_len": self._engine.settings.max_model_len,
            "permission": [permission],
        }  # fmt: skip
        return json_answer({"object": "list", "data": [card]})

    async def load(self, _request: web.Request) -> web.Response:
        """Answer 0, as vLLM does unless load tracking is on."""
        return json_answer({"server_load": 0})

    async def is_paused(self, _request: web.Request) -> web.Response:
        """Answer whether new requests wait."""
        return json_answer({"is_paused": self._engine.book.standing(FaultKind.PAUSED) is not None})

    async def kv_event_sources(self, _request: web.Request) -> web.Response:
        """Answer that there are none."""
        return json_answer({})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer the tokens of a prompt or of messages."""
        content = await request.read()
        try:
            chat = "messages" in orjson.loads(content)
        except (orjson.JSONDecodeError, TypeError):
            chat = False
        limit = self._engine.settings.max_model_len
        try:
            job = parse_job(content, chat=chat, request_id="", model=self._engine.model, max_model_len=1 << 62)
        except WireError as error:
            return json_answer(error.document, status=error.status)
        tokens = list(job.prompts[0].tokens)
        return json_answer({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    async def metrics(self, _request: web.Request) -> web.Response:
        """Answer the metrics that a router reads, in the Prometheus text format."""
        return web.Response(text=self._exposition(), content_type="text/plain", charset="utf-8")

    def _exposition(self) -> str:
        engine, state = self._engine, self._engine.state
        engine.sweep_tickets()
        resident = sum(state.resident.values())
        page = Exposition(model=engine.model)
        page.process_start(engine.generation.start_time)
        page.gauge("num_requests_running", max(0, resident - state.waiting))
        page.gauge("num_requests_waiting", state.waiting)
        page.gauge("kv_cache_usage_perc", min(1.0, engine.ledger.pinned_tokens / _KV_CAPACITY_TOKENS))
        page.counter("prompt_tokens", state.tokens_local + state.tokens_transferred)
        page.counter("generation_tokens", state.tokens_generated)
        page.counter("prompt_tokens_by_source", state.tokens_local, source="local_compute")
        page.counter("prompt_tokens_by_source", 0, source="local_cache_hit")
        page.counter("prompt_tokens_by_source", state.tokens_transferred, source="external_kv_transfer")
        page.counter("external_prefix_cache_hits", state.tokens_transferred)
        page.counter("nixl_num_failed_transfers", state.kv_load_failures)
        page.counter("nixl_num_failed_notifications", 0)
        page.counter("nixl_num_kv_expired_reqs", state.tickets_lapsed)
        return page.render()
