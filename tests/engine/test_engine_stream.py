"""Streaming decode legs: what is passed on, what breaks them, and what they cost."""

from __future__ import annotations

import asyncio
import json

import pytest

from narwhal.core.faults import (
    EngineFault,
    EngineUnreachable,
    StreamBroken,
)
from narwhal.engine.client import EngineClient
from narwhal.ports import (
    EngineRefusal,
    StreamSilent,
)
from tests.engine.legs import (
    DONE,
    RESULT,
    STREAM_HEAD,
    Sink,
    at,
    call,
    chunk,
    stream_of,
    token,
)
from tests.engine.scripted import Peer, scripted


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
