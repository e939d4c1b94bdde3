"""Who admits: /ready, standby, fencing between the legs, and an engine that has seen a newer router."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from narwhal.core.vocabulary import FencingToken, RouterId, RouterRole, Stage
from tests.serving.raw import raw_client
from tests.serving.world import COMPLETION, World, capture_logs, finished, until

PATH = "/v1/completions"


async def get(world: World, path: str, method: str = "GET") -> tuple[int, Any, dict[str, str]]:
    async with world.http.request(method, path) as answer:
        text = await answer.text()
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, json.loads(text) if text else None, headers


async def post(world: World) -> tuple[int, str, dict[str, str]]:
    async with world.http.post(PATH, json=COMPLETION) as answer:
        return answer.status, (await answer.json())["error"]["code"], dict(answer.headers)


def make_standby(world: World, *, ineligible: str | None = None) -> None:
    world.plane.role = RouterRole.STANDBY
    world.plane.ineligible = ineligible
    world.plane.owner = RouterId("router-b")
    world.plane.tenure.fence("not ours")


async def test_ready_says_everything_that_a_peer_needs(world: World) -> None:
    status, document, headers = await get(world, "/ready")
    assert status == 200
    assert document == {
        "status": "ready",
        "reason": "active",
        "control_ready": True,
        "role": "solo",
        "router": "router-a",
        "term_over": False,
        "fencing_token": 1,
        "cluster": "default",
        "warm": True,
    }
    assert headers["cache-control"] == "no-store"
    assert headers["x-narwhal-router"] == "router-a"


async def test_ready_answers_head(world: World) -> None:
    assert await get(world, "/ready", "HEAD") == (200, None, (await get(world, "/ready", "HEAD"))[2])
    make_standby(world)
    assert (await get(world, "/ready", "HEAD"))[0] == 503


async def test_a_standby_says_who_serves_and_closes_the_connection(world: World) -> None:
    make_standby(world)
    status, document, headers = await get(world, "/ready")
    assert (status, document["reason"], document["control_ready"]) == (503, "standby", True)
    assert (headers["retry-after"], headers["x-narwhal-owner"], headers["connection"]) == ("1", "router-b", "close")
    async with raw_client(world.url) as client:
        await client.post(PATH, COMPLETION)
        status, headers, body = await client.answer()
        assert (status, json.loads(body)["error"]["message"]) == (503, "standby")
        assert (headers["x-narwhal-owner"], headers["connection"]) == ("router-b", "close")
        assert headers["x-narwhal-not-executed"] == "1"
        assert await client.closed()
    assert world.requests("prefill") == 0


async def test_a_standby_does_not_ask_for_a_body(world: World) -> None:
    make_standby(world)
    async with raw_client(world.url) as client:
        await client.head("POST", PATH, 2_000_000, Expect="100-continue")
        async with asyncio.timeout(1):
            status, headers, _ = await client.answer()
        assert (status, headers["x-narwhal-not-executed"]) == (503, "1")


@pytest.mark.parametrize(
    ("ineligible", "plain", "warm"),
    [(None, 503, 200), ("no healthy decode engine in view", 503, 503)],
)
async def test_a_standby_is_warm_if_it_could_take_over(
    world: World, ineligible: str | None, plain: int, warm: int
) -> None:
    make_standby(world, ineligible=ineligible)
    assert (await get(world, "/ready"))[0] == plain
    status, document, _ = await get(world, "/ready?role=warm")
    assert (status, document["warm"]) == (warm, warm == 200)


async def test_an_active_is_warm_too(world: World) -> None:
    assert (await get(world, "/ready?role=warm"))[0] == 200


async def test_a_degraded_active_admits_nothing_and_says_why(world: World) -> None:
    for _ in range(world.config.controller.monitor_failure_limit):
        world.plane.monitoring.finish_pass({Stage.TELEMETRY: "ValueError"})
    status, document, _ = await get(world, "/ready")
    assert (status, document["reason"], document["control_ready"]) == (
        503,
        "monitoring degraded: telemetry ValueError",
        False,
    )
    async with world.http.post(PATH, json=COMPLETION) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["message"] == "monitoring degraded: telemetry ValueError"


async def test_health_answers_in_every_role(world: World) -> None:
    for role in RouterRole:
        world.plane.role = role
        assert (await get(world, "/health"))[0] == 200
        assert (await get(world, "/version"))[0] == 200
        async with world.http.get("/metrics") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("end", ["fenced", "overtaken"])
async def test_a_request_is_not_sent_to_decode_after_its_term_ended(world: World, end: str) -> None:
    await world.fault_all("p", "prefill:delay=200")
    asking = asyncio.ensure_future(post(world))
    await until(lambda: world.requests("prefill") == 1)
    if end == "fenced":
        world.plane.tenure.fence("lost")
    else:
        world.plane.tenure.token = FencingToken(9)
    status, code, headers = await asking
    assert (status, code) == (503, "fenced")
    assert "Retry-After" in headers
    assert "X-Narwhal-Not-Executed" not in headers
    assert world.requests("decode") == 0
    assert world.failures() == []


async def test_a_stream_that_runs_is_finished_although_the_term_ends(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 20.0})
    async with world.http.post(PATH, json={**COMPLETION, "max_tokens": 20, "stream": True}) as answer:
        await answer.content.readany()
        make_standby(world)
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
    assert world.failures() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_saw_a_newer_router_ends_our_term(world: World, stream: bool) -> None:
    for engine in world.engines.values():
        engine.fence.raise_hard(99)
    async with world.http.post(PATH, json={**COMPLETION, "stream": stream}) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "fenced"
    assert world.stale_tokens == 1
    assert world.failures() == []


async def test_a_fenced_decode_leg_ends_our_term_too(world: World) -> None:
    for name in ("d1", "d2"):
        world.engines[name].fence.raise_hard(99)
    async with world.http.post(PATH, json=COMPLETION) as answer:
        assert answer.status == 503
    assert world.stale_tokens == 1


async def test_a_router_that_loses_its_term_while_the_body_arrives_admits_nothing(world: World) -> None:
    content = json.dumps(COMPLETION).encode()
    async with raw_client(world.url) as client:
        await client.head("POST", PATH, len(content))
        await until(lambda: world.app.in_flight == 1)
        make_standby(world)
        await client.send(content)
        status, headers, _ = await client.answer()
    assert (status, headers["x-narwhal-not-executed"]) == (503, "1")
    assert world.requests("prefill") == 0


async def test_the_canonical_line_tells_the_whole_request(world: World) -> None:
    with capture_logs() as logs:
        async with world.http.post(
            PATH, json={**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
        ) as answer:
            await answer.read()
        await until(lambda: len(finished(logs)) == 1)
    line = finished(logs)[0]
    assert (line["path"], line["model"], line["stream"], line["status"]) == (PATH, "stub-model", True, 200)
    assert (line["outcome"], line["attempts"], line["fencing_token"]) == ("served", 1, 1)
    assert (line["prefill"], line["decode"]) == ("p1", "d1")
    assert line["completion_tokens"] == 6
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["admitted_at"] > 0
    assert line["request_id"] == answer.headers["X-Request-Id"]
    assert line["log_level"] == "info"


async def test_metrics_tell_requests_engines_and_tickets(world: World) -> None:
    await world.openai.completions.create(**COMPLETION)
    async with world.http.post(PATH, json={**COMPLETION, "model": "nope"}):
        pass
    async with world.http.get("/metrics") as answer:
        page = await answer.text()
    for line in (
        'narwhal_requests_total{endpoint="/v1/completions",outcome="served"} 1.0',
        'narwhal_requests_total{endpoint="/v1/completions",outcome="rejected"} 1.0',
        'narwhal_kv_tickets_total{result="consumed"} 1.0',
        'narwhal_leg_duration_seconds_count{role="prefill"} 1.0',
        'narwhal_engine_state{engine="p1",role="prefill",state="eligible"} 1.0',
        'narwhal_inflight{engine="d1",role="decode"} 0.0',
        'narwhal_evidence{class="stream",engine="d1"} 0.0',
        "narwhal_ready 1.0",
        "narwhal_data_slots_in_use 0.0",
        "narwhal_cluster_requests_served_total 1.0",
    ):
        assert line in page.splitlines(), line


async def test_labels_do_not_grow_with_what_clients_send(world: World) -> None:
    async def labels() -> set[str]:
        async with world.http.get("/metrics") as answer:
            return {line.rsplit(" ", 1)[0] for line in (await answer.text()).splitlines()}

    async with world.http.post(PATH, json={**COMPLETION, "model": "nope"}):
        pass
    before = await labels()
    for i in range(30):
        async with world.http.post(PATH, json={**COMPLETION, "model": f"m{i}"}, headers={"X-Request-Id": f"r{i}"}):
            pass
        async with world.http.get(f"/nowhere/{i}"):
            pass
    assert await labels() == before
