"""One connection to an engine, carrying one exchange at a time, and the pool that keeps idle ones for a while.

The pool does not bound anything; its two users do, each with its own counter, so that our own saturation is never
mistaken for an engine that does not answer.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import cast

from narwhal.engine.classify import LegKind, Mishap, connect_mishap, fault
from narwhal.engine.http1 import Head, HttpViolation, Origin, ResponseParser
from narwhal.engine.wire import RawAnswer

ANSWER_BYTES_MAX = 256 * 1024 * 1024


class Exchange(ABC):
    """One request's answer as it comes in; at most one of `on_end` and `on_mishap` ends it."""

    __slots__ = ("connection", "ended")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.ended = False

    @abstractmethod
    def on_head(self, head: Head) -> None:
        """Take status and headers."""

    @abstractmethod
    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""

    @abstractmethod
    def on_end(self) -> None:
        """The answer is complete."""

    @abstractmethod
    def on_mishap(self, mishap: Mishap) -> None:
        """The answer will not be complete."""

    def abandon(self) -> None:
        """Close the connection unless the exchange has ended: nobody waits for the answer any more."""
        connection, self.connection = self.connection, None
        if connection is not None and not self.ended:
            self.ended = True
            connection.abort()


class WholeExchange(Exchange):
    """Collects a whole answer; `answer` is its future."""

    __slots__ = ("_engine", "_head", "_kind", "_parts", "_size", "answer", "mishap")

    def __init__(self, answer: asyncio.Future[RawAnswer], kind: LegKind, engine: str) -> None:
        super().__init__()
        self.answer = answer
        self.mishap: Mishap | None = None
        self._kind = kind
        self._engine = engine
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, head: Head) -> None:
        """Remember status and headers."""
        self._head = head

    def on_body(self, data: bytes) -> None:
        """Keep a piece; an answer without measure is cut off."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > ANSWER_BYTES_MAX:
            self.on_mishap(Mishap.GARBLED)

    def on_end(self) -> None:
        """Hand the answer over."""
        self.ended = True
        if not self.answer.done():
            assert self._head is not None
            parts = self._parts
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            self.answer.set_result(RawAnswer(self._head, body))

    def on_mishap(self, mishap: Mishap) -> None:
        """Hand the fault over."""
        self.mishap = mishap
        if not self.answer.done():
            self.answer.set_exception(fault(mishap, self._kind, self._engine))


class Connection(asyncio.Protocol):
    """A TCP connection to one origin. `reused`: it has carried an exchange before the present one."""

    __slots__ = (
        "_exchange",
        "_on_idle",
        "_on_lost",
        "_parser",
        "_paused",
        "_transport",
        "idle_since",
        "origin",
        "reused",
    )

    def __init__(
        self, origin: Origin, on_idle: Callable[[Connection], None], on_lost: Callable[[Connection], None]
    ) -> None:
        self.origin = origin
        self.reused = False
        self.idle_since = 0.0
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._exchange: Exchange | None = None
        self._paused = False

    @property
    def usable(self) -> bool:
        """Whether a request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def answering(self) -> bool:
        """Whether a byte of the present answer has come."""
        return self._parser is not None and self._parser.started

    def start(self, request: bytes, exchange: Exchange) -> None:
        """Send `request` and let `exchange` take the answer in."""
        assert self._transport is not None
        assert self._exchange is None, "a connection carries one exchange at a time"
        self._exchange = exchange
        self._parser = ResponseParser(exchange)
        exchange.connection = self
        self._transport.write(request)

    def pause(self) -> None:
        """Stop reading: whoever takes the bytes has enough."""
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, without a word to the exchange."""
        self._exchange = None
        self._parser = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser; bytes that nobody asked for close the connection."""
        parser = self._parser
        if parser is None:
            self.abort()
            return
        try:
            parser.feed(data)
        except HttpViolation:
            self._broken(Mishap.GARBLED)
            return
        if parser.complete:
            self._finished(parser)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange, unless the end of the connection is the end of the answer."""
        parser = self._parser
        if parser is not None and not parser.feed_eof():
            self._broken(Mishap.CUT if parser.started else Mishap.LOST)
        self._exchange = None
        self._parser = None
        self._transport = None
        self._on_lost(self)

    def _broken(self, mishap: Mishap) -> None:
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.ended = True
            exchange.on_mishap(mishap)

    def _finished(self, parser: ResponseParser) -> None:
        self._exchange = None
        self._parser = None
        transport = self._transport
        if transport is None:
            return
        if parser.reusable and not transport.is_closing() and transport.get_write_buffer_size() == 0:
            if self._paused:
                self.resume()
            self.reused = True
            self._on_idle(self)
        else:
            transport.close()


class ConnectionPool:
    """Open connections per origin; idle ones are taken last in, first out, and closed before the engine does."""

    def __init__(self, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._emptied: asyncio.Future[None] | None = None

    @property
    def open(self) -> int:
        """How many connections are open, idle ones included."""
        return len(self._open)

    def take(self, origin: Origin, *, rested_s_max: float = inf) -> Connection | None:
        """Return an idle connection that is young enough and has not rested for longer than asked, or None."""
        idle = self._idle[origin]
        now = self._loop.time()
        oldest = now - self._keepalive_s
        while idle and now - idle[-1].idle_since <= rested_s_max:
            connection = idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def connect(self, origin: Origin, *, kind: LegKind, engine: str, due: float) -> Connection:
        """Open a new connection before loop time `due`.

        Raises ConnectRefused, ConnectTimedOut or DeadlinePassed, or PoolFull when this host has no room for one.
        """
        patience_ends = self._loop.time() + self._connect_timeout_s
        try:
            async with asyncio.timeout_at(min(patience_ends, due)):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(origin, self._became_idle, self._lost),
                    origin.host,
                    origin.port,
                    ssl=self._tls_context() if origin.tls else None,
                )
        except TimeoutError as error:
            raise fault(Mishap.DEADLINE if due < patience_ends else Mishap.CONNECT_TIMEOUT, kind, engine) from error
        except OSError as error:
            raise fault(connect_mishap(error), kind, engine) from error
        self._open.add(connection)
        return connection

    async def close(self) -> None:
        """Close every connection and wait until it is closed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.abort()
        if self._open:
            self._emptied = self._loop.create_future()
            await self._emptied

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _became_idle(self, connection: Connection) -> None:
        connection.idle_since = self._loop.time()
        self._idle[connection.origin].append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._keepalive_s, self._sweep)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._emptied is not None and not self._open and not self._emptied.done():
            self._emptied.set_result(None)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def _sweep(self) -> None:
        self._sweeper = None
        oldest = self._loop.time() - self._keepalive_s
        for idle in self._idle.values():
            for connection in [c for c in idle if c.idle_since <= oldest]:
                idle.remove(connection)
                connection.abort()
        if any(self._idle.values()):
            self._sweeper = self._loop.call_later(self._keepalive_s / 2, self._sweep)
