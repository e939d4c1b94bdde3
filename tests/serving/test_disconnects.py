"""A client that leaves: the engines' sockets are closed within a second, nothing stays in flight, nobody is blamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serving.raw import raw_client
from tests.serving.world import COMPLETION, World, capture_logs, finished, until

STREAMED = {**COMPLETION, "max_tokens": 400, "stream": True}
PATH = "/v1/completions"


def aborted(world: World, leg: str) -> int:
    return sum(engine.state.aborted[leg] for engine in world.engines.values())


async def settled(world: World) -> None:
    await until(world.idle, timeout_s=1.0)
    assert world.failures() == []


async def test_leaving_during_the_prefill_closes_its_socket(world: World) -> None:
    await world.fault_all("p", "prefill:hang")
    async with raw_client(world.url) as client:
        await client.post(PATH, COMPLETION)
        await until(lambda: world.requests("prefill") == 1)
    await until(lambda: aborted(world, "prefill") == 1, timeout_s=1.0)
    await settled(world)
    assert world.requests("decode") == 0


async def test_leaving_between_the_legs_leaves_the_ticket_to_its_lease(world: World) -> None:
    """The decode engine's door is slow: the client leaves while its connection is being opened."""
    ticket_read = asyncio.Event()
    real = world.client.data._caller.pool.connect
    gate = asyncio.Event()

    async def slow_connect(*args: Any, **kwargs: Any) -> Any:
        if world.requests("prefill") == 1:
            ticket_read.set()
            await gate.wait()
        return await real(*args, **kwargs)

    world.client.data._caller.pool.connect = slow_connect  # type: ignore[method-assign]
    async with raw_client(world.url) as client:
        await client.post(PATH, COMPLETION)
        await asyncio.wait_for(ticket_read.wait(), 5)
    await settled(world)
    assert world.requests("decode") == 0
    assert b'narwhal_kv_tickets_total{result="orphaned"} 1.0' in await scrape(world)


async def test_leaving_in_the_middle_of_a_stream_closes_its_socket(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 20.0})
    async with raw_client(world.url) as client:
        await client.post(PATH, STREAMED)
        await client.answer_head()
        await client.reader.readuntil(b"\n\n")
    await until(lambda: aborted(world, "decode") == 1, timeout_s=1.0)
    await settled(world)


async def test_leaving_a_whole_answer_closes_the_decode_socket(world: World) -> None:
    await world.fault_all("d", "decode:hang")
    async with raw_client(world.url) as client:
        await client.post(PATH, COMPLETION)
        await until(lambda: world.requests("decode") == 1)
    await until(lambda: aborted(world, "decode") == 1, timeout_s=1.0)
    await settled(world)


async def test_leaving_before_the_body_has_come_troubles_no_engine(world: World) -> None:
    async with raw_client(world.url) as client:
        await client.head("POST", PATH, 1000)
        await client.send(b"{")
        await until(lambda: world.app.in_flight == 1)
    await settled(world)
    assert world.requests("prefill") == 0


async def test_a_client_that_left_is_logged_as_such(world: World) -> None:
    await world.fault_all("p", "prefill:hang")
    with capture_logs() as logs:
        async with raw_client(world.url) as client:
            await client.post(PATH, COMPLETION)
            await until(lambda: world.requests("prefill") == 1)
        await until(lambda: len(finished(logs)) == 1)
    line = finished(logs)[0]
    assert (line["status"], line["outcome"]) == (499, "disconnected")


async def test_many_clients_that_leave_leave_nothing_behind(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 5.0})

    async def impatient(delay_s: float) -> None:
        async with raw_client(world.url) as client:
            await client.post(PATH, STREAMED)
            await asyncio.sleep(delay_s)

    for _ in range(3):
        await asyncio.gather(*(impatient(0.004 * i) for i in range(30)))
    await settled(world)
    assert all(engine.resident == 0 for engine in world.plane.fleet.engines.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_request_on_the_router_works(world: World, stream: bool) -> None:
    await world.fault_all("d", "decode:hang")
    async with raw_client(world.url) as client:
        await client.post(PATH, {**COMPLETION, "stream": stream})
        await until(lambda: world.requests("decode") == 1)
    await world.fault_all("d")
    assert (await world.openai.completions.create(**COMPLETION)).choices


async def scrape(world: World) -> bytes:
    async with world.http.get("/metrics") as answer:
        return await answer.read()
