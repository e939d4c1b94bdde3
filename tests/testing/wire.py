"""What the stub engine's tests share: starting engines, running legs, reading streams byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from narwhal.testing.stub_engine import StubEngine, StubSettings, parse_fault

COMPLETION = {"prompt": "the tusk of the whale points north", "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "which way does the tusk point?"}], "max_tokens": 6}
WANT_TICKET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Engines:
    """Starts engines and remembers them."""

    running: list[StubEngine] = field(default_factory=list)

    async def start(self, *faults: str, **settings: Any) -> StubEngine:
        engine = StubEngine(StubSettings(faults=tuple(parse_fault(text) for text in faults), **settings))
        self.running.append(engine)
        await engine.start()
        return engine

    async def stop(self) -> None:
        for engine in self.running:
            await engine.stop()


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def post(
    http: aiohttp.ClientSession, engine: StubEngine, body: dict[str, Any], **options: Any
) -> tuple[int, dict[str, Any]]:
    """Post a generation request and return status and document."""
    async with http.post(engine.url + path_of(body), json=body, **options) as answer:
        return answer.status, json.loads(await answer.read())


async def ticket_for(http: aiohttp.ClientSession, prefill: StubEngine, body: dict[str, Any]) -> dict[str, Any]:
    """Run the prefill leg of `body` and return the ticket."""
    leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": WANT_TICKET}
    leg.pop("stream_options", None)
    status, document = await post(http, prefill, leg)
    assert status == 200, document
    ticket = document["kv_transfer_params"]
    assert isinstance(ticket, dict)
    return ticket


def text_of(document: dict[str, Any]) -> str:
    """Return the text of the first choice of a whole answer."""
    choice = document["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@dataclass
class Stream:
    """A streamed answer: its HTTP chunks as they came, and whether the terminal chunk did."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes]
    terminated: bool

    @property
    def content(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def frames(self) -> list[Any]:
        """The events: parsed JSON, or the string "[DONE]"."""
        events = [event for event in self.content.decode().split("\n\n") if event and not event.startswith(":")]
        assert all(event.startswith("data: ") for event in events)
        return [event[6:] if event[6:] == "[DONE]" else json.loads(event[6:]) for event in events]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return "".join(text for text in (_delta(frame) for frame in self.frames) if text)

    @property
    def finish_reasons(self) -> list[str]:
        return [
            choice["finish_reason"]
            for frame in self.frames
            if isinstance(frame, dict)
            for choice in frame.get("choices", [])
            if choice["finish_reason"]
        ]


def _delta(frame: Any) -> str:
    choices = frame.get("choices", []) if isinstance(frame, dict) else []
    if not choices or choices[0]["index"] != 0:
        return ""
    return str(choices[0]["delta"].get("content", "") if "delta" in choices[0] else choices[0]["text"])


class RawClient:
    """One connection that shows every HTTP chunk as it was framed, which a client library would merge."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.terminated = False

    @classmethod
    async def post(cls, engine: StubEngine, body: dict[str, Any]) -> RawClient:
        """Send a generation request and return once the headers of the answer are there."""
        target = urlsplit(engine.url)
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        content = json.dumps(body).encode()
        head = (
            f"POST {path_of(body)} HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        client = cls(reader, writer)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        client.status = int(status.split()[1])
        client.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return client

    async def read_chunk(self) -> bytes | None:
        """Return the next chunk, or None after the last; `terminated` then says whether the end was announced."""
        try:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            chunk = (await self.reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None
        self.terminated = size == 0
        if self.terminated:
            return None
        self.chunks.append(chunk)
        return chunk

    async def rest(self) -> Stream:
        """Read to the end and return all of it."""
        async with asyncio.timeout(10):
            while await self.read_chunk() is not None:
                pass
        await self.close()
        return Stream(self.status, self.headers, self.chunks, self.terminated)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


async def stream(engine: StubEngine, body: dict[str, Any]) -> Stream:
    """Run a streamed request to its end."""
    client = await RawClient.post(engine, {**body, "stream": True})
    return await client.rest()


async def until(condition: Callable[[], object], *, timeout_s: float = 5.0) -> None:
    """Wait for `condition` with a deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
