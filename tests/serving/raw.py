"""A client that speaks HTTP by hand, for what a client library would tidy up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit


class RawClient:
    """One connection to a router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: Any, *, version: str = "1.1", **headers: str) -> None:
        """Send a POST with a JSON body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.head("POST", path, len(content), version=version, **headers)
        await self.send(content)

    async def head(self, method: str, path: str, length: int, *, version: str = "1.1", **headers: str) -> None:
        """Send the head of a request whose body comes later, or never."""
        lines = [f"{method} {path} HTTP/{version}", "Host: router", f"Content-Length: {length}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def answer_head(self) -> tuple[int, dict[str, str]]:
        """Read the head of an answer."""
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        fields = [line.split(": ", 1) for line in lines]
        return int(status.split()[1]), {name.lower(): value for name, value in fields}

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read an answer whose length is announced, or that ends with the connection."""
        status, headers = await self.answer_head()
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, await self.reader.read()

    async def closed(self) -> bool:
        """Whether the router has closed the connection and sent nothing more."""
        return await self.reader.read(1) == b""


@asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[RawClient]:
    """Connect to the router at `url`; the connection is aborted at the end."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
