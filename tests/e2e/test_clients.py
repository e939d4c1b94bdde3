"""The official OpenAI client works unmodified through the active router, and its errors have OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.running import RunningDemo, ask, narwhal

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(demo: RunningDemo) -> Iterator[OpenAI]:
    with demo.client() as client:
        yield client


def shape_of(error: APIStatusError) -> set[str]:
    """The keys of the error object in the answer's body."""
    return set(error.response.json()["error"])


OPENAI_SHAPE = {"message", "type", "param", "code"}


def test_chat_streams_token_by_token(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="stub", messages=HELLO, max_tokens=8, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 8
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_answers_whole_with_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="stub", messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_completions_stream(client: OpenAI) -> None:
    stream = client.completions.create(model="stub", prompt="The sea is", max_tokens=8, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_answer_whole(client: OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt="The sea is", max_tokens=8)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_stream_ends_with_usage_when_asked_for(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="stub", messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


def test_a_stream_has_no_usage_when_not_asked_for(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="stub", messages=HELLO, max_tokens=8, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_the_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stub"]


def test_the_answer_names_the_router(demo: RunningDemo, client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="stub", prompt="x", max_tokens=1)
    assert raw.headers["x-narwhal-router"] == demo.active().id


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.completions.create(model="gpt-none", prompt="x")
    assert shape_of(caught.value) >= OPENAI_SHAPE
    assert "gpt-none" in str(caught.value)


def test_a_malformed_body_is_a_bad_request(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.post("/completions", content=b'{"model": "stub", ', cast_to=object)
    assert shape_of(caught.value) >= OPENAI_SHAPE


def test_a_body_above_the_limit_is_refused_with_the_limit(demo: RunningDemo) -> None:
    with demo.client(timeout_s=30) as client, pytest.raises(APIStatusError) as caught:
        client.completions.create(model="stub", prompt="x" * (64 * 1024 * 1024 + 1))
    assert caught.value.status_code == 413
    assert shape_of(caught.value) >= OPENAI_SHAPE
    assert str(64 * 1024 * 1024) in str(caught.value)


def test_without_an_eligible_engine_clients_are_told_so_and_ready_says_it(demo: RunningDemo, client: OpenAI) -> None:
    for engine in ("decode-1", "decode-2"):
        assert narwhal("engines", "drain", engine, "--config", demo.config).returncode == 0
    with pytest.raises(InternalServerError) as caught:
        client.completions.create(model="stub", prompt="x")
    assert caught.value.status_code == 503
    assert shape_of(caught.value) >= OPENAI_SHAPE
    assert caught.value.response.headers["x-narwhal-not-executed"] == "1"
    assert demo.active().ready() == (503, "no eligible decode engine")


def test_a_standby_refuses_without_touching_an_engine_and_names_the_owner(demo: RunningDemo) -> None:
    active = demo.active()
    with demo.client(demo.other(active)) as client, pytest.raises(InternalServerError) as caught:
        client.completions.create(model="stub", prompt="x")
    headers = caught.value.response.headers
    assert caught.value.status_code == 503
    assert headers["x-narwhal-not-executed"] == "1"
    assert headers["x-narwhal-owner"] == active.id
    assert headers["connection"].lower() == "close"


def test_health_is_200_on_both_routers(demo: RunningDemo) -> None:
    assert [ask(f"{router.url}/health")[0] for router in demo.routers.values()] == [200, 200]
