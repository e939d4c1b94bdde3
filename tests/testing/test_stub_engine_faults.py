"""Every scripted fault does on the wire what it says, to the legs it names, as often as it was told, and heals."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import pytest

from narwhal.testing.stub_engine import StubEngine, parse_fault
from tests.testing.wire import (
    COMPLETION,
    WANT_TICKET,
    Engines,
    RawClient,
    path_of,
    post,
    stream,
    text_of,
    ticket_for,
    until,
)

PREFILL_LEG = {**COMPLETION, "max_tokens": 1, "kv_transfer_params": WANT_TICKET}


async def health(engine: StubEngine, *, timeout_s: float = 5.0) -> int:
    """Ask /health over a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as fresh, fresh.get(engine.url + "/health") as answer:
        return answer.status


async def test_refuse_closes_the_door_and_reopens_it_on_the_same_port(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start("refuse")
    with pytest.raises(aiohttp.ClientConnectorError):
        await health(engine)
    await engine.set_faults()
    assert await health(engine) == 200
    before = engine.url
    await post(http, engine, COMPLETION)
    await engine.set_faults([parse_fault("any:refuse")])
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(http, engine, COMPLETION)  # over the pooled connection, which was closed
    with pytest.raises(aiohttp.ClientConnectorError):
        await post(http, engine, COMPLETION)
    await engine.set_faults()
    assert engine.url == before
    assert (await post(http, engine, COMPLETION))[0] == 200


async def test_refuse_lets_running_streams_end(engines: Engines) -> None:
    engine = await engines.start(itl_ms=5)
    client = await RawClient.post(engine, {**COMPLETION, "max_tokens": 20, "stream": True})
    await engine.set_faults([parse_fault("refuse")])
    answer = await client.rest()
    assert answer.finish_reasons == ["length"]
    assert answer.terminated


async def test_a_refusing_prefill_engine_does_not_give_its_kv_either(
    http: aiohttp.ClientSession, prefill: StubEngine, decode: StubEngine
) -> None:
    ticket = await ticket_for(http, prefill, COMPLETION)
    await prefill.set_faults([parse_fault("refuse")])
    assert (await post(http, decode, {**COMPLETION, "kv_transfer_params": ticket}))[0] == 500


async def test_refuse_rst_resets_so_many_connections_and_heals(engines: Engines) -> None:
    engine = await engines.start("refuse=rst,times=2")
    for _ in range(2):
        # A client library would quietly try a GET again on a second connection.
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(engine.url).port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
    assert await health(engine) == 200
    assert engine.book.fired["refuse"] == 2


async def test_a_closed_door_can_be_opened_through_the_second_one(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start(admin_port=0)
    assert engine.admin_url is not None
    async with http.post(engine.url + "/stub/faults", json="refuse") as answer:
        assert answer.status == 200
    with pytest.raises(aiohttp.ClientConnectorError):
        await health(engine)
    async with http.delete(engine.admin_url + "/stub/faults") as answer:
        assert await answer.json() == []
    assert await health(engine) == 200


async def test_hang_never_answers_and_answers_after_all_once_it_is_lifted(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start("decode:hang")
    answer = asyncio.ensure_future(post(http, engine, COMPLETION))
    await until(lambda: engine.state.resident["decode"] == 1)
    done, _ = await asyncio.wait([answer], timeout=0.05)
    assert not done
    assert await health(engine) == 200
    await engine.set_faults()
    assert (await answer)[0] == 200


async def test_health_can_hang_alone(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("health:hang")
    with pytest.raises(TimeoutError):
        await health(engine, timeout_s=0.1)
    assert (await post(http, engine, COMPLETION))[0] == 200


async def test_health_can_be_slow_or_503(engines: Engines) -> None:
    engine = await engines.start("health:delay=80")
    before = asyncio.get_running_loop().time()
    assert await health(engine) == 200
    assert asyncio.get_running_loop().time() - before >= 0.08
    await engine.set_faults([parse_fault("health:status=503")])
    async with aiohttp.ClientSession() as session, session.get(engine.url + "/health") as answer:
        assert (answer.status, await answer.read()) == (503, b"")


async def test_reset_reads_the_request_and_resets_the_connection(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("reset,times=1")
    with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
        await post(http, engine, COMPLETION)
    assert engine.state.requests["decode"] == 1
    await until(lambda: engine.state.severed == 1)
    assert engine.state.aborted["decode"] == 0
    assert (await post(http, engine, COMPLETION))[0] == 200


@pytest.mark.parametrize(
    ("spec", "status", "kind"),
    [
        ("decode:status=500", 500, "InternalServerError"),
        ("decode:status=503", 503, "ServiceUnavailableError"),
        ("decode:status=429", 429, "RateLimitError"),
        ("decode:status=408", 408, "BadRequestError"),
    ],
)
async def test_status_answers_an_error_document(
    http: aiohttp.ClientSession, engines: Engines, spec: str, status: int, kind: str
) -> None:
    engine = await engines.start(spec)
    got, document = await post(http, engine, COMPLETION)
    assert (got, document["error"]["type"], document["error"]["code"]) == (status, kind, status)
    assert (await post(http, engine, PREFILL_LEG))[0] == 200


async def test_status_can_carry_retry_after_and_a_body(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start('any:status=503,retry_after_s=2,body={"error": "busy, try later"}')
    async with http.post(engine.url + path_of(COMPLETION), json=COMPLETION) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert await answer.json() == {"error": "busy, try later"}
    await engine.set_faults([parse_fault("any:status=502,body=Bad Gateway")])
    async with http.post(engine.url + path_of(COMPLETION), json=COMPLETION) as answer:
        assert (answer.content_type, await answer.text()) == ("text/plain", "Bad Gateway")


async def test_delay_holds_the_answer_back(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("prefill:delay=80")
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert (await post(http, engine, PREFILL_LEG))[0] == 200
    assert loop.time() - before >= 0.08


async def test_info_faults_meet_models_and_metrics_and_any_meets_all(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start("info:status=500")
    for path in ("/v1/models", "/metrics", "/version"):
        async with http.get(engine.url + path) as answer:
            assert answer.status == 500
    assert await health(engine) == 200
    await engine.set_faults([parse_fault("any:status=500")])
    assert await health(engine) == 500
    async with http.get(engine.url + "/stub/state") as answer:
        assert answer.status == 200


async def test_other_model_serves_another_name(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("other_model=impostor")
    async with http.get(engine.url + "/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "impostor"
    assert (await post(http, engine, {**COMPLETION, "model": "stub-model"}))[0] == 404
    status, document = await post(http, engine, {**COMPLETION, "model": "impostor"})
    assert (status, document["model"]) == (200, "impostor")
    await engine.set_faults()
    assert (await post(http, engine, {**COMPLETION, "model": "stub-model"}))[0] == 200


async def test_restart_loses_all_connections_and_answers_as_a_new_process(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start(itl_ms=10, role="prefill")
    before = engine.generation
    running = await RawClient.post(engine, {**COMPLETION, "max_tokens": 1000, "stream": True})
    await engine.set_faults([parse_fault("prefill:restart")])
    with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
        await post(http, engine, PREFILL_LEG)
    assert not (await running.rest()).terminated
    await until(lambda: engine.state.severed == 2)
    assert engine.state.aborted.total() == 0
    after = engine.generation
    assert after.number == before.number + 1
    assert after.engine_id != before.engine_id
    assert after.start_time >= before.start_time + 0.01
    assert (await ticket_for(http, engine, COMPLETION))["remote_engine_id"] == after.engine_id
    async with http.get(engine.url + "/metrics") as answer:
        (line,) = [line for line in (await answer.text()).splitlines() if line.startswith("process_start_time")]
    assert float(line.split()[1]) == pytest.approx(after.start_time, abs=0.006)


async def test_restart_over_the_admin_endpoint_answers_the_new_generation(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start()
    async with http.post(engine.url + "/stub/restart") as answer:
        assert (await answer.json())["generation"]["number"] == 2


async def test_a_fixed_engine_id_survives_a_restart(engines: Engines) -> None:
    engine = await engines.start(engine_id="prefill-0")
    await engine.restart_generation()
    assert (engine.generation.number, engine.generation.engine_id) == (2, "prefill-0")


async def test_a_stopped_engine_comes_back_at_its_port_as_a_new_generation(engines: Engines) -> None:
    engine = await engines.start()
    before = engine.url
    await engine.stop()
    await engine.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await health(engine)
    assert await engine.start() == before
    assert engine.generation.number == 2
    assert await health(engine) == 200


async def test_paused_holds_new_requests_freezes_streams_and_loses_nothing(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start(itl_ms=5)
    running = await RawClient.post(engine, {**COMPLETION, "max_tokens": 30, "stream": True})
    await running.read_chunk()
    await engine.set_faults([parse_fault("paused")])
    waiting = asyncio.ensure_future(post(http, engine, COMPLETION))
    await until(lambda: engine.state.waiting == 2)
    assert await health(engine) == 200
    async with http.get(engine.url + "/is_paused") as answer:
        assert await answer.json() == {"is_paused": True}
    await engine.set_faults()
    assert (await waiting)[0] == 200
    assert (await running.rest()).finish_reasons == ["length"]
    assert engine.state.waiting == 0


async def test_times_every_and_skip_say_which_requests_are_met(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:status=500,skip=1,every=2,times=2")
    statuses = [(await post(http, engine, COMPLETION))[0] for _ in range(9)]
    assert statuses == [200, 200, 500, 200, 500, 200, 200, 200, 200]
    assert engine.book.fired["status"] == 2


async def test_a_fault_on_one_leg_neither_meets_nor_counts_the_other(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start("prefill:status=500,times=1")
    assert (await post(http, engine, COMPLETION))[0] == 200
    assert (await post(http, engine, PREFILL_LEG))[0] == 500
    assert (await post(http, engine, PREFILL_LEG))[0] == 200


async def test_several_faults_act_together(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:delay=50", "decode:error_frame=1")
    loop = asyncio.get_running_loop()
    before = loop.time()
    answer = await stream(engine, COMPLETION)
    assert loop.time() - before >= 0.05
    assert len(answer.chunks) == 3


async def test_setting_faults_again_arms_them_again_and_does_not_free_what_hangs_in_them(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start("decode:hang,times=1")
    hanging = asyncio.ensure_future(post(http, engine, COMPLETION))
    await until(lambda: engine.state.resident["decode"] == 1)
    assert (await post(http, engine, COMPLETION))[0] == 200
    await engine.set_faults([parse_fault("decode:hang,times=1")])
    again = asyncio.ensure_future(post(http, engine, COMPLETION))
    await until(lambda: engine.state.resident["decode"] == 2)
    assert not hanging.done()
    await engine.set_faults()
    assert (await hanging)[0] == (await again)[0] == 200


async def test_the_admin_endpoint_takes_objects_strings_and_lists(
    http: aiohttp.ClientSession, decode: StubEngine
) -> None:
    faults = ["decode:delay=1", {"kind": "status", "leg": "health", "status": 503, "times": 3}]
    async with http.post(decode.url + "/stub/faults", json=faults) as answer:
        posted = await answer.json()
    assert posted == [
        {"kind": "delay", "leg": "decode", "every": 1, "skip": 0, "delay_ms": 1.0, "matched": 0, "fired": 0},
        {
            "kind": "status", "leg": "health", "times": 3, "every": 1, "skip": 0, "status": 503,
            "matched": 0, "fired": 0,
        },
    ]  # fmt: skip
    assert await health(decode) == 503
    async with http.get(decode.url + "/stub/faults") as answer:
        assert [(one["matched"], one["fired"]) for one in await answer.json()] == [(0, 0), (1, 1)]
    async with http.get(decode.url + "/stub/state") as answer:
        state = await answer.json()
    assert state["faults_fired"] == {"status": 1}
    async with http.post(decode.url + "/stub/faults", json={"kind": "reset"}) as answer:
        assert [one["kind"] for one in await answer.json()] == ["reset"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "must be JSON"), (b'"explode"', "unknown kind 'explode'"), (b"[3]", "an object or a string")],
)
async def test_a_bad_fault_is_refused_and_changes_nothing(
    http: aiohttp.ClientSession, engines: Engines, content: bytes, words: str
) -> None:
    engine = await engines.start("health:status=503")
    async with http.post(engine.url + "/stub/faults", data=content) as answer:
        document = await answer.json()
    assert answer.status == 400
    assert words in document["error"]["message"]
    assert await health(engine) == 503


async def test_the_first_of_two_faults_of_one_kind_wins(http: aiohttp.ClientSession, engines: Engines) -> None:
    engine = await engines.start("decode:status=500,times=1", "decode:status=503")
    assert [(await post(http, engine, COMPLETION))[0] for _ in range(2)] == [500, 503]


async def test_an_engine_answers_the_same_after_every_fault_has_healed(
    http: aiohttp.ClientSession, engines: Engines
) -> None:
    engine = await engines.start()
    _, before = await post(http, engine, COMPLETION)
    for spec in ("decode:reset", "decode:cut=1", "decode:error_frame", "restart", "refuse=rst,times=1"):
        await engine.set_faults([parse_fault(spec)])
        with suppress(aiohttp.ClientError):
            await post(http, engine, COMPLETION)
        await engine.set_faults()
        _, after = await post(http, engine, COMPLETION)
        assert text_of(after) == text_of(before), spec
