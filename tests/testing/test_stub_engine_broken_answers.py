"""Faults in the answer itself: what a stream or a document lacks, how it ends, how its bytes are cut."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from narwhal.testing.stub_engine import parse_fault
from tests.testing.wire import (
    CHAT,
    COMPLETION,
    Engines,
    RawClient,
    path_of,
    post,
    stream,
    until,
)


@pytest.mark.parametrize(("body", "expected"), [(COMPLETION, 0), (CHAT, 1)], ids=["completion", "chat"])
async def test_no_first_token_sends_headers_and_role_and_then_nothing(
    engines: Engines, body: dict[str, Any], expected: int
) -> None:
    engine = await engines.start("decode:no_first_token")
    client = await RawClient.post(engine, {**body, "stream": True})
    assert client.status == 200
    for _ in range(expected):
        assert b'"role":"assistant"' in (await client.read_chunk() or b"")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.read_chunk(), timeout=0.05)
    await engine.set_faults()
    assert (await client.rest()).finish_reasons == ["length"]


async def test_no_first_token_can_send_comments_for_ever(engines: Engines) -> None:
    engine = await engines.start("decode:no_first_token,keepalive_ms=5")
    client = await RawClient.post(engine, {**COMPLETION, "stream": True})
    assert [await client.read_chunk() for _ in range(5)] == [b": keep-alive\n\n"] * 5
    await client.close()
    await until(lambda: engine.state.aborted["decode"] == 1)


async def test_no_first_token_leaves_a_whole_answer_hanging(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:no_first_token")
    with pytest.raises(TimeoutError):
        await post(http, engine, COMPLETION, timeout=aiohttp.ClientTimeout(total=0.1))


async def test_silence_begins_after_so_many_tokens_and_ends_when_lifted(engines: Engines) -> None:
    engine = await engines.start("decode:silence=3")
    client = await RawClient.post(engine, {**COMPLETION, "stream": True})
    for _ in range(3):
        await client.read_chunk()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.read_chunk(), timeout=0.05)
    await engine.set_faults()
    assert (await client.rest()).finish_reasons == ["length"]


@pytest.mark.parametrize("after", [0, 2, 6, 99])
async def test_cut_ends_the_connection_without_the_terminal_chunk(engines: Engines, after: int) -> None:
    engine = await engines.start(f"decode:cut={after}")
    answer = await stream(engine, COMPLETION)
    assert len(answer.chunks) == min(after, 6)
    assert not answer.terminated
    assert b"[DONE]" not in answer.content
    await until(lambda: engine.state.severed == 1)


async def test_cut_ends_a_whole_answer_half_way(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:cut")
    with pytest.raises(aiohttp.ClientPayloadError):
        await post(http, engine, COMPLETION)


async def test_no_finish_leaves_out_the_finish_reason(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:no_finish")
    answer = await stream(engine, COMPLETION)
    assert answer.finish_reasons == []
    assert answer.frames[-1] == "[DONE]"
    assert len(answer.text.split()) == 6
    _, document = await post(http, engine, COMPLETION)
    assert document["choices"][0]["finish_reason"] is None
    await engine.set_faults([parse_fault("decode:no_finish=false")])
    answer = await stream(engine, COMPLETION)
    assert answer.terminated
    assert b"[DONE]" not in answer.content


@pytest.mark.parametrize("after", [0, 2, 99])
async def test_error_frame_comes_after_so_many_tokens_and_is_followed_by_done(engines: Engines, after: int) -> None:
    engine = await engines.start(f"decode:error_frame={after}")
    answer = await stream(engine, COMPLETION)
    *tokens, error, done = answer.chunks
    assert len(tokens) == min(after, 6)
    assert json.loads(error[6:])["error"]["code"] == 500
    assert done == b"data: [DONE]\n\n"
    assert answer.terminated


async def test_error_frame_makes_a_whole_answer_500(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:error_frame")
    status, document = await post(http, engine, COMPLETION)
    assert (status, document["error"]["message"]) == (500, "Internal server error")


@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_200_answers_no_result_under_200(
    http: aiohttp.ClientSession, engines: Engines, streaming: bool
) -> None:
    engine = await engines.start("bad_200")
    body = {**COMPLETION, "stream": streaming}
    status, document = await post(http, engine, body)
    assert (status, document["error"]["code"]) == (200, 500)
    await engine.set_faults([parse_fault("bad_200=null_choices")])
    assert (await post(http, engine, body))[1]["choices"] is None
    for variant, content in (("not_json", b"<html>Bad Gateway</html>"), ("empty", b"")):
        await engine.set_faults([parse_fault(f"decode:bad_200={variant}")])
        async with http.post(engine.url + path_of(body), json=body) as answer:
            assert (answer.status, await answer.read()) == (200, content)


async def test_slow_spaces_the_tokens(engines: Engines) -> None:
    engine = await engines.start("decode:slow=30")
    client = await RawClient.post(engine, {**COMPLETION, "max_tokens": 4, "stream": True})
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(4):
        await client.read_chunk()
        times.append(loop.time())
    await client.rest()
    assert times[-1] - times[0] >= 0.075


async def test_split_cuts_inside_characters_and_inside_the_data_prefix(engines: Engines) -> None:
    whole = await engines.start()
    body = {"prompt": "many words", "max_tokens": 60}
    expected = await stream(whole, body)
    assert any(byte >= 0xF0 for byte in expected.text.encode()), "the text must hold a character of four bytes"
    engine = await engines.start("decode:split")
    answer = await stream(engine, body)
    assert answer.text == expected.text
    assert answer.finish_reasons == ["length"]
    assert b"dat" in answer.chunks
    broken = 0
    for chunk in answer.chunks:
        try:
            chunk.decode()
        except UnicodeDecodeError:
            broken += 1
    assert broken >= 2


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
async def test_big_frame_is_one_line_of_three_megabytes(engines: Engines, body: dict[str, Any]) -> None:
    engine = await engines.start("decode:big_frame")
    answer = await stream(engine, body)
    assert max(map(len, answer.chunks)) > 3_000_000
    whole = await engines.start()
    assert answer.text == (await stream(whole, body)).text
