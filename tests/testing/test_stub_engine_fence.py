"""An engine with floors turns away routers that lost their lease, but not the decodes that they had admitted."""

from __future__ import annotations

import aiohttp
import pytest

from narwhal.testing.stub_engine import StubEngine
from tests.testing.wire import COMPLETION, post


def fenced(token: object, phase: str | None = None) -> dict[str, str]:
    return {"X-Narwhal-Fence": str(token)} | ({} if phase is None else {"X-Narwhal-Phase": phase})


async def leg(http: aiohttp.ClientSession, engine: StubEngine, token: object, phase: str | None = None) -> int:
    status, _ = await post(http, engine, COMPLETION, headers=fenced(token, phase))
    return status


async def raise_hard(http: aiohttp.ClientSession, engine: StubEngine, token: int) -> None:
    async with http.post(engine.url + "/fence", json={"token": token}) as answer:
        assert answer.status == 200


async def test_an_older_token_than_the_highest_seen_is_409_stale_router(
    http: aiohttp.ClientSession, decode: StubEngine
) -> None:
    assert [await leg(http, decode, token) for token in (3, 3, 5)] == [200, 200, 200]
    status, document = await post(http, decode, COMPLETION, headers=fenced(4))
    assert status == 409
    assert document["error"]["type"] == "stale_router"
    assert (decode.fence.refused, decode.fence.admit_floor, decode.fence.hard_floor) == (1, 5, 0)


async def test_the_decode_leg_of_an_older_router_still_runs(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    assert await leg(http, decode, 5, "admit") == 200
    assert await leg(http, decode, 4, "admit") == 409
    assert await leg(http, decode, 4, "decode") == 200


async def test_a_hard_floor_ends_older_decodes_too(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    await raise_hard(http, decode, 5)
    assert await leg(http, decode, 4, "decode") == 409
    assert await leg(http, decode, 4) == 409
    assert await leg(http, decode, 5, "decode") == 200
    await raise_hard(http, decode, 3)
    assert decode.fence.hard_floor == 5


async def test_requests_without_a_token_pass_and_are_counted(http: aiohttp.ClientSession, decode: StubEngine) -> None:
    await raise_hard(http, decode, 5)
    assert (await post(http, decode, COMPLETION))[0] == 200
    assert decode.fence.unfenced == 1


async def test_floors_are_reported_on_health_and_outlive_a_restart(
    http: aiohttp.ClientSession, decode: StubEngine
) -> None:
    await leg(http, decode, 7)
    await raise_hard(http, decode, 6)
    await decode.restart_generation()
    async with http.get(decode.url + "/health") as answer:
        assert (answer.headers["X-Narwhal-Admit-Floor"], answer.headers["X-Narwhal-Hard-Floor"]) == ("7", "6")
    async with http.get(decode.url + "/stub/state") as answer:
        assert (await answer.json())["fence"]["admit_floor"] == 7


@pytest.mark.parametrize(("token", "phase"), [("x", None), ("-1", None), ("", None), ("1", "later")])
async def test_an_unreadable_token_is_400(
    http: aiohttp.ClientSession, decode: StubEngine, token: str, phase: str | None
) -> None:
    assert await leg(http, decode, token, phase) == 400
    assert decode.fence.admit_floor == 0


@pytest.mark.parametrize("document", [{}, [], {"token": -1}, {"token": "5"}, {"token": True}])
async def test_an_unreadable_floor_is_400(http: aiohttp.ClientSession, decode: StubEngine, document: object) -> None:
    async with http.post(decode.url + "/fence", json=document) as answer:
        assert answer.status == 400
    assert decode.fence.hard_floor == 0
