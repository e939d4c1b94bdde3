"""Streams pass through as the engine wrote them: bytes, order, pace, size."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.serving.raw import raw_client
from tests.serving.world import CHAT, COMPLETION, MODEL, World, until

STREAMED = {**COMPLETION, "max_tokens": 12, "stream": True}
CJK = {"model": MODEL, "prompt": "漢字 emoji 🐋 é", "max_tokens": 20, "stream": True}


async def text_of(world: World, body: dict[str, Any]) -> bytes:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with world.http.post(path, json=body) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["X-Accel-Buffering"] == "no"
        return await answer.read()


def documents(text: bytes) -> list[Any]:
    frames = [frame.removeprefix(b"data: ") for frame in text.split(b"\n\n") if frame]
    return [json.loads(frame) for frame in frames if frame != b"[DONE]"]


@pytest.mark.parametrize("body", [STREAMED, CJK, {**CHAT, "stream": True}], ids=["completion", "cjk", "chat"])
async def test_bytes_split_anywhere_come_out_whole(world: World, body: dict[str, Any]) -> None:
    plain = documents(await text_of(world, body))
    await world.fault_all("d", "decode:split")
    split = await text_of(world, body)
    assert "\ufffd" not in split.decode()
    assert [d["choices"] for d in documents(split)] == [d["choices"] for d in plain]
    assert split.endswith(b"data: [DONE]\n\n")


async def test_a_line_of_three_megabytes_passes_intact(world: World) -> None:
    await world.fault_all("d", "decode:big_frame=3000000")
    text = await text_of(world, STREAMED)
    assert max(len(frame) for frame in text.split(b"\n\n")) >= 3_000_000
    assert len(documents(text)) >= 2
    assert world.failures() == []


async def test_tokens_are_not_held_together(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 200.0})
    loop = asyncio.get_running_loop()
    async with raw_client(world.url) as client:
        await client.post("/v1/completions", {**STREAMED, "max_tokens": 4})
        await client.answer_head()
        times = []
        for _ in range(4):
            await client.reader.readuntil(b"\n\n")
            times.append(loop.time())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= 0.35
    assert min(gaps) >= 0.1


async def test_the_role_frame_comes_with_the_first_token(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 300.0})
    async with raw_client(world.url) as client:
        await client.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream": True})
        await client.answer_head()
        size = int(await client.reader.readuntil(b"\r\n"), 16)
        first = await client.reader.readexactly(size)
    assert [bool(d["choices"][0]["delta"].get("content")) for d in documents(first)] == [False, True]


async def test_usage_is_passed_on_only_to_who_asked(world: World) -> None:
    without = documents(await text_of(world, STREAMED))
    assert all(document.get("usage") is None for document in without)
    asked = documents(await text_of(world, {**STREAMED, "stream_options": {"include_usage": True}}))
    assert asked[-1]["usage"]["completion_tokens"] == 12


async def test_an_old_client_gets_its_stream_without_chunks(world: World) -> None:
    async with raw_client(world.url) as client:
        await client.post("/v1/completions", STREAMED, version="1.0")
        status, headers, body = await client.answer()
    assert status == 200
    assert "transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_connection_serves_one_stream_after_another(world: World) -> None:
    async with raw_client(world.url) as client:
        for _ in range(3):
            await client.post("/v1/completions", STREAMED)
            assert (await client.answer_head())[0] == 200
            await client.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await until(world.idle)


async def test_a_client_that_reads_slowly_gets_everything(world: World) -> None:
    await world.fault_all("d", "decode:big_frame=3000000")
    async with raw_client(world.url) as client:
        await client.post("/v1/completions", STREAMED)
        await asyncio.sleep(0.5)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += await client.reader.read(65536)
    assert len(data) > 3_000_000
    assert world.failures() == []


async def test_requests_at_the_pace_of_the_engines_keep_alive_never_fail(empty_world: World) -> None:
    """The engine closes idle connections after 5 s; ours are given up earlier. Shortened: only the order matters."""
    world = empty_world
    await world.start(engine={"keepalive_s": 0.15})
    for _ in range(6):
        assert (await world.openai.completions.create(**COMPLETION)).choices
        await asyncio.sleep(0.16)
    assert world.failures() == []
    assert sum(engine.state.connections_accepted for engine in world.engines.values()) >= 8
