"""What a client may send: refused early, clearly and in OpenAI's shape, before any engine is troubled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.serving.raw import raw_client
from tests.serving.world import CHAT, COMPLETION, MODEL, World, capture_logs, finished, until

PATH = "/v1/completions"


async def post(world: World, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with world.http.post(path, data=data, headers=headers) as answer:
        return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}


def untouched(world: World) -> bool:
    return world.requests("prefill") == world.requests("decode") == 0 and world.events == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{oops", 400, None),
        (b"", 400, None),
        (b"[1]", 400, None),
        (b'"x"', 400, None),
        (b"\xff\xfe", 400, None),
        ({"prompt": "x"}, 400, "model"),
        ({"model": 7, "prompt": "x"}, 400, "model"),
        ({"model": "nope", "prompt": "x"}, 404, "model"),
        ({**COMPLETION, "stream": "true"}, 400, "stream"),
        ({**COMPLETION, "n": "2"}, 400, "n"),
        ({**COMPLETION, "n": 0}, 400, "n"),
        ({**COMPLETION, "n": True}, 400, "n"),
        ({**COMPLETION, "kv_transfer_params": {"remote_host": "evil"}}, 400, "kv_transfer_params"),
        ({**COMPLETION, "kv_transfer_params": None}, 400, "kv_transfer_params"),
        ({**COMPLETION, "ec_transfer_params": {}}, 400, "ec_transfer_params"),
        ({**COMPLETION, "bootstrap_host": "evil"}, 400, "bootstrap_host"),
        ({**COMPLETION, "bootstrap_room": 7}, 400, "bootstrap_room"),
        ({**COMPLETION, "disagg_prefill_dp_rank": 1}, 400, "disagg_prefill_dp_rank"),
        ({**COMPLETION, "vllm_xargs": {"kv_role": "x"}}, 400, "vllm_xargs"),
    ],
)
async def test_a_request_that_is_wrong_is_refused_before_any_engine_is_asked(
    world: World, body: Any, status: int, param: str | None
) -> None:
    for path in (PATH, "/v1/chat/completions"):
        got, document, headers = await post(world, path, body)
        assert (got, document["error"]["param"]) == (status, param)
        assert document["error"].keys() == {"message", "type", "param", "code"}
        assert headers["x-narwhal-router"] == "router-a"
    assert untouched(world)


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", PATH, 405, "POST"),
        ("DELETE", "/v1/chat/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/ready", 405, "GET, HEAD"),
        ("GET", "/tokenize", 405, "POST"),
        ("POST", "/v1/embeddings", 501, None),
        ("POST", "/v1/responses", 501, None),
        ("POST", "/v1/audio/transcriptions", 501, None),
        ("POST", "/v1/chat/completions/batch", 501, None),
        ("POST", "/v1/nonsense", 404, None),
        ("GET", "/", 404, None),
        ("GET", "/v1/models/nope", 404, None),
    ],
)
async def test_a_path_or_method_that_is_not_offered_is_said_so(
    world: World, method: str, path: str, status: int, allow: str | None
) -> None:
    async with world.http.request(method, path, data=b"{}" if method == "POST" else None) as answer:
        assert answer.status == status
        assert answer.headers.get("Allow") == allow
        assert (await answer.json())["error"].keys() == {"message", "type", "param", "code"}
        assert answer.headers["X-Narwhal-Router"] == "router-a"
    assert untouched(world)


async def test_eight_megabytes_pass(world: World) -> None:
    image = "data:image/png;base64," + "A" * 8_000_000
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}
    async with raw_client(world.url) as client:
        await client.post("/v1/chat/completions", {**CHAT, "messages": [message]})
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_refused_and_the_connection_stays_usable(
    empty_world: World, chunked: bool
) -> None:
    world = empty_world
    await world.start(serving={"max_body_bytes": 20_000})
    with capture_logs() as logs:
        async with raw_client(world.url) as client:
            content = json.dumps({**COMPLETION, "prompt": "x" * 50_000}).encode()
            if chunked:
                await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
                await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))
            else:
                await client.post(PATH, content)
            status, _, body = await client.answer()
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (413, "request_too_large")
            assert "20000" in error["message"]
            assert "serving.max_body_bytes" in error["message"]
            assert untouched(world)
            await client.post(PATH, COMPLETION)
            assert (await client.answer())[0] == 200
    assert [(line["status"], line["outcome"]) for line in finished(logs)] == [(413, "rejected"), (200, "served")]


async def test_a_client_that_waits_to_be_asked_is_asked_at_once(world: World) -> None:
    async with raw_client(world.url) as client:
        content = json.dumps({**COMPLETION, "prompt": "x" * 2_000_000}).encode()
        await client.head("POST", PATH, len(content), Expect="100-continue")
        async with asyncio.timeout(1):
            assert (await client.answer_head())[0] == 100
        await client.send(content)
        assert (await client.answer())[0] == 200


async def test_a_client_that_waits_with_too_much_is_told_before_it_sends(empty_world: World) -> None:
    await empty_world.start(serving={"max_body_bytes": 20_000})
    async with raw_client(empty_world.url) as client:
        await client.head("POST", PATH, 2_000_000, Expect="100-continue")
        async with asyncio.timeout(1):
            assert (await client.answer())[0] == 413


async def test_an_expectation_that_nobody_knows_is_refused(world: World) -> None:
    async with raw_client(world.url) as client:
        await client.head("POST", PATH, 10, Expect="200-ok")
        assert (await client.answer())[0] == 417


# What cannot be split.

WHOLE = [
    {"n": 2},
    {"best_of": 3, "n": 1},
    {"prompt": ["a", "b"]},
    {"prompt": [[1, 2], [3]]},
    {"prompt_logprobs": 0},
    {"use_beam_search": True},
    {"echo": True, "logprobs": 1},
]
SPLIT = [
    {"prompt": ["only one"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2, 3]]},
    {"n": 1, "best_of": 1},
    {"echo": True},
    {"logprobs": 2},
    {"use_beam_search": False, "prompt_logprobs": None},
]


@pytest.mark.parametrize("extra", WHOLE)
async def test_what_cannot_be_split_goes_whole_to_a_decode_engine(world: World, extra: dict[str, Any]) -> None:
    body = {**COMPLETION, **extra}
    status, _, _ = await post(world, PATH, body)
    assert status == 200
    assert world.requests("prefill") == 0
    assert [seen.body for seen in world.seen("decode")] == [body]
    assert world.seen("decode")[0].headers["X-Narwhal-Phase"] == "admit"


@pytest.mark.parametrize("extra", WHOLE)
async def test_what_cannot_be_split_is_refused_where_the_operator_wants_it(
    empty_world: World, extra: dict[str, Any]
) -> None:
    await empty_world.start(serving={"whole_requests": "refuse"})
    status, document, _ = await post(empty_world, PATH, {**COMPLETION, **extra})
    assert (status, document["error"]["code"]) == (501, "not_supported")
    assert untouched(empty_world)


@pytest.mark.parametrize("extra", SPLIT)
async def test_everything_else_is_split(world: World, extra: dict[str, Any]) -> None:
    assert (await post(world, PATH, {**COMPLETION, **extra}))[0] == 200
    assert (world.requests("prefill"), world.requests("decode")) == (1, 1)


@pytest.mark.parametrize("extra", [{"n": 3}, {"prompt": ["a", "b"], "n": 2}])
async def test_every_choice_of_a_whole_stream_must_finish(world: World, extra: dict[str, Any]) -> None:
    async with world.http.post(PATH, json={**COMPLETION, **extra, "stream": True}) as answer:
        assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert world.failures() == []
    await world.fault_all("d", "decode:no_finish")
    async with world.http.post(PATH, json={**COMPLETION, **extra, "stream": True}) as answer:
        assert "[DONE]" not in await answer.text()
    assert len(world.failures()) == 1


async def test_the_legs_keep_what_the_client_asked_for(world: World) -> None:
    body = {
        **CHAT,
        "max_completion_tokens": 7,
        "min_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "json_object"},
        "temperature": 0.10,
    }
    async with world.http.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()
    prefill, decode = world.seen("prefill")[0].body, world.seen("decode")[0].body
    assert (prefill["max_tokens"], prefill["max_completion_tokens"], prefill["stream"]) == (1, 1, False)
    assert prefill.keys().isdisjoint({"min_tokens", "stream_options"})
    for name in ("tools", "response_format", "messages", "model"):
        assert prefill[name] == body[name]
    assert decode.pop("kv_transfer_params")["do_remote_prefill"] is True
    assert decode == body


# Saturation.


async def test_a_full_data_pool_is_reported_and_no_engine_is_asked(empty_world: World) -> None:
    world = empty_world
    await world.start(serving={"max_connections": 1})
    await world.fault_all("p", "prefill:hang")
    first = asyncio.ensure_future(post(world, PATH, COMPLETION))
    await until(lambda: world.requests("prefill") == 1)
    status, document, headers = await post(world, PATH, COMPLETION)
    assert (status, document["error"]["code"]) == (503, "saturated")
    assert headers["x-narwhal-not-executed"] == "1"
    assert headers["retry-after"] == "1"
    assert world.failures() == []
    assert world.requests("prefill") == 1
    await world.fault_all("p")
    assert (await first)[0] == 200


# Token counting and models.


async def test_token_counting_passes_through(world: World) -> None:
    status, document, _ = await post(world, "/tokenize", {"model": MODEL, "prompt": "one two three"})
    assert (status, document["count"]) == (200, len(document["tokens"]))
    assert (await post(world, "/tokenize", {"model": "nope", "prompt": "x"}))[0] == 404
    assert (await post(world, "/tokenize", b"{"))[0] == 400
    await until(world.idle)


async def test_token_counting_that_fails_is_no_evidence(world: World) -> None:
    await world.fault_all("p", "info:status=500")
    assert (await post(world, "/tokenize", {"model": MODEL, "prompt": "x"}))[0] == 502
    assert world.failures() == []


async def test_model_cards_carry_what_the_engines_say(world: World) -> None:
    async with world.http.get("/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": MODEL, "object": "model", "created": 0, "owned_by": "narwhal"}]
    world.cards = [{"id": MODEL, "object": "model", "root": "org/model", "max_model_len": 1024}]
    async with world.http.get("/v1/models") as answer:
        assert (await answer.json())["data"] == world.cards
