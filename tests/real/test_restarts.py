"""A prefill engine that restarts behind the router's back: the new process is told from the old, old tickets are void.

Source: source, "Readmission and drains" (generation identity); the decode engine's failed transfers are the witness.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest
from openai import APIStatusError

from narwhal.demo.redis_server import RedisServer
from tests.real.clients import Watched
from tests.real.engines import FAILED_TRANSFERS, RealEngine, Tools
from tests.real.gate import Gate
from tests.real.routers import Pair, Router, Settings, eventually, patient, running
from tests.real.seen import NOTICED_S, readmitted, serves_with_kv, told

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1200)]

UNSEEN: Final[Settings] = patient(
    serving={"prefill_timeout_s": 600.0}, recovery={"liveness_misses": 1000}, controller={"telemetry_every_s": 1.0}
)
"""Liveness does not end an engine that is away for a minute, so that only its new generation can give it away."""


async def restart(tools: Tools, engine: RealEngine) -> None:
    await asyncio.to_thread(tools.kill, engine.name)
    await asyncio.to_thread(tools.start, engine.name)


async def known_generation(router: Router, engine: RealEngine) -> str:
    async def generation() -> str | None:
        known: str | None = (await router.engine(engine.name))["generation"]
        return known

    return str(await eventually(generation, within_s=NOTICED_S, what="the router knows the process"))


async def until_replaced(router: Router, engine: RealEngine) -> None:
    async def replaced() -> bool:
        return "ejected: generation_changed" in told(router, engine.name)

    await eventually(replaced, within_s=NOTICED_S, what=f"the new process is noticed: {router.child.log}")


async def test_a_prefill_engine_that_restarted_while_idle_is_another_generation_and_proves_itself_first(
    tools: Tools, prefill: RealEngine, decode: RealEngine, redis: RedisServer, tmp_path: Path
) -> None:
    async with running(Pair(tmp_path, redis, [prefill, decode], UNSEEN)) as pair:
        router = await pair.serving()
        await serves_with_kv(router, [prefill, decode])
        before = await known_generation(router, prefill)
        failed = await decode.metric(FAILED_TRANSFERS)
        await restart(tools, prefill)
        await until_replaced(router, prefill)
        await readmitted(router, prefill)
        assert told(router, prefill.name) == ["ejected: generation_changed", "readmitted"]
        assert await known_generation(router, prefill) != before
        await serves_with_kv(router, [prefill, decode])
        assert await decode.metric(FAILED_TRANSFERS) == failed, "no ticket of the old process reached it"
        assert told(router, decode.name) == []


async def test_a_ticket_of_a_prefill_engine_that_has_since_restarted_reaches_no_decode_engine(
    tools: Tools, prefill: RealEngine, decode: RealEngine, redis: RedisServer, tmp_path: Path
) -> None:
    gate = Gate(prefill.url)
    behind = RealEngine(prefill.name, prefill.role, gate.url)
    async with gate, running(Pair(tmp_path, redis, [behind, decode], UNSEEN)) as pair:
        router = await pair.serving()
        await known_generation(router, prefill)
        failed = await decode.metric(FAILED_TRANSFERS)
        stream = Watched()
        async with router.client(timeout_s=600) as client:
            with gate.answers_held():
                under_way = asyncio.create_task(stream.run(client, tokens=8))
                await eventually(lambda: gate.holds(1), within_s=NOTICED_S, what="the ticket is at the gate")
                await restart(tools, prefill)
                await until_replaced(router, prefill)
            await under_way
        assert isinstance(stream.error, APIStatusError)
        assert (stream.error.status_code, stream.error.code) == (503, "kv_ticket_expired")
        await readmitted(router, prefill)
        await serves_with_kv(router, [prefill, decode])
        assert await decode.metric(FAILED_TRANSFERS) == failed, "no ticket of the old process reached it"
