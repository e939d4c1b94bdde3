"""What stands between a store and its Redis in tests: a faulty TCP path, and a server that says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence


class FaultyPath:
    """A TCP proxy on loopback in front of `port`.

    `delay_s` holds each piece of an answer back; `lose_next_answer` swallows the next one and all that follow on its
    connection, while commands still get through.
    """

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self.port = 0
        self.delay_s = 0.0
        self.connections = 0
        self._loses = 0
        self.lost = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def lose_next_answer(self) -> None:
        self._loses += 1
        self.lost.clear()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            async with asyncio.TaskGroup() as group:
                answers = group.create_task(self._answers(up_reader, writer))
                await self._commands(reader, up_writer)
                answers.cancel()
        finally:
            for end in (writer, up_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _commands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        swallowing = False
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self._loses:
                    self._loses -= 1
                    swallowing = True
                    self.lost.set()
                if swallowing:
                    continue
                await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def faulty_path(port: int) -> AsyncIterator[FaultyPath]:
    """Yield a path to `port`."""
    path = FaultyPath(port)
    async with serving(path.handle) as path.port:
        yield path


class Parrot:
    """A server that answers the commands of each connection with `answers` in turn, the last one for ever.

    An empty answer closes the connection.
    """

    def __init__(self, answers: Sequence[bytes], *, trickle_s: float = 0.0) -> None:
        self._answers = tuple(answers)
        self._trickle_s = trickle_s
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._converse(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in itertools.chain(self._answers, itertools.repeat(self._answers[-1])):
            await self._read_command(reader)
            if not answer:
                return
            for piece in [answer[i : i + 1] for i in range(len(answer))] if self._trickle_s else [answer]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self._trickle_s)

    async def _read_command(self, reader: asyncio.StreamReader) -> None:
        parts = int((await reader.readuntil(b"\r\n"))[1:])
        for _ in range(parts):
            size = int((await reader.readuntil(b"\r\n"))[1:])
            await reader.readexactly(size + 2)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@contextlib.asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[int]:
    """Serve `handle` on a free loopback port, yield the port, and leave no task and no socket behind."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
