"""The data pool: legs over real sockets, kept connections that die, deadlines, cancellation, and our own limits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from narwhal.core.faults import (
    DeadlinePassed,
    EngineTimeout,
    EngineUnreachable,
    PoolFull,
)
from narwhal.engine.client import EngineClient
from narwhal.ports import (
    ConnectRefused,
    ConnectTimedOut,
    EngineAddress,
    KvTicket,
    Legs,
    WholeAnswer,
)
from tests.engine.legs import (
    PREFILLED,
    RESULT,
    TICKET,
    at,
    call,
    client,
    closed_port,
    stream_of,
    ticket,
)
from tests.engine.scripted import Peer, scripted


async def test_a_prefill_returns_the_ticket_that_the_decode_carries(engines: EngineClient) -> None:
    bodies: list[Any] = []

    async def engine(peer: Peer) -> None:
        bodies.append(json.loads(await peer.request()))
        await peer.answer(PREFILLED)
        bodies.append(json.loads(await peer.request()))
        await peer.answer(json.dumps(RESULT).encode())
        await peer.gone()

    async with scripted(engine) as server:
        with engines.data.reserve() as legs:
            got = await legs.prefill(at(server.url), call(), timeout_s=2)
            assert isinstance(got, KvTicket)
            answer = await legs.decode(at(server.url), call(), got)
        assert isinstance(answer, WholeAnswer)
        assert bodies[1]["kv_transfer_params"] == TICKET
        assert server.accepted == 1, "both legs used one kept connection"


async def test_a_full_pool_says_so_at_once_and_asks_no_engine(engines: EngineClient) -> None:
    with engines.data.reserve(), engines.data.reserve(), engines.data.reserve(), engines.data.reserve():
        with pytest.raises(PoolFull) as error:
            engines.data.reserve()
        assert error.value.failure_class is None
    assert engines.data.in_use == 0
    engines.data.reserve().__exit__(None, None, None)


async def test_a_refused_connection_reached_nobody(engines: EngineClient) -> None:
    with engines.data.reserve() as legs, pytest.raises(ConnectRefused):
        await legs.prefill(at(await closed_port()), call(), timeout_s=2)


async def test_a_host_that_does_not_answer_the_connection_times_out() -> None:
    engines = client(connect_timeout_s=0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        with engines.data.reserve() as legs, pytest.raises(ConnectTimedOut):
            await legs.prefill(at(f"http://127.0.0.1:{port}"), call(), timeout_s=2)
        for filler in fillers:
            filler.close()
    await engines.aclose()


async def once_then_reset(peer: Peer) -> None:
    """The first connection answers once and dies with the next request; later connections answer."""
    await peer.request()
    await peer.answer(PREFILLED)
    if peer.number == 1:
        await peer.request()
        peer.reset()
    else:
        await peer.gone()


async def test_a_prefill_on_a_kept_connection_that_died_is_sent_again_once(engines: EngineClient) -> None:
    async with scripted(once_then_reset) as server:
        with engines.data.reserve() as legs:
            for _ in range(2):
                assert isinstance(await legs.prefill(at(server.url), call(), timeout_s=2), KvTicket)
        assert server.accepted == 2


async def test_a_decode_is_never_sent_again(engines: EngineClient) -> None:
    async with scripted(once_then_reset) as server:
        with engines.data.reserve() as legs:
            await legs.prefill(at(server.url), call(), timeout_s=2)
            with pytest.raises(EngineUnreachable):
                await legs.decode(at(server.url), call(), ticket())
        assert server.accepted == 1


async def test_a_prefill_on_a_new_connection_is_not_sent_again(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with scripted(engine) as server:
        with engines.data.reserve() as legs, pytest.raises(EngineUnreachable):
            await legs.prefill(at(server.url), call(), timeout_s=2)
        assert server.accepted == 1


async def test_an_idle_connection_is_closed_before_the_engine_would(engines: EngineClient) -> None:
    short = client(keepalive_s=0.1)

    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.answer(PREFILLED)
        await peer.gone()

    async with scripted(engine) as server:
        with short.data.reserve() as legs:
            await legs.prefill(at(server.url), call(), timeout_s=2)
        async with asyncio.timeout(2):
            while server.open:
                await asyncio.sleep(0.01)
        with short.data.reserve() as legs:
            await legs.prefill(at(server.url), call(), timeout_s=2)
        assert server.accepted == 2
        await short.aclose()


async def hang(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def test_a_prefill_without_an_answer_times_out_and_its_connection_is_closed(engines: EngineClient) -> None:
    async with scripted(hang) as server:
        with engines.data.reserve() as legs, pytest.raises(EngineTimeout):
            await legs.prefill(at(server.url), call(), timeout_s=0.1)
        async with asyncio.timeout(1):
            while server.open:
                await asyncio.sleep(0.01)


async def test_the_requests_own_deadline_is_not_evidence(engines: EngineClient) -> None:
    async with scripted(hang) as server:
        with engines.data.reserve() as legs:
            with pytest.raises(DeadlinePassed):
                await legs.prefill(at(server.url), call(seconds=0.1), timeout_s=5)
            with pytest.raises(DeadlinePassed):
                await legs.decode(at(server.url), call(seconds=0.1), None)
        with pytest.raises(DeadlinePassed):
            await stream_of(engines, server.url, seconds=0.1)


async def test_a_whole_answer_that_never_comes_is_evidence_if_the_leg_had_the_time_of_a_first_token() -> None:
    """It has no deadline of its own; a hung engine would otherwise go unnoticed by clients that do not stream."""
    patient = client(first_token_timeout_s=0.2)
    async with scripted(hang) as server:
        with patient.data.reserve() as legs:
            with pytest.raises(EngineTimeout):
                await legs.decode(at(server.url), call(seconds=0.4), None)
            with pytest.raises(DeadlinePassed):
                await legs.decode(at(server.url), call(seconds=0.1), None)
    await patient.aclose()


LEGS: dict[str, Callable[[Legs, EngineAddress], Awaitable[object]]] = {
    "prefill": lambda legs, engine: legs.prefill(engine, call(), timeout_s=5),
    "decode": lambda legs, engine: legs.decode(engine, call(), None),
    "stream": lambda legs, engine: legs.decode_stream(
        engine, call(), None, first_token_timeout_s=5, silence_timeout_s=5
    ),
}


@pytest.mark.parametrize("leg", LEGS)
async def test_a_cancelled_leg_closes_its_connection_at_once(engines: EngineClient, leg: str) -> None:
    async with scripted(hang) as server:
        with engines.data.reserve() as legs:
            task = asyncio.ensure_future(LEGS[leg](legs, at(server.url)))
            async with asyncio.timeout(2):
                while server.open == 0:
                    await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(1):
            while server.open:
                await asyncio.sleep(0.005)
