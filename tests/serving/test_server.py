"""The listener: a free port, a gentle stop, and a quick one for who is in a hurry."""

from __future__ import annotations

import asyncio
import socket

import pytest

from narwhal.serving.server import HttpServer
from tests.serving.raw import raw_client
from tests.serving.world import COMPLETION, World, until

PATH = "/v1/completions"
STREAMED = {**COMPLETION, "max_tokens": 20, "stream": True}


async def test_a_taken_port_is_an_error_at_start(empty_world: World) -> None:
    await empty_world.start()
    port = int(empty_world.url.rsplit(":", 1)[1])
    with pytest.raises(OSError, match="in use"):
        await HttpServer(empty_world.app, host="127.0.0.1", port=port).start()


async def test_streams_finish_after_the_listener_has_closed(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 20.0})
    async with world.http.post(PATH, json=STREAMED) as answer:
        await answer.content.readany()
        world.plane.stopping = True
        finishing = asyncio.ensure_future(world.server.finish(timeout_s=10, hurry=asyncio.Event()))
        await asyncio.sleep(0.05)
        with socket.socket() as new:
            new.settimeout(1)
            with pytest.raises(ConnectionRefusedError):
                new.connect(("127.0.0.1", int(world.url.rsplit(":", 1)[1])))
        assert not finishing.done()
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(finishing, 5)


async def test_a_kept_connection_is_told_that_the_router_stops(empty_world: World) -> None:
    world = empty_world
    await world.start(stub={"itl_ms": 20.0})
    async with raw_client(world.url) as kept, world.http.post(PATH, json=STREAMED) as answer:
        await kept.post(PATH, COMPLETION)
        assert (await kept.answer())[0] == 200
        world.plane.stopping = True
        finishing = asyncio.ensure_future(world.server.finish(timeout_s=10, hurry=asyncio.Event()))
        await asyncio.sleep(0.02)
        await kept.post(PATH, COMPLETION)
        status, headers, _ = await kept.answer()
        assert (status, headers["x-narwhal-not-executed"], headers["connection"]) == (503, "1", "close")
        assert await kept.closed()
        await answer.read()
    await asyncio.wait_for(finishing, 5)


@pytest.mark.parametrize("hurried", [True, False])
async def test_what_lasts_too_long_is_cut(empty_world: World, hurried: bool) -> None:
    world = empty_world
    await world.start()
    await world.fault_all("d", "decode:hang")
    hurry = asyncio.Event()
    async with raw_client(world.url) as client:
        await client.post(PATH, COMPLETION)
        await until(lambda: world.requests("decode") == 1)
        finishing = asyncio.ensure_future(world.server.finish(timeout_s=30 if hurried else 0.1, hurry=hurry))
        if hurried:
            await asyncio.sleep(0.05)
            assert not finishing.done()
            hurry.set()
        await asyncio.wait_for(finishing, 5)
    await until(world.idle, timeout_s=1.0)
