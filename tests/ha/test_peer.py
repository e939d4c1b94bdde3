"""What one look at another router's /ready says, over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest

from narwhal.core.vocabulary import PeerSign
from narwhal.ha.peer import ANSWER_BYTES_MAX, HttpRouterPeer, read_ready
from narwhal.ports import PeerLook

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Handler: TypeAlias = Callable[[Reader, Writer], Awaitable[None]]


@asynccontextmanager
async def listener(handler: Handler) -> AsyncIterator[str]:
    """A server that answers each connection as `handler` does; yields its address."""
    open_now: dict[asyncio.Task[None], Writer] = {}

    async def serve(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now[task] = writer
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            del open_now[task]
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in open_now.values():
            writer.transport.abort()
        if open_now:
            assert not (await asyncio.wait(open_now, timeout=10))[1], "a handler does not end"


@pytest.fixture
async def peer() -> AsyncIterator[HttpRouterPeer]:
    peer = HttpRouterPeer()
    yield peer
    await peer.aclose()


def ready_body(**fields: Any) -> dict[str, Any]:
    return {
        "status": "ok",
        "reason": "active",
        "control_ready": True,
        "role": "active",
        "router": "router-a",
        "fencing_token": 7,
        "cluster": "default",
        **fields,
    }


def answer(status: int, body: bytes, *, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def says(status: int, body: bytes, *, headers: str = "") -> Handler:
    async def handler(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(status, body, headers=headers))
        await writer.drain()

    return handler


def as_json(**fields: Any) -> bytes:
    return json.dumps(ready_body(**fields)).encode()


@pytest.mark.parametrize(
    ("status", "fields", "sign", "token"),
    [
        (200, {}, PeerSign.READY, 7),
        (200, {"role": "solo"}, PeerSign.READY, 7),
        (503, {"reason": "monitoring degraded: health OSError", "control_ready": False}, PeerSign.DEGRADED, 7),
        (503, {"reason": "no eligible prefill engine"}, PeerSign.NO_CAPACITY, 7),
        (503, {"reason": "stopping"}, PeerSign.NO_CAPACITY, 7),
        (503, {"role": "fenced", "reason": "fenced: lease", "control_ready": False}, PeerSign.FENCED, 7),
        (503, {"role": "standby", "reason": "standby"}, PeerSign.FENCED, 7),
        (503, {"role": "standby", "reason": "standby", "fencing_token": 0}, PeerSign.FENCED, None),
        (503, {"role": "standby", "reason": "standby", "fencing_token": None}, PeerSign.FENCED, None),
        (500, {"control_ready": True}, PeerSign.DEGRADED, 7),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_each_shape_of_an_answer_has_its_sign(
    peer: HttpRouterPeer, status: int, fields: dict[str, Any], sign: PeerSign, token: int | None
) -> None:
    async with listener(says(status, as_json(**fields))) as url:
        look = await peer.look(url, timeout_s=5)
    assert (look.sign, look.token) == (sign, token)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"ok",
        b"[]",
        b"null",
        b"7",
        b'"active"',
        b"{}",
        b"\xff\xfe\x00",
        as_json(role="leader"),
        as_json(role=None),
        as_json(role=["active"]),
        as_json(fencing_token="high"),
        as_json(fencing_token=[1]),
        as_json(fencing_token=float("inf")),
        as_json(fencing_token=float("nan")),
        as_json(fencing_token=-1),
        as_json()[:-1],
        json.dumps({"role": "active"}).encode(),
        b"[" * 30_000,
        b"1" * 5_000,
    ],
    ids=lambda body: repr(body[:24]) if isinstance(body, bytes) else str(body),
)
@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_of_another_shape_is_unreadable(status: int, body: bytes) -> None:
    assert read_ready(status, body).sign is PeerSign.UNREADABLE


async def test_a_refused_connection_is_said_to_be_refused(peer: HttpRouterPeer) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        look = await peer.look(f"http://127.0.0.1:{unused.getsockname()[1]}", timeout_s=5)
    assert look.sign is PeerSign.REFUSED
    assert look.detail


async def test_a_connection_that_is_cut_before_the_answer_counts_as_refused(peer: HttpRouterPeer) -> None:
    async def hang_up(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with listener(hang_up) as url:
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.REFUSED


async def test_an_answer_that_is_cut_short_is_unreadable(peer: HttpRouterPeer) -> None:
    async def cut(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(200, as_json())[:-5])
        await writer.drain()

    async with listener(cut) as url:
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.UNREADABLE


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", answer(200, as_json())[:-5]], ids=["0", "head", "body"])
async def test_silence_at_any_point_is_a_timeout(peer: HttpRouterPeer, sent: bytes) -> None:
    async def silent(reader: Reader, writer: Writer) -> None:
        writer.write(sent)
        await writer.drain()
        await reader.read()

    async with listener(silent) as url:
        look = await peer.look(url, timeout_s=0.2)
    assert look == PeerLook(PeerSign.TIMEOUT, detail="no answer in 0.2 s")


async def test_an_answer_in_pieces_is_read_to_its_end(peer: HttpRouterPeer) -> None:
    async def piecemeal(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        whole = answer(200, as_json())
        body_at = whole.index(b"\r\n\r\n") + 4
        for piece in (whole[:body_at], whole[body_at : body_at + 9], whole[body_at + 9 :]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)

    async with listener(piecemeal) as url:
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.READY


async def test_an_endless_answer_is_unreadable_and_not_read_on(peer: HttpRouterPeer) -> None:
    sent = 0

    async def endless(reader: Reader, writer: Writer) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n{")
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
            sent += 65536

    async with listener(endless) as url:
        assert (await peer.look(url, timeout_s=30)).sign is PeerSign.UNREADABLE
    assert sent < 100 * ANSWER_BYTES_MAX


async def test_what_is_no_http_is_unreadable(peer: HttpRouterPeer) -> None:
    async def greet(reader: Reader, writer: Writer) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        await reader.read(1)

    async with listener(greet) as url:
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.UNREADABLE


async def test_a_redirect_is_not_followed(peer: HttpRouterPeer) -> None:
    async with (
        listener(says(200, as_json())) as good,
        listener(says(302, b"", headers=f"Location: {good}/ready\r\n")) as url,
    ):
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.UNREADABLE


async def test_a_compressed_or_oddly_typed_answer_is_read_for_what_it_is(peer: HttpRouterPeer) -> None:
    async with listener(says(200, b"not gzip", headers="Content-Encoding: gzip\r\n")) as url:
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.UNREADABLE
    async with listener(says(200, as_json(), headers="Content-Type: text/plain\r\n")) as url:
        assert (await peer.look(url, timeout_s=5)).sign is PeerSign.READY


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://", "nonsense", "http://no-such-host.invalid:80"])
async def test_an_address_that_leads_nowhere_is_a_sign_and_no_error(peer: HttpRouterPeer, url: str) -> None:
    look = await peer.look(url, timeout_s=5)
    assert look.sign in (PeerSign.REFUSED, PeerSign.UNREADABLE, PeerSign.TIMEOUT)


async def test_every_look_opens_a_connection_of_its_own(peer: HttpRouterPeer) -> None:
    """A dead listener must not hide behind a connection that was kept."""
    connections = 0

    async def count(reader: Reader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await says(200, as_json())(reader, writer)
        await reader.read()

    async with listener(count) as url:
        for _ in range(3):
            assert (await peer.look(url, timeout_s=5)).sign is PeerSign.READY
    assert connections == 3


async def test_a_peer_that_was_never_asked_can_be_closed() -> None:
    await HttpRouterPeer().aclose()
