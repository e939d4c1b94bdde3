"""Real engines that die, stop or restart under load: what clients lose, what follows, and the way back by itself.

Source: source, "Engine failure handling" and "Readmission and drains".
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from narwhal.demo.redis_server import RedisServer
from tests.real.clients import Crowd, Watched, fresh_prompt
from tests.real.engines import FAILED_TRANSFERS, RUNNING, RealEngine, Tools
from tests.real.gate import Gate
from tests.real.routers import Pair, Router, eventually, patient, running
from tests.real.seen import BACK_S, FULL, NOTICED_S, becomes, finished, per_decode, readmitted, serves_with_kv, told

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1200)]


async def lost_only_on(router: Router, streams: Sequence[Watched], engine: RealEngine) -> None:
    """Hold that clients lost the streams of `engine`, knew it, and lost no other."""

    async def all_logged() -> bool:
        return len(finished(router)) >= len(streams)

    await eventually(all_logged, within_s=5, what="the router has logged every stream")
    lines = [line for line in finished(router).values() if line["outcome"] != "served"]
    assert {line["decode"] for line in lines} == {engine.name}
    assert {line["outcome"] for line in lines} == {"broken"}
    broken = [stream for stream in streams if not stream.whole]
    assert len(broken) == len(lines) >= FULL
    assert all(stream.error is not None and stream.finish_reason is None for stream in broken)


async def test_a_decode_engine_killed_mid_stream_is_out_after_its_streak_and_back_after_its_restart(
    pair: Pair, tools: Tools, engines: tuple[RealEngine, ...], decode: RealEngine
) -> None:
    router = await pair.serving()
    async with router.client() as client:
        async with Crowd(client, per_decode(engines, FULL)) as streams:
            await asyncio.to_thread(tools.kill, decode.name)
        try:
            await lost_only_on(router, streams, decode)
            await becomes(router, decode, "ejected")
            assert told(router, decode.name)[0] == "inference_verification (stream)"
        finally:
            await asyncio.to_thread(tools.start, decode.name)
    await becomes(router, decode, "eligible", within_s=BACK_S)
    await serves_with_kv(router, engines)


@contextmanager
def stopped(tools: Tools, engine: RealEngine, *, core_only: bool) -> Iterator[None]:
    send = tools.signal_core if core_only else tools.signal_all
    send(engine.name, signal.SIGSTOP)
    try:
        yield
    finally:
        tools.signal_all(engine.name, signal.SIGCONT)


@pytest.mark.parametrize("core_only", [True, False], ids=["health still says 200", "nothing answers"])
async def test_a_decode_engine_stopped_mid_stream_is_out_by_stream_evidence_and_back_when_it_goes_on(
    pair: Pair, tools: Tools, engines: tuple[RealEngine, ...], decode: RealEngine, core_only: bool
) -> None:
    router = await pair.serving()
    async with router.client() as client:
        async with Crowd(client, per_decode(engines, FULL)) as streams:
            with stopped(tools, decode, core_only=core_only):
                await becomes(router, decode, "ejected")
                assert await decode.healthy(timeout_s=5) is core_only
        await lost_only_on(router, streams, decode)
    await becomes(router, decode, "eligible", within_s=BACK_S)
    await serves_with_kv(router, engines)
    assert "ejected: generation_changed" not in told(router, decode.name), "it is still the same process"


async def test_a_decode_engine_paused_by_its_own_command_is_out_by_stream_evidence_and_back_after_resume(
    pair: Pair, engines: tuple[RealEngine, ...], decode: RealEngine
) -> None:
    router = await pair.serving()
    async with router.client() as client:
        async with Crowd(client, per_decode(engines, FULL)) as streams:
            assert await decode.command("/pause?mode=keep") == 200
            try:
                await becomes(router, decode, "ejected")
                assert await decode.healthy(), "only inference can tell"
            finally:
                assert await decode.command("/resume") == 200
        await lost_only_on(router, streams, decode)
        assert told(router, decode.name)[0] == "inference_verification (stream)"
    await becomes(router, decode, "eligible", within_s=BACK_S)
    await serves_with_kv(router, engines)

    async def idle() -> bool:
        return await decode.metric(RUNNING) == 0

    await eventually(idle, within_s=30, what="the streams that were given up are gone from the engine")


async def test_a_prefill_engine_restarted_between_the_legs_costs_only_those_requests(
    tools: Tools, prefill: RealEngine, decode: RealEngine, redis: RedisServer, tmp_path: Path
) -> None:
    gate = Gate(decode.url)
    behind = RealEngine(decode.name, decode.role, gate.url)
    settings = patient(serving={"first_token_timeout_s": 600.0})
    async with gate, running(Pair(tmp_path, redis, [prefill, behind], settings)) as pair:
        router = await pair.serving()
        streams = [Watched() for _ in range(FULL)]
        failed = await decode.metric(FAILED_TRANSFERS)
        async with router.client(timeout_s=600) as client:
            with gate.shut():
                under_way = [asyncio.create_task(stream.run(client, tokens=8)) for stream in streams]
                await eventually(lambda: gate.holds(FULL), within_s=NOTICED_S, what="every decode leg is at the gate")
                await asyncio.to_thread(tools.kill, prefill.name)
                await asyncio.to_thread(tools.start, prefill.name)
            await asyncio.gather(*under_way)
        assert [stream.whole for stream in streams] == [False] * FULL, "their KV is gone"
        assert await decode.metric(FAILED_TRANSFERS) - failed >= FULL, "the decode engine was shown the old tickets"
        await readmitted(router, prefill)
        await becomes(router, decode, "eligible", within_s=BACK_S)
        assert told(router, prefill.name)[0] in ("ejected: liveness", "ejected: generation_changed")
        assert not [word for word in told(router, decode.name) if word.startswith("ejected")], "it did nothing wrong"
        await serves_with_kv(router, [prefill, decode])


async def test_a_prefill_engine_that_was_killed_is_out_by_connection_evidence_and_back_after_its_restart(
    pair: Pair, tools: Tools, engines: tuple[RealEngine, ...], prefill: RealEngine
) -> None:
    router = await pair.serving()
    others = [engine for engine in engines if engine.role == "prefill" and engine is not prefill]
    async with router.client() as client, Crowd(client, per_decode(engines, 1)) as streams:
        await asyncio.to_thread(tools.kill, prefill.name)
        try:
            outcomes = Counter([await _outcome_of_one_more(router) for _ in range(FULL * (1 + len(others)) + 1)])
            assert await router.state(prefill.name) == "ejected"
            assert told(router, prefill.name)[0] in ("ejected: connection", "ejected: liveness")
            if others:
                assert outcomes["served"] > 0
                assert outcomes["failed"] <= FULL
        finally:
            await asyncio.to_thread(tools.start, prefill.name)
    assert [stream.error for stream in streams if not stream.whole] == [], "they had their KV already"
    await becomes(router, prefill, "eligible", within_s=BACK_S)
    await serves_with_kv(router, engines)


async def _outcome_of_one_more(router: Router) -> str:
    known = set(finished(router))
    async with router.client() as client:
        await Watched(prompt=fresh_prompt(words=1)).run(client, tokens=4)
    await eventually(lambda: _grown(router, known), within_s=5, what="the request is logged")
    (line,) = [line for name, line in finished(router).items() if name not in known]
    return str(line["outcome"])


async def _grown(router: Router, known: set[str]) -> bool:
    return len(finished(router)) > len(known)
