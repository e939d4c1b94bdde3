"""The pair in front of real engines: the KV really moves, the text is the engine's own, and a takeover changes neither.

Source: source, "Warm standby and lease ownership" and "Failure evidence"; the engines' metrics are the witnesses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.real.clients import Watched, fresh_prompt
from tests.real.engines import COMPUTED, KV_RECEIVED, MODEL, RUNNING, RealEngine
from tests.real.routers import Pair, eventually

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TOKENS = 24


async def completion(client: AsyncOpenAI, prompt: str) -> tuple[str, int]:
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=TOKENS, temperature=0)
    assert answer.usage is not None
    return answer.choices[0].text, answer.usage.prompt_tokens


async def completion_stream(client: AsyncOpenAI, prompt: str) -> tuple[str, int]:
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None, "the usage that was asked for comes last"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] is not None
    return "".join(choice.text for chunk in chunks for choice in chunk.choices), usage.prompt_tokens


async def chat(client: AsyncOpenAI, prompt: str) -> tuple[str, int]:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=TOKENS, temperature=0
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


async def chat_stream(client: AsyncOpenAI, prompt: str) -> tuple[str, int]:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None, "the usage that was asked for comes last"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] is not None
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), usage.prompt_tokens


WAYS = [completion, completion_stream, chat, chat_stream]


async def alone(decode: RealEngine, way: Any, prompt: str) -> str:
    """Return what the decode engine computes all by itself; the salt keeps it from KV that it has already."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "cache_salt": os.urandom(8).hex()}
    before = await decode.metric(COMPUTED)
    if way in (chat, chat_stream):
        body["messages"] = [{"role": "user", "content": prompt}]
        answer = await decode.ask("/v1/chat/completions", body)
        text = answer["choices"][0]["message"]["content"]
    else:
        answer = await decode.ask("/v1/completions", {**body, "prompt": prompt})
        text = answer["choices"][0]["text"]
    assert await decode.metric(COMPUTED) - before == answer["usage"]["prompt_tokens"], "it computed the whole prompt"
    return str(text)


async def total(engines: Sequence[RealEngine], metric: str, role: str) -> float:
    """Return the sum of a metric over the engines of a role."""
    return sum([await engine.metric(metric) for engine in engines if engine.role == role])


@pytest.mark.parametrize("way", WAYS)
async def test_the_kv_of_the_whole_prompt_comes_over_and_the_text_is_what_the_decode_engine_computes_alone(
    pair: Pair, engines: tuple[RealEngine, ...], decode: RealEngine, way: Any
) -> None:
    prompt = fresh_prompt()
    expected = await alone(decode, way, prompt)
    received = await total(engines, KV_RECEIVED, "decode")
    computed = await total(engines, COMPUTED, "decode")
    async with (await pair.serving()).client() as client:
        text, prompt_tokens = await way(client, prompt)
    assert prompt_tokens > 400
    assert await total(engines, KV_RECEIVED, "decode") - received == prompt_tokens
    assert await total(engines, COMPUTED, "decode") == computed, "no decode engine computed any of it"
    assert text == expected


async def test_the_next_request_after_the_death_of_the_active_is_served_by_the_other_router_with_its_kv_coming_over(
    pair: Pair, engines: tuple[RealEngine, ...], decode: RealEngine
) -> None:
    dead = await pair.serving()
    _, before = await dead.ready()
    async with dead.client() as client:
        await completion(client, fresh_prompt())
    dead.child.kill()
    await dead.child.ended()

    successor = await pair.serving()
    assert successor is not dead
    _, after = await successor.ready()
    assert after["fencing_token"] > before["fencing_token"]
    prompt = fresh_prompt()
    expected = await alone(decode, completion_stream, prompt)
    received = await total(engines, KV_RECEIVED, "decode")
    async with successor.client() as client:
        text, prompt_tokens = await completion_stream(client, prompt)
    assert await total(engines, KV_RECEIVED, "decode") - received == prompt_tokens
    assert text == expected


async def test_a_client_that_leaves_frees_the_engines(pair: Pair, engines: tuple[RealEngine, ...]) -> None:
    async with (await pair.serving()).client() as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt=fresh_prompt(words=1),
            max_tokens=700,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        assert await total(engines, RUNNING, "decode") == 1
        await stream.close()

    async def idle() -> bool:
        return await total(engines, RUNNING, "decode") == 0

    await eventually(idle, within_s=5, what="no decode engine works for a client that has left")


async def test_what_an_engine_refuses_is_the_clients_mistake_and_nobodys_evidence(
    pair: Pair, engines: tuple[RealEngine, ...]
) -> None:
    router = await pair.serving()
    async with router.client() as client:
        with pytest.raises(BadRequestError) as refused:
            await completion(client, fresh_prompt(words=40))
        assert "1024" in refused.value.message
        with pytest.raises(NotFoundError):
            await client.completions.create(model="another", prompt="hello")
    for engine in engines:
        known = await router.engine(engine.name)
        assert (known["state"], known["streaks"], known["leg_streaks"]) == ("eligible", {}, {})


async def test_many_streams_at_once_are_served_whole_and_leave_no_evidence(
    pair: Pair, engines: tuple[RealEngine, ...]
) -> None:
    router = await pair.serving()
    streams = [Watched() for _ in range(16)]
    async with router.client() as client:
        await _all_at_once(streams, client)
    assert [stream.error for stream in streams if not stream.whole] == []
    assert {stream.usage.completion_tokens for stream in streams} == {TOKENS}
    for engine in engines:
        known = await router.engine(engine.name)
        assert (known["state"], known["streaks"], known["leg_streaks"]) == ("eligible", {}, {}), router.log[-20:]


async def _all_at_once(streams: Sequence[Watched], client: AsyncOpenAI) -> None:
    import asyncio

    await asyncio.gather(*(stream.run(client, tokens=TOKENS) for stream in streams))
