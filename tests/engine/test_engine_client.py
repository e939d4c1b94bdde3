"""The data pool: legs over real sockets, kept connections that die, deadlines, cancellation, and our own limits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from narwhal.config import parse_config
from narwhal.core.faults import (
    DeadlinePassed,
    EngineFault,
    EngineTimeout,
    EngineUnreachable,
    PoolFull,
    StreamBroken,
)
from narwhal.core.vocabulary import EngineId
from narwhal.engine.client import EngineClient
from narwhal.ports import (
    ConnectRefused,
    ConnectTimedOut,
    DecodeStream,
    EngineAddress,
    EngineRefusal,
    KvTicket,
    LegCall,
    Legs,
    StreamSilent,
    WholeAnswer,
)
from tests.engine.scripted import Peer, scripted

RESULT = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
TICKET = {
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 5600,
}
PREFILLED = json.dumps({**RESULT, "kv_transfer_params": TICKET}).encode()
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str, finish: str | None = None) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}).encode()


DONE = b"data: [DONE]\n\n"


def client(**engine: Any) -> EngineClient:
    return EngineClient(
        parse_config(
            {
                "serving": {
                    "models": ["m"],
                    "max_connections": engine.pop("max_connections", 4),
                    "first_token_timeout_s": engine.pop("first_token_timeout_s", 60.0),
                },
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
async def engines() -> AsyncIterator[EngineClient]:
    built = client()
    yield built
    await built.aclose()


def at(url: str) -> EngineAddress:
    return EngineAddress(EngineId("e1"), url)


def call(*, seconds: float = 5.0, choices: int = 1) -> LegCall:
    body = {"model": "m", "prompt": "x"}
    deadline = asyncio.get_running_loop().time() + seconds
    return LegCall("/v1/completions", body, json.dumps(body).encode(), {}, deadline, choices)


def ticket() -> KvTicket:
    now = asyncio.get_running_loop().time()
    return KvTicket(json.dumps(TICKET).encode(), engine_id="e", issued_at=now, max_age_s=20.0)


async def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


class Sink:
    """Takes bytes; `full` makes it ask for a pause."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.full = False
        self.drained = asyncio.Event()

    def write(self, data: bytes) -> bool:
        self.parts.append(data)
        return not self.full

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    async def drain(self) -> None:
        await self.drained.wait()
        self.full = False


async def stream_of(
    engines: EngineClient, url: str, *, first_token_s: float = 2.0, silence_s: float = 2.0, seconds: float = 5.0
) -> DecodeStream | EngineRefusal:
    with engines.data.reserve() as legs:
        return await legs.decode_stream(
            at(url), call(seconds=seconds), None, first_token_timeout_s=first_token_s, silence_timeout_s=silence_s
        )


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


async def test_a_stream_is_passed_on_byte_for_byte(engines: EngineClient) -> None:
    frames = [token("a"), b": keep-alive\n\n", token("é漢🐋"), token("", "stop"), DONE]
    wire = b"".join(map(chunk, frames)) + b"0\r\n\r\n"

    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for i in range(0, len(wire), 7):
            await peer.send(wire[i : i + 7])
        await peer.gone()

    async with scripted(engine) as server:
        stream = await stream_of(engines, server.url)
        assert not isinstance(stream, EngineRefusal)
        sink = Sink()
        await stream.pipe(sink)
        assert stream.head + sink.data == b"".join(frames)
        assert stream.head.startswith(token("a"))
        stream.close()


async def broken(
    engines: EngineClient, *sends: bytes, cut: bool = True, **deadlines: float
) -> tuple[EngineFault, bytes]:
    """What a stream that is answered with `sends` fails with, and what had been passed on before."""

    async def engine(peer: Peer) -> None:
        await peer.request()
        for data in sends:
            await peer.send(data)
        if not cut:
            await peer.gone()

    sink = Sink()
    async with scripted(engine) as server:
        try:
            stream = await stream_of(engines, server.url, **deadlines)
        except EngineFault as error:
            return error, b""
        assert not isinstance(stream, EngineRefusal)
        try:
            await stream.pipe(sink)
        except EngineFault as error:
            return error, stream.head + sink.data
        finally:
            stream.close()
    raise AssertionError("the stream did not break")


async def test_a_stream_that_is_cut_after_tokens_is_broken(engines: EngineClient) -> None:
    error, passed = await broken(engines, STREAM_HEAD, chunk(token("a")), chunk(token("b")), chunk(b"data: {half"))
    assert isinstance(error, StreamBroken)
    assert passed in (b"", token("a"), token("a") + token("b")), "only whole frames, or nothing if it broke at once"


async def test_a_stream_that_ends_cleanly_without_finish_is_broken(engines: EngineClient) -> None:
    error, _ = await broken(engines, STREAM_HEAD, chunk(token("a")), b"0\r\n\r\n", cut=False)
    assert type(error) is StreamBroken
    assert "before 1 of 1 choices had finished" in str(error)


