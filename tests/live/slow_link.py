"""A TCP path to an engine on which answers that carry a ticket can be held back, as a slow network does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

TICKET = b"kv_transfer_params"


class SlowLink:
    """Stands in front of one engine. `held` is set once a ticket waits here; `release` lets it go on."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._upstream = (parts.hostname, parts.port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._holding = False
        self._released = asyncio.Event()
        self.held = asyncio.Event()
        self.url = ""

    def hold(self) -> None:
        """Keep every answer that carries a ticket from now on."""
        self._holding = True

    def release(self) -> None:
        """Let go what was kept, also if the engine that sent it is gone."""
        self._holding = False
        self._released.set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            except OSError:
                return
            requests = asyncio.create_task(self._pump(reader, up_writer, holds=False))
            try:
                with contextlib.closing(up_writer):
                    await self._pump(up_reader, writer, holds=True)
            finally:
                requests.cancel()
                await asyncio.gather(requests, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, holds: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if holds and self._holding and TICKET in data:
                    self.held.set()
                    await self._released.wait()
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_link(target: str) -> AsyncIterator[SlowLink]:
    """Yield a path to the engine at `target`."""
    link = SlowLink(target)
    server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    link.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        await link.close()
        await server.wait_closed()
