"""A ticket leads to the KV of one prompt, once, while its engine lives; misuse shows as it does on real engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from narwhal.testing.stub_engine import StubEngine, parse_fault
from narwhal.testing.stub_engine.tickets import Scrutiny, scrutinise
from tests.testing.wire import (
    CHAT,
    COMPLETION,
    WANT_TICKET,
    Engines,
    RawClient,
    post,
    stream,
    text_of,
    ticket_for,
    until,
)

BODIES = [pytest.param(COMPLETION, id="completion"), pytest.param(CHAT, id="chat")]
KEYS_OF_033 = {
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
    "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
    "remote_blocks_expiry_time", "remote_registration_generation", "transfer_mode", "remote_prefill_cached_tokens",
}  # fmt: skip


async def decode_with(
    http: aiohttp.ClientSession, decode: StubEngine, body: dict[str, Any], ticket: Any
) -> tuple[int, dict[str, Any]]:
    return await post(http, decode, {**body, "kv_transfer_params": ticket})


@pytest.mark.parametrize("body", BODIES)
async def test_the_prefill_answers_the_whole_ticket_of_nixl(
    http: aiohttp.ClientSession, prefill: StubEngine, body: dict[str, Any]
) -> None:
    leg = {**body, "max_tokens": 1, "kv_transfer_params": WANT_TICKET}
    _, document = await post(http, prefill, leg, headers={"X-Request-Id": "r-1"})
    ticket = document["kv_transfer_params"]
    assert ticket.keys() == KEYS_OF_033 | {"stub_url"}
    assert (ticket["do_remote_prefill"], ticket["do_remote_decode"]) == (True, False)
    assert ticket["remote_block_ids"] == [[1]]
    assert ticket["remote_engine_id"] == prefill.generation.engine_id
    assert ticket["remote_request_id"].startswith(document["id"] + "-")
    assert ticket["remote_num_tokens"] == document["usage"]["prompt_tokens"]
    assert document["choices"][0]["finish_reason"] == "length"


async def test_a_prefill_without_the_wish_or_with_a_stream_gives_no_ticket(
    http: aiohttp.ClientSession, prefill: StubEngine
) -> None:
    _, document = await post(http, prefill, {**COMPLETION, "max_tokens": 1})
    assert document["kv_transfer_params"] is None
    streamed = await stream(prefill, {**COMPLETION, "max_tokens": 1, "kv_transfer_params": WANT_TICKET})
    assert b"kv_transfer_params" not in streamed.content
    assert prefill.state.tickets_issued == 0


async def test_a_long_prompt_pins_as_many_blocks_as_it_needs(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    body = {"prompt": "word " * 366, "max_tokens": 3}
    ticket = await ticket_for(http, prefill, body)
    assert ticket["remote_block_ids"] == [[1, 2, 3]]
    assert (await decode_with(http, decode, body, ticket))[0] == 200


@pytest.mark.parametrize("body", BODIES)
async def test_text_over_a_ticket_equals_text_computed_alone(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine, body: dict[str, Any]
) -> None:
    _, alone = await post(http, decode, body)
    _, whole = await decode_with(http, decode, body, await ticket_for(http, prefill, body))
    streamed = await stream(decode, {**body, "kv_transfer_params": await ticket_for(http, prefill, body)})
    assert text_of(alone) == text_of(whole) == streamed.text
    assert whole["kv_transfer_params"] is None
    assert (decode.state.tickets_consumed, decode.state.decode_alone) == (2, 1)
    assert (prefill.state.tickets_issued, prefill.state.tickets_fetched) == (2, 2)


async def test_metrics_prove_that_the_kv_came_over(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    await decode_with(http, decode, COMPLETION, await ticket_for(http, prefill, COMPLETION))
    async with http.get(decode.url + "/metrics") as answer:
        text = await answer.text()
    assert 'source="external_kv_transfer"} 7.0' in text
    assert 'source="local_compute"} 0.0' in text


async def test_a_reused_ticket_is_answered_200_with_another_text_and_counted(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine, engines: Engines
) -> None:
    ticket = await ticket_for(http, prefill, COMPLETION)
    other = await engines.start(role="decode")
    _, good = await decode_with(http, decode, COMPLETION, ticket)
    status, wrong = await decode_with(http, other, COMPLETION, ticket)
    assert status == 200
    assert text_of(wrong) != text_of(good)
    assert (decode.state.tickets_reused, other.state.tickets_reused) == (0, 1)


async def test_an_expired_ticket_is_answered_200_with_another_text_and_counted(
    http: aiohttp.ClientSession, engines: Engines, decode: StubEngine
) -> None:
    prefill = await engines.start(role="prefill", kv_lease_s=0.05)
    ticket = await ticket_for(http, prefill, COMPLETION)
    await until(lambda: prefill.describe()["counters"]["tickets_lapsed"] == 1)
    status, wrong = await decode_with(http, decode, COMPLETION, ticket)
    _, alone = await post(http, decode, COMPLETION)
    assert status == 200
    assert text_of(wrong) != text_of(alone)
    assert decode.state.tickets_expired == 1
    async with http.get(prefill.url + "/metrics") as answer:
        assert 'nixl_num_kv_expired_reqs_total{engine="0",model_name="stub-model"} 1.0' in await answer.text()


async def test_pinned_kv_is_in_the_metrics_until_it_is_fetched(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, {"prompt": "word " * 500, "max_tokens": 1})
    assert prefill.ledger.pinned_tokens == 500
    await decode_with(http, decode, {"prompt": "word " * 500, "max_tokens": 1}, ticket)
    assert prefill.ledger.pinned_tokens == 0


async def test_an_unknown_request_id_is_accepted_with_another_text(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, COMPLETION)
    status, _ = await decode_with(http, decode, COMPLETION, {**ticket, "remote_request_id": "cmpl-never-seen"})
    assert (status, decode.state.tickets_unknown) == (200, 1)


async def test_the_ticket_of_another_prompt_is_answered_with_another_text(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, {**COMPLETION, "prompt": "some other prompt of equally many words"})
    _, wrong = await decode_with(http, decode, COMPLETION, ticket)
    _, alone = await post(http, decode, COMPLETION)
    assert text_of(wrong) != text_of(alone)
    assert decode.state.tickets_mismatched == 1


async def test_the_ticket_of_a_shorter_prompt_hangs_and_the_engine_lives(
    http: aiohttp.ClientSession, prefill: StubEngine, engines: Engines
) -> None:
    decode = await engines.start(role="decode", strict_death=True)
    ticket = await ticket_for(http, prefill, {**COMPLETION, "prompt": "short"})
    with pytest.raises(TimeoutError):
        await post(http, decode, {**COMPLETION, "kv_transfer_params": ticket}, timeout=aiohttp.ClientTimeout(total=0.1))
    await until(lambda: decode.state.aborted["decode"] == 1)
    assert (await post(http, decode, COMPLETION))[0] == 200


async def test_a_leg_that_renders_the_prompt_otherwise_does_not_fit_the_ticket(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, CHAT)
    await decode_with(http, decode, {**CHAT, "cache_salt": "only here"}, ticket)
    assert decode.state.tickets_mismatched == 1


LOST = ["stopped", "restarted", "wrong engine id", "stale_ticket"]


@pytest.mark.parametrize("how", LOST)
async def test_kv_of_a_lost_generation_is_500_and_a_fresh_ticket_works_at_once(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine, how: str
) -> None:
    if how == "stale_ticket":
        await prefill.set_faults([parse_fault("prefill:stale_ticket,times=1")])
    ticket = await ticket_for(http, prefill, COMPLETION)
    if how == "wrong engine id":
        ticket = {**ticket, "remote_engine_id": "4e81dc76-0000-4000-8000-000000000000"}
    if how == "stopped":
        await prefill.stop()
    if how == "restarted":
        await prefill.restart_generation()
    status, document = await decode_with(http, decode, COMPLETION, ticket)
    assert status == 500
    assert document == {
        "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert decode.state.kv_load_failures == 1
    if how == "stopped":
        await prefill.start()
    fresh = await ticket_for(http, prefill, COMPLETION)
    assert fresh["remote_engine_id"] == prefill.generation.engine_id
    assert (await decode_with(http, decode, COMPLETION, fresh))[0] == 200


@pytest.mark.parametrize(("body", "before"), [(COMPLETION, 0), (CHAT, 1)], ids=["completion", "chat"])
async def test_a_stream_whose_kv_is_lost_is_an_error_frame_and_done(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine, body: dict[str, Any], before: int
) -> None:
    ticket = await ticket_for(http, prefill, body)
    await prefill.restart_generation()
    answer = await stream(decode, {**body, "kv_transfer_params": ticket})
    assert answer.status == 200
    assert answer.terminated
    assert answer.chunks[before:] == [
        b'data: {"error": {"message": "Internal server error", "type": "InternalServerError",'
        b' "param": null, "code": 500}}\n\n',
        b"data: [DONE]\n\n",
    ]
    assert answer.finish_reasons == []


async def test_a_frozen_prefill_engine_leaves_the_decode_without_answer(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, COMPLETION)
    await prefill.set_faults([parse_fault("any:hang")])
    answer = asyncio.ensure_future(decode_with(http, decode, COMPLETION, ticket))
    await until(lambda: decode.state.resident["decode"] == 1)
    done, _ = await asyncio.wait([answer], timeout=0.1)
    assert not done
    await prefill.set_faults()
    assert (await answer)[0] == 200
    assert decode.state.tickets_consumed == 1


FATAL = [
    pytest.param({"remote_block_ids": []}, id="no blocks"),
    pytest.param({"remote_block_ids": [[]]}, id="an empty group"),
    pytest.param({"remote_block_ids": None}, id="null blocks"),
    pytest.param({"remote_block_ids": [["a"]]}, id="blocks that are no numbers"),
]


@pytest.mark.parametrize("change", FATAL)
async def test_a_malformed_ticket_is_500_and_counted(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine, change: dict[str, Any]
) -> None:
    ticket = await ticket_for(http, prefill, COMPLETION)
    status, document = await decode_with(http, decode, COMPLETION, {**ticket, **change})
    assert status == 500
    assert "EngineCore encountered an issue" in document["error"]["message"]
    assert decode.state.tickets_malformed == 1
    assert (await post(http, decode, COMPLETION))[0] == 200


@pytest.mark.parametrize("change", FATAL)
async def test_under_strict_death_a_malformed_ticket_kills_the_engine(
    http: aiohttp.ClientSession, prefill: StubEngine, engines: Engines, change: dict[str, Any]
) -> None:
    decode = await engines.start(role="decode", strict_death=True)
    ticket = await ticket_for(http, prefill, COMPLETION)
    status, _ = await decode_with(http, decode, COMPLETION, {**ticket, **change})
    assert status == 500
    await _is_refused(decode)
    await decode.restart_generation()
    assert (await post(http, decode, COMPLETION))[0] == 200


async def test_under_strict_death_only_the_flag_is_fatal_too(http: aiohttp.ClientSession, engines: Engines) -> None:
    decode = await engines.start(role="decode", strict_death=True)
    answer = await stream(decode, {**COMPLETION, "kv_transfer_params": {"do_remote_prefill": True}})
    assert b"EngineCore encountered an issue" in answer.chunks[0]
    assert answer.chunks[-1] == b"data: [DONE]\n\n"
    await _is_refused(decode)


async def test_under_strict_death_a_missing_host_kills_when_the_client_gives_up(
    http: aiohttp.ClientSession, prefill: StubEngine, engines: Engines
) -> None:
    decode = await engines.start(role="decode", strict_death=True)
    ticket = await ticket_for(http, prefill, COMPLETION)
    client = await asyncio.wait_for(
        RawClient.post(decode, {**COMPLETION, "stream": True, "kv_transfer_params": {**ticket, "remote_host": None}}),
        timeout=5,
    )
    assert decode.state.tickets_malformed == 1
    assert not decode.died.is_set()
    await client.close()
    await until(decode.died.is_set)
    await _is_refused(decode)


async def _is_refused(engine: StubEngine) -> None:
    async def refused() -> bool:
        try:
            async with aiohttp.ClientSession() as fresh, fresh.get(engine.url + "/health"):
                return False
        except aiohttp.ClientConnectorError:
            return True
        except aiohttp.ClientConnectionError:
            return False

    async with asyncio.timeout(2):
        while not await refused():
            await asyncio.sleep(0.01)


async def test_a_ticket_without_a_stub_behind_it_is_trusted_once(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, COMPLETION)
    del ticket["stub_url"]
    _, first = await decode_with(http, decode, COMPLETION, ticket)
    _, second = await decode_with(http, decode, COMPLETION, ticket)
    _, alone = await post(http, decode, COMPLETION)
    assert text_of(first) == text_of(alone) != text_of(second)
    assert (decode.state.tickets_consumed, decode.state.tickets_reused) == (1, 1)


async def test_token_ids_in_the_ticket_replace_the_prompt(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    leg = {**CHAT, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": WANT_TICKET}
    _, document = await post(http, prefill, leg)
    ticket = {**document["kv_transfer_params"], "prompt_token_ids": document["prompt_token_ids"]}
    _, whole = await decode_with(http, decode, CHAT, ticket)
    _, alone = await post(http, decode, CHAT)
    assert text_of(whole) == text_of(alone)


VARIANTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "null": lambda document: document["kv_transfer_params"] is None,
    "absent": lambda document: "kv_transfer_params" not in document,
    "missing_key": lambda document: "remote_request_id" not in document["kv_transfer_params"],
    "empty_blocks": lambda document: document["kv_transfer_params"]["remote_block_ids"] == [],
    "empty_group": lambda document: document["kv_transfer_params"]["remote_block_ids"] == [[]],
    "not_a_dict": lambda document: document["kv_transfer_params"] == "ticket",
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_bad_ticket_fault_spoils_the_ticket_of_a_200(
    http: aiohttp.ClientSession, engines: Engines, variant: str
) -> None:
    prefill = await engines.start(f"prefill:bad_ticket={variant},times=1", role="prefill")
    leg = {**COMPLETION, "max_tokens": 1, "kv_transfer_params": WANT_TICKET}
    status, document = await post(http, prefill, leg)
    assert status == 200
    assert VARIANTS[variant](document)
    assert isinstance(await ticket_for(http, prefill, COMPLETION), dict)


@pytest.mark.parametrize(
    ("change", "tokens", "verdict"),
    [
        ({}, 7, Scrutiny.GOOD),
        ({"remote_block_ids": [4, 5]}, 200, Scrutiny.GOOD),
        ({"remote_block_ids": [[4]]}, 200, Scrutiny.FATAL),
        ({"remote_block_ids": "blocks"}, 7, Scrutiny.FATAL),
        ({"remote_engine_id": None}, 7, Scrutiny.PARKED),
        ({"remote_request_id": ""}, 7, Scrutiny.PARKED),
        ({"remote_port": None}, 7, Scrutiny.PARKED),
        ({"remote_num_tokens": 6}, 7, Scrutiny.SHORT),
        ({"remote_num_tokens": 200}, 201, Scrutiny.FATAL),
    ],
)
def test_scrutiny_tells_apart_what_real_engines_do(change: dict[str, Any], tokens: int, verdict: Scrutiny) -> None:
    good = {
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 5600,
    }
    assert scrutinise({**good, **change}, tokens) is verdict


async def test_behind_a_wildcard_the_ticket_names_the_address_that_was_used(
    http: aiohttp.ClientSession, engines: Engines, decode: StubEngine
) -> None:
    prefill = await engines.start(role="prefill", host="0.0.0.0")
    address = prefill.url.replace("127.0.0.1", "localhost")
    leg = {**COMPLETION, "max_tokens": 1, "kv_transfer_params": WANT_TICKET}
    async with http.post(address + "/v1/completions", json=leg) as answer:
        ticket = json.loads(await answer.read())["kv_transfer_params"]
    assert (ticket["stub_url"], ticket["remote_host"]) == (address, "localhost")
    assert (await decode_with(http, decode, COMPLETION, ticket))[0] == 200