async def test_an_error_frame_before_the_first_token_lets_nothing_out(engines: EngineClient) -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    failed = b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n'
    error, passed = await broken(engines, STREAM_HEAD, chunk(role), chunk(failed), chunk(DONE), b"0\r\n\r\n", cut=False)
    assert (type(error), passed) == (StreamBroken, b"")
    assert "KV load failed" in str(error)


async def test_comments_do_not_move_the_first_token_deadline(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b": keep-alive\n\n"))
            await asyncio.sleep(0.02)

    async with scripted(engine) as server:
        with pytest.raises(StreamSilent, match="no token in time"):
            await stream_of(engines, server.url, first_token_s=0.2)


async def test_comments_do_not_break_the_silence(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(token("a")))
        while True:
            await peer.send(chunk(b": keep-alive\n\n"))
            await asyncio.sleep(0.02)

    async with scripted(engine) as server:
        stream = await stream_of(engines, server.url, first_token_s=5, silence_s=0.2)
        assert not isinstance(stream, EngineRefusal)
        with pytest.raises(StreamSilent, match="fell silent"):
            await stream.pipe(Sink())
        stream.close()


async def test_tokens_break_the_silence(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(10):
            await peer.send(chunk(token("a")))
            await asyncio.sleep(0.05)
        await peer.send(chunk(token("", "stop")) + chunk(DONE) + b"0\r\n\r\n")
        await peer.gone()

    async with scripted(engine) as server:
        stream = await stream_of(engines, server.url, silence_s=0.3)
        assert not isinstance(stream, EngineRefusal)
        await stream.pipe(Sink())
        stream.close()


async def test_a_stream_is_complete_at_its_marker_even_if_the_connection_then_breaks(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(token("a")) + chunk(token("", "stop")) + chunk(DONE))
        peer.reset()

    async with scripted(engine) as server:
        stream = await stream_of(engines, server.url)
        assert not isinstance(stream, EngineRefusal)
        await stream.pipe(Sink())
        stream.close()


async def test_a_stream_without_length_ends_with_its_connection(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        await peer.send(head + token("a") + token("", "stop") + DONE)

    async with scripted(engine) as server:
        stream = await stream_of(engines, server.url)
        assert not isinstance(stream, EngineRefusal)
        await stream.pipe(Sink())
        stream.close()


async def test_a_refused_stream_brings_the_engines_own_words(engines: EngineClient) -> None:
    body = b'{"error":{"message":"context_length exceeded","type":"BadRequestError","param":null,"code":400}}'

    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.answer(body, status=400)
        await peer.gone()

    async with scripted(engine) as server:
        assert await stream_of(engines, server.url) == EngineRefusal(400, body)


async def test_one_document_in_place_of_a_stream_is_a_failure(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.answer(json.dumps(RESULT).encode())
        await peer.gone()

    async with scripted(engine) as server:
        with pytest.raises(EngineFault, match="with one document"):
            await stream_of(engines, server.url)


async def test_a_slow_client_stops_the_engine_and_is_not_the_engines_silence(engines: EngineClient) -> None:
    sent = 0
    big = token("x" * 100_000)

    async def engine(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(400):
            await peer.send(chunk(big))
            sent += 1
        await peer.send(chunk(token("", "stop")) + chunk(DONE) + b"0\r\n\r\n")
        await peer.gone()

    async with scripted(engine) as server:
        stream = await stream_of(engines, server.url, silence_s=0.2)
        assert not isinstance(stream, EngineRefusal)
        sink = Sink()
        sink.full = True
        piping = asyncio.ensure_future(stream.pipe(sink))
        await asyncio.sleep(0.5)
        assert sent < 390, "the engine was not slowed down"
        assert not piping.done(), "waiting for the client was taken for the engine's silence"
        sink.drained.set()
        await piping
        assert len(stream.head + sink.data) == 400 * len(big) + len(token("", "stop") + DONE)
        stream.close()


async def test_a_connection_that_carried_a_stream_is_kept(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(STREAM_HEAD + chunk(token("a")) + chunk(token("", "stop")) + chunk(DONE))
            await peer.send(b"0\r\n\r\n")

    async with scripted(engine) as server:
        for _ in range(3):
            stream = await stream_of(engines, server.url)
            assert not isinstance(stream, EngineRefusal)
            await stream.pipe(Sink())
            stream.close()
        assert server.accepted == 1


async def test_an_answer_that_is_not_http_is_the_engines_failure(engines: EngineClient) -> None:
    async def engine(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"SSH-2.0-OpenSSH\r\n\r\n")
        await peer.gone()

    async with scripted(engine) as server:
        with engines.data.reserve() as legs, pytest.raises(EngineUnreachable, match="not HTTP"):
            await legs.prefill(at(server.url), call(), timeout_s=2)
