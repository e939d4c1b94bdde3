"""Legs over real sockets against scripted engines, for tests of the data pool."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from narwhal.config import parse_config
from narwhal.core.vocabulary import EngineId
from narwhal.engine.client import EngineClient
from narwhal.ports import (
    DecodeStream,
    EngineAddress,
    EngineRefusal,
    KvTicket,
    LegCall,
)

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
