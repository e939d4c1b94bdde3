"""The official OpenAI client, unmodified, gets what it expects of an OpenAI server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.serving.world import CHAT, COMPLETION, MODEL, World, until


async def test_a_completion_is_answered_over_both_legs(world: World) -> None:
    answer = await world.openai.completions.create(**COMPLETION)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert (world.requests("prefill"), world.requests("decode")) == (1, 1)
    assert sum(e.state.tickets_consumed for e in world.engines.values()) == 1


async def test_a_chat_is_answered_over_both_legs(world: World) -> None:
    answer = await world.openai.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content
    assert sum(e.state.tickets_consumed for e in world.engines.values()) == 1


async def test_the_streamed_text_equals_the_whole_one(world: World) -> None:
    whole = await world.openai.completions.create(**COMPLETION)
    stream = await world.openai.completions.create(**COMPLETION, stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert len(pieces) > 1


async def test_a_streamed_chat_ends_with_usage_when_it_is_asked_for(world: World) -> None:
    stream = await world.openai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


async def test_models_are_listed(world: World) -> None:
    assert [model.id async for model in world.openai.models.list()] == [MODEL]
    assert (await world.openai.models.retrieve(MODEL)).id == MODEL


async def test_an_unknown_model_is_not_found(world: World) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await world.openai.completions.create(**{**COMPLETION, "model": "nope"})
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert world.requests("prefill") == 0


async def test_no_eligible_engine_is_an_api_error_that_may_be_retried(world: World) -> None:
    world.eject("d1", "d2")
    with pytest.raises(openai.InternalServerError) as error:
        await world.openai.completions.create(**COMPLETION)
    assert error.value.status_code == 503
    assert "no eligible decode engine" in error.value.message
    assert error.value.response.headers["X-Narwhal-Not-Executed"] == "1"


async def test_many_clients_at_once_leave_nothing_in_flight(world: World) -> None:
    answers = await asyncio.gather(*(world.openai.chat.completions.create(**CHAT) for _ in range(40)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    await until(world.idle)
    assert world.failures() == []
