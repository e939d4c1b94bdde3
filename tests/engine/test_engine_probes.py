"""The control pool: what it makes of engines, well and sick, and when it learns nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from narwhal.config import parse_config
from narwhal.core.vocabulary import EngineId, Leg
from narwhal.engine.client import EngineClient
from narwhal.engine.probes import read_telemetry
from narwhal.ports import EngineAddress, EngineTelemetry
from narwhal.testing.stub_engine import StubEngine, StubSettings, parse_fault
from tests.engine.scripted import Peer, scripted

MODEL = "stub-model"


def built(**engine: Any) -> EngineClient:
    return EngineClient(
        parse_config(
            {
                "serving": {"models": [MODEL]},
                "engine": engine,
                "engines": [
                    {"id": "p", "url": "http://127.0.0.1:1", "role": "prefill"},
                    {"id": "d", "url": "http://127.0.0.1:2", "role": "decode"},
                ],
            },
            source="test",
        )
    )


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = built()
    yield made
    await made.aclose()


@pytest.fixture
async def pair() -> AsyncIterator[dict[str, StubEngine]]:
    engines = {
        "p": StubEngine(StubSettings(role="prefill", model=MODEL)),
        "d": StubEngine(StubSettings(role="decode", model=MODEL)),
    }
    for engine in engines.values():
        await engine.start()
    yield engines
    for engine in engines.values():
        await engine.stop()


def at(name: str, url: str) -> EngineAddress:
    return EngineAddress(EngineId(name), url)


def address(pair: dict[str, StubEngine], name: str) -> EngineAddress:
    return at(name, pair[name].url)


async def test_a_living_engine_is_healthy(client: EngineClient, pair: dict[str, StubEngine]) -> None:
    answer = await client.control.health(address(pair, "p"), timeout_s=2)
    assert (answer.healthy, answer.conclusive) == (True, True)


@pytest.mark.parametrize("fault", ["health:status=503", "health:hang", "health:reset", "refuse"])
async def test_every_other_answer_to_health_is_unhealthy(
    client: EngineClient, pair: dict[str, StubEngine], fault: str
) -> None:
    await pair["p"].set_faults([parse_fault(fault)])
    answer = await client.control.health(address(pair, "p"), timeout_s=0.3)
    assert (answer.healthy, answer.conclusive) == (False, True)
    assert answer.detail


async def test_cards_and_telemetry_are_read(client: EngineClient, pair: dict[str, StubEngine]) -> None:
    cards = await client.control.models(address(pair, "p"), timeout_s=2)
    assert cards is not None
    assert [(card["id"], card["max_model_len"]) for card in cards] == [(MODEL, 32_768)]
    telemetry = await client.control.telemetry(address(pair, "p"), timeout_s=2)
    assert telemetry is not None
    assert (telemetry.running, telemetry.waiting) == (0, 0)
    await pair["p"].restart_generation()
    after = await client.control.telemetry(address(pair, "p"), timeout_s=2)
    assert after is not None
    assert after.generation not in (None, telemetry.generation)


async def test_an_unreadable_answer_is_no_card_and_no_telemetry(
    client: EngineClient, pair: dict[str, StubEngine]
) -> None:
    await pair["p"].set_faults([parse_fault("info:status=500")])
    assert await client.control.models(address(pair, "p"), timeout_s=2) is None
    assert await client.control.telemetry(address(pair, "p"), timeout_s=2) is None


async def test_an_engine_that_offers_no_metrics_says_nothing_and_is_not_unreadable(
    client: EngineClient, pair: dict[str, StubEngine]
) -> None:
    """It can be readmitted: there is no identity to compare."""
    await pair["p"].set_faults([parse_fault("info:status=404")])
    telemetry = await client.control.telemetry(address(pair, "p"), timeout_s=2)
    assert telemetry is not None
    assert (telemetry.generation, telemetry.running) == (None, None)


async def test_a_good_pair_passes_and_every_probe_has_a_fresh_prompt(
    client: EngineClient, pair: dict[str, StubEngine]
) -> None:
    for _ in range(3):
        finding = await client.control.infer(address(pair, "p"), address(pair, "d"), model=MODEL, timeout_s=3)
        assert (finding.failed_leg, finding.conclusive) == (None, True)
    assert pair["d"].state.tickets_consumed == 3
    prompts = {seen.body["prompt"] for seen in pair["p"].state.seen}
    assert len(prompts) == 3


@pytest.mark.parametrize(
    ("engine", "fault", "leg"),
    [
        ("p", "prefill:status=500", Leg.PREFILL),
        ("p", "prefill:hang", Leg.PREFILL),
        ("p", "prefill:bad_ticket=null", Leg.PREFILL),
        ("p", "prefill:status=404", Leg.PREFILL),
        ("p", "refuse", Leg.PREFILL),
        ("d", "decode:status=500", Leg.DECODE),
        ("d", "decode:hang", Leg.DECODE),
        ("d", "decode:reset", Leg.DECODE),
        ("d", "decode:bad_200=error", Leg.DECODE),
        ("d", "refuse", Leg.DECODE),
    ],
)
async def test_a_finding_names_the_leg_that_failed(
    client: EngineClient, pair: dict[str, StubEngine], engine: str, fault: str, leg: Leg
) -> None:
    await pair[engine].set_faults([parse_fault(fault)])
    finding = await client.control.infer(address(pair, "p"), address(pair, "d"), model=MODEL, timeout_s=0.5)
    assert (finding.prefill, finding.decode) == ("p", "d")
    assert (finding.failed_leg, finding.conclusive) == (leg, True)
    assert finding.detail


@pytest.mark.parametrize("fault", ["decode:status=429", "decode:status=503,body=paused"])
async def test_an_engine_that_is_only_busy_or_paused_has_not_failed_the_probe(
    client: EngineClient, pair: dict[str, StubEngine], fault: str
) -> None:
    await pair["d"].set_faults([parse_fault(fault)])
    finding = await client.control.infer(address(pair, "p"), address(pair, "d"), model=MODEL, timeout_s=2)
    assert (finding.failed_leg, finding.conclusive) == (None, False)


async def hang(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def test_a_full_control_pool_learns_nothing() -> None:
    client = built(control_connections=1)
    async with scripted(hang) as server:
        blocking = asyncio.ensure_future(client.control.health(at("x", server.url), timeout_s=1.0))
        async with asyncio.timeout(2):
            while server.open == 0:
                await asyncio.sleep(0.005)
        answer = await client.control.health(at("x", server.url), timeout_s=0.1)
        assert (answer.healthy, answer.conclusive) == (False, False)
        assert "control pool" in answer.detail
        assert (await blocking).conclusive
    await client.aclose()


async def test_a_loop_that_was_late_learns_nothing(client: EngineClient) -> None:
    async with scripted(hang) as server:
        asking = asyncio.ensure_future(client.control.health(at("x", server.url), timeout_s=0.2))
        async with asyncio.timeout(2):
            while server.open == 0:
                await asyncio.sleep(0.005)
        time.sleep(0.8)
        answer = await asking
        assert (answer.healthy, answer.conclusive) == (False, False)
        assert "late" in answer.detail


VLLM = b"""# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79602473147e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0"} 1
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 9
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM, EngineTelemetry("1.79602473147e+09", running=5, waiting=1, kv_usage=0.5)),
        (b"sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\n", EngineTelemetry(None, running=4, waiting=1)),
        (b"vllm:num_requests_running NaN\n", EngineTelemetry(None)),
        (b"", EngineTelemetry(None)),
    ],
)
def test_a_metrics_page_is_read_as_far_as_it_goes(page: bytes, expected: EngineTelemetry) -> None:
    assert read_telemetry(page) == expected
