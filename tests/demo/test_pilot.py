"""The impatient client goes on only while nothing was executed, and remembers every other answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from narwhal.demo.pilot import Pilot
from narwhal.demo.wire import Door

Scripted = tuple[int, dict[str, str]]
NOT_YET: Scripted = (503, {"X-Narwhal-Not-Executed": "1", "Connection": "close"})
SERVED: Scripted = (200, {})


class Router:
    """A traffic port that gives the scripted answers one after the other."""

    def __init__(self, server: TestServer, answers: list[Scripted]) -> None:
        self._server = server
        self.answers = answers
        self.bodies: list[object] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """A router that has yet to be told what to answer."""

    async def answer(request: web.Request) -> web.Response:
        if request.can_read_body:
            scripted.bodies.append(await request.json())
        status, headers = scripted.answers.pop(0)
        return web.json_response({"status": status}, status=status, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    server = TestServer(app)
    scripted = Router(server, [])
    await server.start_server()
    yield scripted
    await server.close()


async def test_it_asks_again_until_it_is_served(router: Router) -> None:
    router.answers = [NOT_YET, NOT_YET, SERVED]
    pilot = Pilot(router.url, model="stub")
    await pilot.run()
    assert (pilot.refusals, pilot.surprises) == (2, [])
    assert router.bodies == [{"model": "stub", "prompt": "The sea is", "max_tokens": 1}] * 3


@pytest.mark.parametrize(
    "answer",
    [(503, {}), (500, {"X-Narwhal-Not-Executed": "1"}), (502, {}), (404, {})],
    ids=["503 without the promise", "500 with it", "502", "404"],
)
async def test_any_other_answer_is_a_surprise_and_ends_it(answer: Scripted, router: Router) -> None:
    router.answers = [NOT_YET, answer, SERVED]
    pilot = Pilot(router.url, model="stub")
    await pilot.run()
    assert pilot.refusals == 1
    (surprise,) = pilot.surprises
    assert f"status {answer[0]}" in surprise
    assert router.answers == [SERVED]


async def test_a_connection_that_is_refused_is_a_surprise() -> None:
    pilot = Pilot("http://127.0.0.1:1", model="stub")
    await pilot.run()
    assert "ConnectionRefusedError" in pilot.surprises[0]


async def test_a_door_keeps_its_connection_and_opens_another_when_it_was_closed(router: Router) -> None:
    router.answers = [SERVED, NOT_YET, SERVED]
    door = Door(router.url)
    try:
        assert [(await door.get("/ready")).status for _ in range(3)] == [200, 503, 200]
    finally:
        door.close()
