"""Headers: what engines are told, what clients get back, and what never passes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from narwhal.core.vocabulary import FencingToken, Leg
from narwhal.serving.headers import RequestIds, Trace, leg_headers
from tests.serving.raw import raw_client
from tests.serving.world import COMPLETION, World

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def ask(world: World, **headers: str) -> dict[str, str]:
    async with world.http.post("/v1/completions", json=COMPLETION, headers=headers) as answer:
        assert answer.status == 200
        return {name.lower(): value for name, value in answer.headers.items()}


def legs(world: World) -> tuple[Any, Any]:
    return world.seen("prefill")[-1].headers, world.seen("decode")[-1].headers


async def test_the_clients_request_id_comes_back_and_engines_see_one_unique_id_each(world: World) -> None:
    answers = await asyncio.gather(*(ask(world, **{"X-Request-Id": "mine"}) for _ in range(2)))
    assert [answer["x-request-id"] for answer in answers] == ["mine", "mine"]
    seen = [[s.headers.getall("X-Request-Id") for s in world.seen(leg)] for leg in ("prefill", "decode")]
    assert all(len(ids) == 1 for leg in seen for ids in leg)
    assert sorted(seen[0]) == sorted(seen[1]), "both legs of a request carry the same id"
    assert len({ids[0] for ids in seen[0]}) == 2
    assert all(ids[0].startswith("mine-") for ids in seen[0])


@pytest.mark.parametrize("sent", ["x" * 129, "with space", 'quote"', "", "ünïcode"])
async def test_an_unfit_request_id_is_replaced(world: World, sent: str) -> None:
    answer = await ask(world, **{"X-Request-Id": sent})
    assert answer["x-request-id"] != sent
    assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", answer["x-request-id"])


def test_request_ids_are_unique_among_routers() -> None:
    made = [ids.internal("same") for ids in (RequestIds(), RequestIds()) for _ in range(1000)]
    assert len(set(made)) == 2000


async def test_the_clients_authorization_is_not_passed_on(world: World) -> None:
    await ask(world, Authorization="Bearer a client's key")
    assert sum(engine.state.authorization_seen for engine in world.engines.values()) == 0


async def test_hop_by_hop_headers_do_not_reach_an_engine(world: World) -> None:
    async with raw_client(world.url) as client:
        await client.post(
            "/v1/completions",
            COMPLETION,
            Connection="keep-alive, X-Secret",
            X_Secret="1",
            Keep_Alive="timeout=5",
            TE="trailers",
            Proxy_Authorization="Basic x",
            Upgrade="h2c",
            Accept_Encoding="gzip",
            Cookie="a=b",
        )
        assert (await client.answer())[0] == 200
    for headers in legs(world):
        names = {name.lower() for name in headers}
        assert names <= {
            "host",
            "user-agent",
            "content-type",
            "content-length",
            "x-request-id",
            "x-narwhal-fence",
            "x-narwhal-phase",
            "traceparent",
        }
        assert headers["Host"] != "router"
        assert len(headers.getall("Content-Length")) == 1


async def test_a_trace_goes_on_through_both_legs(world: World) -> None:
    await ask(world, traceparent=PARENT, tracestate="vendor=1")
    parsed = [headers["traceparent"].split("-") for headers in legs(world)]
    assert {parts[1] for parts in parsed} == {PARENT.split("-")[1]}
    spans = {parts[2] for parts in parsed}
    assert len(spans) == 2
    assert PARENT.split("-")[2] not in spans
    assert {parts[3] for parts in parsed} == {"01"}
    assert [headers["tracestate"] for headers in legs(world)] == ["vendor=1", "vendor=1"]


@pytest.mark.parametrize(
    "sent",
    [
        "nonsense",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        PARENT + "-more",
    ],
)
def test_a_malformed_trace_is_ignored_and_a_new_one_begun(sent: str) -> None:
    trace = Trace({"traceparent": sent, "tracestate": "vendor=1"})
    headers = leg_headers("id", trace, FencingToken(7), Leg.PREFILL, phase="admit")
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])
    assert headers["traceparent"].split("-")[1] not in sent.lower()
    assert "tracestate" not in headers


def test_a_trace_of_a_later_version_is_understood() -> None:
    trace = Trace({"traceparent": PARENT.replace("00-", "01-", 1) + "-more"})
    assert trace.trace_id == PARENT.split("-")[1]


async def test_engines_are_told_the_term_and_the_phase(world: World) -> None:
    await ask(world)
    prefill, decode = legs(world)
    token = str(world.plane.tenure.token)
    assert (prefill["X-Narwhal-Fence"], prefill["X-Narwhal-Phase"]) == (token, "admit")
    assert (decode["X-Narwhal-Fence"], decode["X-Narwhal-Phase"]) == (token, "decode")
