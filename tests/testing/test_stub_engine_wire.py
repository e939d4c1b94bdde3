"""The stub speaks as vLLM 0.32 does: documents, frames, errors, headers, small endpoints."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from narwhal.testing.stub_engine import StubEngine
from tests.testing.wire import CHAT, COMPLETION, Engines, RawClient, path_of, post, stream, text_of, until

BODIES = [pytest.param(COMPLETION, id="completion"), pytest.param(CHAT, id="chat")]


async def test_a_whole_completion_has_every_key_of_vllm(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    status, document = await post(http, decode, COMPLETION, headers={"X-Request-Id": "my-req-1"})
    assert status == 200
    assert list(document) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert document["id"] == "cmpl-my-req-1"
    assert document["object"] == "text_completion"
    assert document["kv_transfer_params"] is None
    assert list(document["choices"][0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
        "prompt_token_ids", "routed_experts",
    ]  # fmt: skip
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"] == {
        "prompt_tokens": 7, "total_tokens": 13, "completion_tokens": 6,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip


async def test_a_whole_chat_answer_is_a_chat_completion(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    status, document = await post(http, decode, CHAT, headers={"X-Request-Id": "r"})
    assert (status, document["id"], document["object"]) == (200, "chatcmpl-r", "chat.completion")
    assert document["choices"][0]["message"]["role"] == "assistant"
    assert len(text_of(document).split()) == 6


async def test_without_a_request_id_each_answer_gets_its_own(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    ids = {(await post(http, decode, COMPLETION))[1]["id"] for _ in range(3)}
    assert len(ids) == 3


async def test_headers_are_those_of_uvicorn(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    async with http.post(decode.url + "/v1/completions", json=COMPLETION, headers={"X-Request-Id": "r"}) as answer:
        assert answer.headers["Server"] == "uvicorn"
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["Vary"] == "Origin"
        assert "Content-Length" in answer.headers
        assert "X-Request-Id" not in answer.headers


async def test_request_id_headers_are_sent_back_only_when_enabled(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start(request_id_headers=True)
    async with http.post(engine.url + "/v1/completions", json=COMPLETION, headers={"X-Request-Id": "r-7"}) as answer:
        assert answer.headers["X-Request-Id"] == "r-7"


@pytest.mark.parametrize("body", BODIES)
async def test_every_frame_is_one_http_chunk_without_event_lines(decode: StubEngine, body: dict[str, Any]) -> None:
    answer = await stream(decode, body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.terminated
    for chunk in answer.chunks:
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
        assert chunk.count(b"\n") == 2
    assert answer.chunks[-1] == b"data: [DONE]\n\n"


async def test_a_completion_stream_ends_with_finish_reason_and_done(decode: StubEngine) -> None:
    *frames, done = (await stream(decode, COMPLETION)).frames
    assert done == "[DONE]"
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None] * 5 + ["length"]
    assert all("usage" not in frame for frame in frames)
    assert ["system_fingerprint" in frame for frame in frames] == [False] * 5 + [True]


async def test_a_chat_stream_starts_with_the_role_and_no_content(decode: StubEngine) -> None:
    first, *frames = (await stream(decode, CHAT)).frames
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert [frame["choices"][0]["delta"].keys() for frame in frames[:-1]] == [{"content"}] * 6


@pytest.mark.parametrize("body", BODIES)
async def test_usage_comes_before_done_only_when_asked_for(decode: StubEngine, body: dict[str, Any]) -> None:
    asked = (await stream(decode, {**body, "stream_options": {"include_usage": True}})).frames
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 6
    assert asked[-2]["usage"].keys() == {"prompt_tokens", "total_tokens", "completion_tokens"}
    assert all("usage" not in frame for frame in asked[:-2])
    assert all("usage" not in frame for frame in (await stream(decode, body)).frames if isinstance(frame, dict))


async def test_continuous_usage_is_in_each_frame(decode: StubEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = (await stream(decode, {**COMPLETION, "stream_options": options})).frames
    assert [frame["usage"]["completion_tokens"] for frame in frames[:-1]] == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("body", BODIES)
async def test_streamed_and_whole_text_are_the_same_on_every_engine(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine, body: dict[str, Any]
) -> None:
    texts = {text_of((await post(http, engine, body))[1]) for engine in (prefill, decode)}
    texts.add((await stream(decode, body)).text)
    assert len(texts) == 1
    _, other = await post(http, decode, {**body, "max_tokens": 7})
    assert text_of(other).startswith(texts.pop())


async def test_another_prompt_has_another_answer(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, one = await post(http, decode, COMPLETION)
    _, two = await post(http, decode, {**COMPLETION, "prompt": "the tusk of the whale points south"})
    assert text_of(one) != text_of(two)


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"cache_salt": "s"},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_whatever_changes_the_rendered_prompt_changes_the_answer(
    http: aiohttp.ClientSession, decode: StubEngine, change: dict[str, Any]
) -> None:
    _, plain = await post(http, decode, CHAT)
    _, changed = await post(http, decode, {**CHAT, **change})
    assert text_of(plain) != text_of(changed)


async def test_chat_without_a_limit_stops_by_itself(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, document = await post(http, decode, {"messages": CHAT["messages"]})
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 24


async def test_max_completion_tokens_beats_max_tokens_on_chat(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, document = await post(http, decode, {**CHAT, "max_tokens": 1, "max_completion_tokens": 7})
    assert document["usage"]["completion_tokens"] == 7


async def test_completions_make_sixteen_tokens_by_default(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, document = await post(http, decode, {"prompt": "hello"})
    assert document["usage"]["completion_tokens"] == 16


async def test_n_gives_so_many_different_choices(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, document = await post(http, decode, {**COMPLETION, "n": 3})
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in document["choices"]}) == 3
    assert (await stream(decode, {**COMPLETION, "n": 3})).finish_reasons == ["length"] * 3


async def test_a_list_of_prompts_gives_a_choice_for_each(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, document = await post(http, decode, {"prompt": ["one", "two"], "max_tokens": 2})
    assert len(document["choices"]) == 2
    _, document = await post(http, decode, {"prompt": [[1, 2], [3]], "max_tokens": 2})
    assert document["usage"]["prompt_tokens"] == 3


async def test_token_ids_come_back_when_asked_for(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    _, completion = await post(http, decode, {"prompt": [5, 6], "return_token_ids": True})
    assert completion["choices"][0]["prompt_token_ids"] == [5, 6]
    _, chat = await post(http, decode, {**CHAT, "return_token_ids": True})
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]


SEMANTIC: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"max_tokens": 1, "min_tokens": 5}, "min_tokens must be less than or equal to max_tokens=1, got 5."),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream=True"),
    ({"n": 0}, "n must be at least 1"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 90_000}, "is too large"),
    ({"prompt": "word " * 40_000}, "maximum context length is 32768"),
    ({"prompt": ""}, "cannot be empty"),
    ({"prompt": []}, "must be provided"),
    ({"kv_transfer_params": {"prompt_token_ids": []}}, "prompt_token_ids"),
]


@pytest.mark.parametrize(("change", "words"), SEMANTIC, ids=[str(sorted(change)) for change, _ in SEMANTIC])
async def test_contradictions_are_400_bad_request_error(
    http: aiohttp.ClientSession, decode: StubEngine, change: dict[str, Any], words: str
) -> None:
    status, document = await post(http, decode, {**COMPLETION, **change})
    assert status == 400
    assert document["error"].keys() == {"message", "type", "param", "code"}
    assert (document["error"]["type"], document["error"]["code"]) == ("BadRequestError", 400)
    assert words in document["error"]["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": []}, "tools"),
        ({"messages": []}, "message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_chat_contradictions_are_400_bad_request_error(
    http: aiohttp.ClientSession, decode: StubEngine, change: dict[str, Any], words: str
) -> None:
    status, document = await post(http, decode, {**CHAT, **change})
    assert (status, document["error"]["type"]) == (400, "BadRequestError")
    assert words in document["error"]["message"]


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b'{"prompt": 3}', "application/json"),
        (b'{"prompt": "a", "max_tokens": "many"}', "application/json"),
        (b'{"prompt": "a", "kv_transfer_params": "ticket"}', "application/json"),
        (b"[]", "application/json"),
        (b'{"prompt": "a"}', "text/plain"),
    ],
)
async def test_unreadable_bodies_are_400_bad_request_with_a_space(
    http: aiohttp.ClientSession, decode: StubEngine, content: bytes, content_type: str
) -> None:
    headers = {"Content-Type": content_type}
    async with http.post(decode.url + "/v1/completions", data=content, headers=headers) as answer:
        document = json.loads(await answer.read())
    assert answer.status == 400
    assert document["error"]["type"] == "Bad Request"
    assert "validation error" in document["error"]["message"]


async def test_missing_messages_are_a_validation_error(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    async with http.post(decode.url + "/v1/chat/completions", json={"model": "stub-model"}) as answer:
        document = json.loads(await answer.read())
    assert (answer.status, document["error"]["type"]) == (400, "Bad Request")
    assert "'messages'" in document["error"]["message"]


async def test_an_unknown_model_is_404_not_found_error(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    status, document = await post(http, decode, {**COMPLETION, "model": "nope"})
    assert status == 404
    assert document == {
        "error": {
            "message": "The model `nope` does not exist. Valid aliases: stub-model.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


async def test_unknown_paths_and_methods_have_the_other_error_shape(
    http: aiohttp.ClientSession, decode: StubEngine
) -> None:
    async with http.get(decode.url + "/v1/nothing") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
    async with http.get(decode.url + "/v1/completions") as answer:
        assert (answer.status, await answer.json()) == (405, {"detail": "Method Not Allowed"})
        assert answer.headers["Allow"] == "POST"


async def test_a_wrong_key_is_401_with_a_string_for_an_error(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start(api_key="secret")
    status, document = await post(http, engine, COMPLETION)
    assert (status, document) == (401, {"error": "Unauthorized"})
    status, _ = await post(http, engine, COMPLETION, headers={"Authorization": "Bearer secret"})
    assert status == 200
    async with http.get(engine.url + "/health") as answer:
        assert answer.status == 200


async def test_health_is_an_empty_200_that_does_not_know_head(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    async with http.get(decode.url + "/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
        assert "Content-Type" not in answer.headers
    async with http.head(decode.url + "/health") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET")


async def test_ping_answers_get_and_post(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    for method in ("GET", "POST"):
        async with http.request(method, decode.url + "/ping") as answer:
            assert answer.status == 200


async def test_small_endpoints_answer_as_vllm_does(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    expected = {"/version": {"version": "0.32.0"}, "/load": {"server_load": 0}, "/kv_event_sources": {}}
    for path, document in expected.items():
        async with http.get(decode.url + path) as answer:
            assert await answer.json() == document


async def test_models_describes_the_one_model(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    async with http.get(decode.url + "/v1/models") as answer:
        document = await answer.json()
    assert document["object"] == "list"
    (card,) = document["data"]
    assert card["id"] == card["root"] == "stub-model"
    assert (card["parent"], card["max_model_len"], card["owned_by"]) == (None, 32_768, "vllm")
    assert isinstance(card["permission"], list)


async def test_tokenize_counts_prompts_and_messages(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    for body in (COMPLETION, CHAT):
        async with http.post(decode.url + "/tokenize", json=body) as answer:
            document = await answer.json()
        _, answered = await post(http, decode, body)
        assert document["count"] == len(document["tokens"]) == answered["usage"]["prompt_tokens"]
        assert document["max_model_len"] == 32_768
    async with http.post(decode.url + "/tokenize", data=b"nonsense") as answer:
        assert answer.status == 400


async def test_metrics_show_load_process_and_source_of_tokens(
    http: aiohttp.ClientSession, engines: Engines, decode: StubEngine
) -> None:
    slow = await engines.start(itl_ms=10_000)
    client = await RawClient.post(slow, {**COMPLETION, "stream": True})
    await until(lambda: slow.state.resident["decode"] == 1)
    lines = await _metrics(http, slow)
    await client.close()
    assert lines['vllm:num_requests_running{engine="0",model_name="stub-model"}'] == 1
    assert lines['vllm:num_requests_waiting{engine="0",model_name="stub-model"}'] == 0
    source = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="stub-model",source="local_compute"}'
    assert lines[source] == 7
    assert lines["process_start_time_seconds"] == pytest.approx(slow.generation.start_time, abs=0.01)
    assert 'vllm:nixl_num_failed_transfers_total{engine="0",model_name="stub-model"}' in lines
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="stub-model"}' in lines


async def _metrics(http: aiohttp.ClientSession, engine: StubEngine) -> dict[str, float]:
    async with http.get(engine.url + "/metrics") as answer:
        text = await answer.text()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def test_a_client_that_hangs_up_is_counted_and_leaves_nothing(decode: StubEngine, engines: Engines) -> None:
    engine = await engines.start(itl_ms=20)
    client = await RawClient.post(engine, {**COMPLETION, "max_tokens": 1000, "stream": True})
    await client.read_chunk()
    await client.close()
    await until(lambda: engine.state.aborted["decode"] == 1)
    assert engine.state.resident["decode"] == 0
    assert engine.state.finished["decode"] == 0


async def test_a_client_that_hangs_up_on_a_whole_answer_is_counted(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start(prefill_ms=30_000)
    timeout = aiohttp.ClientTimeout(total=0.1)
    with pytest.raises(TimeoutError):
        await post(http, engine, COMPLETION, timeout=timeout)
    await until(lambda: engine.state.aborted["decode"] == 1)


async def test_what_reached_the_engine_can_be_looked_at(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    await post(http, decode, COMPLETION, headers={"Authorization": "Bearer x", "X-Request-Id": "seen"})
    async with http.get(decode.url + "/stub/requests") as answer:
        (seen,) = await answer.json()
    assert (seen["leg"], seen["path"], seen["body"]) == ("decode", path_of(COMPLETION), COMPLETION)
    assert seen["headers"]["x-request-id"] == "seen"
    async with http.get(decode.url + "/stub/state") as answer:
        state = await answer.json()
    assert state["counters"]["authorization_seen"] == 1
    assert state["counters"]["requests"] == {"decode": 1}


async def test_two_hundred_paced_streams_run_side_by_side(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start(itl_ms=50)
    answers = await asyncio.gather(*(stream(engine, {**COMPLETION, "max_tokens": 10}) for _ in range(200)))
    assert all(answer.finish_reasons == ["length"] for answer in answers)
    assert engine.state.finished["decode"] == 200
