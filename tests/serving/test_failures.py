"""An engine fails on one leg: what the client is told, what is held against which engine, and what is left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from narwhal.core.events import LegFailed, LegRefused
from narwhal.core.vocabulary import FailureClass as F
from narwhal.core.vocabulary import Leg
from tests.serving.world import CHAT, COMPLETION, World, until

STREAMED = {**COMPLETION, "stream": True}


async def post(world: World, body: dict[str, Any], **headers: str) -> tuple[int, Any, dict[str, str]]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with world.http.post(path, json=body, headers=headers) as answer:
        text = await answer.text()
        document = json.loads(text) if answer.content_type == "application/json" else text
        return answer.status, document, {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize("body", [COMPLETION, STREAMED, {**CHAT, "stream": True}], ids=["whole", "stream", "chat"])
@pytest.mark.parametrize(
    ("role", "fault", "status", "code", "evidence"),
    [
        ("p", "prefill:status=500", 502, "engine_failed", F.INFERENCE_STATUS),
        ("p", "prefill:reset", 502, "engine_unreachable", F.CONNECTION),
        ("p", "prefill:bad_200=error", 502, "engine_failed", F.INFERENCE_STATUS),
        ("p", "prefill:bad_200=null_choices", 502, "engine_failed", F.INFERENCE_STATUS),
        ("p", "prefill:bad_ticket=null", 502, "kv_handoff_failed", F.KV_HANDOFF),
        ("p", "prefill:bad_ticket=absent", 502, "kv_handoff_failed", F.KV_HANDOFF),
        ("p", "prefill:bad_ticket=missing_key", 502, "kv_handoff_failed", F.KV_HANDOFF),
        ("p", "prefill:bad_ticket=empty_blocks", 502, "kv_handoff_failed", F.KV_HANDOFF),
        ("p", "prefill:bad_ticket=not_a_dict", 502, "kv_handoff_failed", F.KV_HANDOFF),
        ("p", "prefill:status=429", 503, "engine_overloaded", F.OVERLOAD),
        ("d", "decode:status=500", 502, "engine_failed", F.INFERENCE_STATUS),
        ("d", "decode:reset", 502, "engine_unreachable", F.CONNECTION),
        ("d", "decode:status=503,retry_after_s=3", 503, "engine_overloaded", F.OVERLOAD),
        ("d", "refuse", 502, "engine_unreachable", F.CONNECTION),
    ],
)
async def test_a_failure_before_the_first_token_is_an_http_error_and_evidence(
    world: World, body: dict[str, Any], role: str, fault: str, status: int, code: str, evidence: F
) -> None:
    await world.fault_all(role, fault)
    got, document, headers = await post(world, body)
    assert (got, document["error"]["code"]) == (status, code)
    leg = Leg.PREFILL if role == "p" else Leg.DECODE
    assert world.failures() == [(leg, evidence)]
    failed = next(event for event in world.events if isinstance(event, LegFailed))
    assert failed.partner is not None, "the other engine of the pair is remembered"
    assert "x-narwhal-not-executed" not in headers
    assert headers["x-narwhal-router"] == "router-a"
    if status == 503:
        assert int(headers["retry-after"]) >= 1
    else:
        assert headers["x-should-retry"] == "false"
    await until(world.idle)


async def test_a_prefill_engine_that_refuses_the_connection_leaves_the_request_untouched(world: World) -> None:
    await world.fault_all("p", "refuse")
    status, document, headers = await post(world, COMPLETION)
    assert (status, document["error"]["code"]) == (503, "engine_unreachable")
    assert headers["x-narwhal-not-executed"] == "1"
    assert world.failures() == [(Leg.PREFILL, F.CONNECTION)]


@pytest.mark.parametrize("role", ["p", "d"])
@pytest.mark.parametrize("body", [COMPLETION, STREAMED], ids=["whole", "stream"])
async def test_a_clients_mistake_found_by_an_engine_is_passed_on_and_is_no_failure(
    world: World, body: dict[str, Any], role: str
) -> None:
    leg = "prefill" if role == "p" else "decode"
    words = '{"error":{"message":"context_length exceeded","type":"BadRequestError","param":null,"code":400}}'
    await world.fault_all(role, f"{leg}:status=400,body={words}")
    status, document, headers = await post(world, body)
    assert (status, document) == (400, json.loads(words))
    assert headers["content-type"].startswith("application/json")
    assert world.failures() == []
    assert [event.leg for event in world.events if isinstance(event, LegRefused)] == [Leg(leg)]


async def test_an_engines_own_answer_about_credentials_is_not_blamed_on_the_client(empty_world: World) -> None:
    await empty_world.start(stub={"api_key": "engine secret"})
    status, document, _ = await post(empty_world, COMPLETION)
    assert (status, document["error"]["code"]) == (502, "engine_credentials")


async def test_a_kv_load_failure_before_the_first_token_is_an_http_error(world: World) -> None:
    await world.fault_all("d", "decode:error_frame=0")
    for body in (STREAMED, {**CHAT, "stream": True}):
        status, document, _ = await post(world, body)
        assert (status, document["error"]["code"]) == (502, "stream_broken")
    assert world.failures() == [(Leg.DECODE, F.STREAM)] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("decode:cut=3", "closed the connection"),
        ("decode:no_finish", "choices had finished"),
        ("decode:no_finish,done=false", "choices had finished"),
        ("decode:error_frame=3", ""),
        ("decode:silence=3", "fell silent"),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error_frame_and_no_marker(
    empty_world: World, fault: str, said: str
) -> None:
    world = empty_world
    await world.start(serving={"stream_silence_timeout_s": 0.3}, stub={"itl_ms": 5.0})
    await world.fault_all("d", fault)
    status, text, _ = await post(world, STREAMED)
    assert status == 200
    frames = [frame for frame in text.split("\n\n") if frame]
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert said in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "[DONE]" not in text
    assert '"finish_reason":"' not in text.replace(" ", "")
    assert len(frames) > 1
    assert world.failures() == [(Leg.DECODE, F.STREAM)]
    await until(world.idle)


async def test_the_openai_client_raises_on_a_broken_stream(world: World) -> None:
    await world.fault_all("d", "decode:cut=3")
    stream = await world.openai.completions.create(**STREAMED)
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(openai.APIError):
        await read()
    assert len(chunks) == 3


async def test_keep_alive_comments_for_ever_end_at_the_first_token_deadline(empty_world: World) -> None:
    world = empty_world
    await world.start(serving={"first_token_timeout_s": 0.4})
    await world.fault_all("d", "decode:no_first_token,keepalive_ms=30")
    status, document, headers = await post(world, STREAMED)
    assert (status, document["error"]["code"]) == (504, "engine_silent")
    assert headers["x-should-retry"] == "false"
    assert world.failures() == [(Leg.DECODE, F.STREAM)]
    await until(world.idle)


async def test_a_hanging_prefill_is_a_transport_timeout(empty_world: World) -> None:
    world = empty_world
    await world.start(serving={"prefill_timeout_s": 0.3})
    await world.fault_all("p", "prefill:hang")
    status, document, _ = await post(world, COMPLETION)
    assert (status, document["error"]["code"]) == (504, "engine_timeout")
    assert world.failures() == [(Leg.PREFILL, F.TIMEOUT)]
    await until(world.idle)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("body", [COMPLETION, STREAMED], ids=["whole", "stream"])
async def test_the_requests_own_deadline_is_no_evidence(empty_world: World, leg: str, body: dict[str, Any]) -> None:
    world = empty_world
    await world.start(serving={"request_timeout_s": 0.3})
    await world.fault_all(leg[0], f"{leg}:hang")
    status, document, _ = await post(world, body)
    assert (status, document["error"]["code"]) == (504, "request_timeout")
    assert world.failures() == []
    await until(world.idle)


async def test_nothing_pinned_sends_the_decode_without_a_ticket(world: World) -> None:
    await world.fault_all("p", "prefill:bad_ticket=empty_group")
    status, document, _ = await post(world, COMPLETION)
    assert status == 200
    assert document["choices"][0]["finish_reason"] == "length"
    assert [seen.body.get("kv_transfer_params") for seen in world.seen("decode")] == [None]
    assert world.failures() == []


async def test_one_attempt_is_made_and_no_more(world: World) -> None:
    await world.fault_all("d", "decode:status=429,retry_after_s=2")
    for _ in range(2):
        status, _, headers = await post(world, COMPLETION)
        assert (status, headers["retry-after"]) == (503, "2")
    assert (world.requests("prefill"), world.requests("decode")) == (2, 2)


async def test_a_restart_between_the_legs_drops_the_ticket(world: World) -> None:
    for name in ("p1", "p2"):
        world.plane.fleet.engines[name].generation = "before"  # type: ignore[index]
    await world.fault_all("p", "prefill:delay=200")
    asking = asyncio.ensure_future(post(world, COMPLETION))
    await until(lambda: world.requests("prefill") == 1)
    for name in ("p1", "p2"):
        world.plane.fleet.engines[name].generation = "after"  # type: ignore[index]
    status, document, _ = await asking
    assert (status, document["error"]["code"]) == (503, "kv_ticket_expired")
    assert world.requests("decode") == 0
