"""A real decode engine that an operator drains under load: its streams go on, nothing new comes, and undrain ends it.

Source: source, "Readmission and drains".
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from openai import APIStatusError

from narwhal.demo.redis_server import RedisServer
from tests.real.clients import Crowd, Watched
from tests.real.engines import RUNNING, RealEngine
from tests.real.routers import CLUSTER, Pair
from tests.real.seen import FULL, becomes, per_decode, serves_with_kv

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


async def operator(redis: RedisServer, *words: str) -> dict[str, Any]:
    """Run `narwhal engines` as an operator does, and return what it said."""
    where = ("--redis", redis.url, "--cluster", CLUSTER, "--json")
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "narwhal", "engines", *words, *where), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await command.communicate()
    assert command.returncode == 0, said
    return dict(json.loads(said))


async def test_a_decode_engine_drained_under_load_keeps_its_streams_and_gets_no_new_ones(
    pair: Pair, redis: RedisServer, engines: tuple[RealEngine, ...], decode: RealEngine
) -> None:
    router = await pair.serving()
    others = [engine for engine in engines if engine.role == "decode" and engine is not decode]
    async with router.client() as client:
        async with Crowd(client, per_decode(engines, FULL)) as streams:
            await operator(redis, "drain", decode.name, "--reason", "new driver")
            assert await router.state(decode.name) == "operator_drain"
            assert await decode.metric(RUNNING) == FULL, "its streams go on"
            one_more = Watched()
            await one_more.run(client, tokens=4)
            assert await decode.metric(RUNNING) <= FULL
        assert [stream.error for stream in streams if not stream.whole] == []
    if others:
        assert one_more.whole, one_more.error
    else:
        assert isinstance(one_more.error, APIStatusError)
        assert one_more.error.status_code == 503
        assert (await router.ready())[0] == 503
    assert await router.state(decode.name) == "operator_drain", "an idle engine stays drained"
    await operator(redis, "undrain", decode.name)
    await becomes(router, decode, "eligible")
    await serves_with_kv(router, engines)
