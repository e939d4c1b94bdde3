"""A TCP server that answers by script, for what no well-behaved HTTP server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One accepted connection, as the script sees it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Read one request and return its body. Raises IncompleteReadError when the client is gone."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        return await self.reader.readexactly(length)

    async def answer(self, body: bytes, *, status: int = 200, head: bytes = b"") -> None:
        """Answer with a JSON body."""
        self.writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
            % (status, head, len(body), body)
        )
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Return when the client has closed the connection."""
        while await self.reader.read(65536):
            pass

    def reset(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()


class Scripted:
    """What the server saw."""

    def __init__(self) -> None:
        self.url = ""
        self.accepted = 0
        self.open = 0


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Scripted]:
    """Serve every connection by `script` until the block is left."""
    seen = Scripted()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        seen.accepted += 1
        seen.open += 1
        try:
            await script(Peer(seen.accepted, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            seen.open -= 1
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield seen
    finally:
        server.close()
        pending = list(tasks)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
