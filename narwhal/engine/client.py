"""The two ways to the engines: the data pool for the legs of requests, and the reserved control pool beside it.

Each has a bound of its own that counts before any connection is opened. A full data pool is our saturation, said at
once; it is never evidence against an engine.
Source: source, "Connection pools".
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from narwhal.config import Config
from narwhal.core.faults import PoolFull
from narwhal.engine import wire
from narwhal.engine.caller import Caller
from narwhal.engine.classify import LegKind, Mishap
from narwhal.engine.connection import ConnectionPool
from narwhal.engine.probes import ControlClient
from narwhal.engine.stream import EngineStream, StreamDeadlines
from narwhal.ports import (
    EngineAddress,
    EngineRefusal,
    KvTicket,
    KvTicketUnusable,
    LegCall,
    NothingPinned,
    WholeAnswer,
)

TICKET_SHARE = 2 / 3
"""How much of its lease a ticket may have used when it is spent; the rest is for the decode engine to fetch the KV."""


class Slot:
    """One slot of the data pool, held by one request for all its legs; see `narwhal.ports.Legs`."""

    __slots__ = ("_caller", "_loop", "_pool")

    def __init__(self, pool: DataPool, caller: Caller) -> None:
        self._pool = pool
        self._caller = caller
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        """Return the slot; it was taken when it was reserved."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the slot back."""
        self._pool.in_use -= 1

    async def prefill(
        self, engine: EngineAddress, call: LegCall, *, timeout_s: float
    ) -> KvTicket | NothingPinned | EngineRefusal:
        """Run the prefill leg; a kept connection that turns out dead is replaced once."""
        due, late = self._due(call, timeout_s)
        request = self._caller.encode("POST", engine.url, call.path, call.headers, wire.prefill_body(call.body))
        answer = await self._caller.whole(engine, request, kind=LegKind.PREFILL, due=due, late=late, resend=True)
        document = wire.read_document(answer, engine.id)
        if isinstance(document, EngineRefusal):
            return document
        wire.read_choices(document, engine.id)
        ticket = wire.read_ticket(document, engine.id)
        if isinstance(ticket, NothingPinned):
            return ticket
        params, engine_id = ticket
        return KvTicket(params, engine_id=engine_id, issued_at=self._loop.time(), max_age_s=self._pool.ticket_age_s_max)

    async def decode(
        self, engine: EngineAddress, call: LegCall, ticket: KvTicket | None
    ) -> WholeAnswer | EngineRefusal:
        """Run a non-streaming decode leg; it is never sent twice.

        It may take as long as the request may. When that is over, the engine is late if the leg alone had the time of a
        first token; else the request's own deadline has passed.
        """
        connection = await self._caller.connection(engine, LegKind.WHOLE, call.deadline)
        try:
            request = self._decode_request(engine, call, ticket)
        except KvTicketUnusable:
            connection.abort()
            raise
        exchange = self._caller.exchange(LegKind.WHOLE, engine)
        patient = call.deadline - self._loop.time() >= self._pool.patience_s
        late = Mishap.UNANSWERED if patient else Mishap.DEADLINE
        answer = await self._caller.run(connection, request, exchange, call.deadline, late)
        document = wire.read_document(answer, engine.id)
        if isinstance(document, EngineRefusal):
            return document
        wire.read_choices(document, engine.id)
        return wire.whole_answer(document, answer.body)

    async def decode_stream(
        self,
        engine: EngineAddress,
        call: LegCall,
        ticket: KvTicket | None,
        *,
        first_token_timeout_s: float,
        silence_timeout_s: float,
    ) -> EngineStream | EngineRefusal:
        """Start a streaming decode leg and return at its first real token; it is never sent twice."""
        first_token_at = self._loop.time() + first_token_timeout_s
        connection = await self._caller.connection(engine, LegKind.STREAM, min(first_token_at, call.deadline))
        stream = EngineStream(
            engine.id,
            choices=call.choices,
            deadlines=StreamDeadlines(first_token_at, silence_timeout_s, call.deadline),
        )
        stream.connection = connection
        try:
            connection.start(self._decode_request(engine, call, ticket), stream)
            refusal = await stream.begin()
        except BaseException:
            stream.close()
            raise
        if refusal is not None:
            stream.close()
            return refusal
        return stream

    async def forward(self, engine: EngineAddress, call: LegCall, *, timeout_s: float) -> WholeAnswer | EngineRefusal:
        """Pass a small request through; the answer must be a JSON object."""
        due, late = self._due(call, timeout_s)
        request = self._caller.encode("POST", engine.url, call.path, call.headers, call.raw)
        answer = await self._caller.whole(engine, request, kind=LegKind.OTHER, due=due, late=late, resend=True)
        document = wire.read_document(answer, engine.id)
        return document if isinstance(document, EngineRefusal) else wire.whole_answer(document, answer.body)

    def _decode_request(self, engine: EngineAddress, call: LegCall, ticket: KvTicket | None) -> bytes:
        params = None if ticket is None else ticket.spend(now=self._loop.time())
        body = wire.decode_body(call.raw, params)
        return self._caller.encode("POST", engine.url, call.path, call.headers, body)

    def _due(self, call: LegCall, timeout_s: float) -> tuple[float, Mishap]:
        """Return when a leg is late, and whose lateness that is."""
        due = self._loop.time() + timeout_s
        return (due, Mishap.UNANSWERED) if due < call.deadline else (call.deadline, Mishap.DEADLINE)


class DataPool:
    """The data pool's slots; see `narwhal.ports.EngineData`."""

    def __init__(self, caller: Caller, *, capacity: int, kv_lease_s: float, patience_s: float) -> None:
        self._caller = caller
        self.ticket_age_s_max = kv_lease_s * TICKET_SHARE
        self.patience_s = patience_s
        self.capacity = capacity
        self.in_use = 0

    def reserve(self) -> Slot:
        """Hold one slot for a whole request. Raises PoolFull at once when there is none."""
        if self.in_use >= self.capacity:
            raise PoolFull(f"all {self.capacity} slots of the data pool (serving.max_connections) are in use")
        self.in_use += 1
        return Slot(self, self._caller)


class EngineClient:
    """Both pools, built inside the running loop. `data` serves clients, `control` serves monitor and probes."""

    def __init__(self, config: Config, *, api_key: str | None = None) -> None:
        section = config.engine
        self._pools = tuple(
            ConnectionPool(connect_timeout_s=section.connect_timeout_s, keepalive_s=section.keepalive_s)
            for _ in ("data", "control")
        )
        data, control = (Caller(pool, api_key) for pool in self._pools)
        self.data = DataPool(
            data,
            capacity=config.serving.max_connections,
            kv_lease_s=section.kv_lease_s,
            patience_s=config.serving.first_token_timeout_s,
        )
        self.control = ControlClient(control, capacity=section.control_connections, kv_lease_s=section.kv_lease_s)

    async def aclose(self) -> None:
        """Close every connection of both pools."""
        for pool in self._pools:
            await pool.close()
