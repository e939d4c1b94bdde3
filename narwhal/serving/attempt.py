"""One attempt: a prefill leg and a decode leg under one ticket, each with its evidence.

Every leg that starts is released exactly once, however it ends, and a fault that leaves it is reported if it carries a
failure class. Source: source, "Failure evidence".
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple, Self

from narwhal.core.engine import Engine
from narwhal.core.events import LegFailed, LegRefused, LegReleased, LegStarted, LegSucceeded
from narwhal.core.faults import EngineFault
from narwhal.core.vocabulary import EngineId, FencingToken, Leg
from narwhal.ports import (
    DecodeStream,
    EngineAddress,
    EngineRefusal,
    KvTicket,
    KvTicketUnusable,
    LegCall,
    Legs,
    NothingPinned,
    WholeAnswer,
)
from narwhal.serving.deps import ServingDeps
from narwhal.serving.headers import ADMIT, DECODE, Trace, leg_headers
from narwhal.serving.openai import Completion


class LegWatch:
    """Reports one leg: started on entry, released on exit, and in between how it went."""

    __slots__ = ("_deps", "_engine", "_leg", "_partner", "_started_at")

    def __init__(self, deps: ServingDeps, engine: EngineId, leg: Leg, partner: EngineId | None) -> None:
        self._deps = deps
        self._engine = engine
        self._leg = leg
        self._partner = partner
        self._started_at = 0.0

    def __enter__(self) -> Self:
        """The leg is sent."""
        self._started_at = asyncio.get_running_loop().time()
        self._deps.report(LegStarted(self._engine, self._leg))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The leg is over."""
        if isinstance(error, EngineFault):
            self.failed(error)
        self._deps.report(LegReleased(self._engine, self._leg))
        self._deps.metrics.leg_finished(self._leg, asyncio.get_running_loop().time() - self._started_at)

    def succeeded(self) -> None:
        """A ticket was read, or the decode reached its end."""
        self._deps.report(LegSucceeded(self._engine, self._leg, self._partner))

    def refused(self) -> None:
        """The engine found the client's mistake."""
        self._deps.report(LegRefused(self._engine, self._leg))

    def failed(self, fault: EngineFault) -> None:
        """The leg failed; without a failure class that says nothing about the engine."""
        if fault.failure_class is not None:
            self._deps.report(LegFailed(self._engine, self._leg, fault.failure_class, self._partner, str(fault)))


class Order(NamedTuple):
    """One admitted request: what is asked, under which term, until when (loop seconds), and how engines know it."""

    completion: Completion
    token: FencingToken
    deadline: float
    internal_id: str
    trace: Trace


class Attempt:
    """Two engines, one order, one slot of the data pool. `prefill` is None for a request that cannot be split.

    `prefilled` becomes true when a prefill engine has answered; `ticket` is what it gave.
    """

    __slots__ = ("_deps", "_legs", "_order", "decode", "prefill", "prefilled", "ticket")

    def __init__(self, deps: ServingDeps, legs: Legs, order: Order, *, prefill: Engine | None, decode: Engine) -> None:
        self._deps = deps
        self._legs = legs
        self._order = order
        self.prefill = prefill
        self.decode = decode
        self.prefilled = False
        self.ticket: KvTicket | None = None

    async def run_prefill(self) -> EngineRefusal | None:
        """Run the prefill leg, if there is one; without a `ticket` after it the decode engine computes everything.

        Raises EngineFault.
        """
        engine = self.prefill
        if engine is None:
            return None
        generation = engine.generation
        with LegWatch(self._deps, engine.id, Leg.PREFILL, self.decode.id) as watch:
            answer = await self._legs.prefill(
                EngineAddress(engine.id, engine.url),
                self._call(Leg.PREFILL),
                timeout_s=self._deps.plane.config.serving.prefill_timeout_s,
            )
            self.prefilled = True
            if isinstance(answer, EngineRefusal):
                watch.refused()
                return answer
            if isinstance(answer, NothingPinned):
                return None
            self.ticket = answer
            watch.succeeded()
        if generation is not None and engine.generation != generation:
            answer.discard()
            raise KvTicketUnusable(f"engine {engine.id} restarted after it issued the ticket: dropped unused")
        return None

    def watch_decode(self) -> LegWatch:
        """Return the watch under which the decode leg must run."""
        return LegWatch(self._deps, self.decode.id, Leg.DECODE, self.prefill.id if self.prefill is not None else None)

    async def run_decode(self) -> WholeAnswer | EngineRefusal:
        """Run a non-streaming decode leg. Raises EngineFault."""
        return await self._legs.decode(self._decode_address(), self._call(Leg.DECODE), self.ticket)

    async def run_decode_stream(self) -> DecodeStream | EngineRefusal:
        """Run a streaming decode leg up to its first real token. Raises EngineFault."""
        serving = self._deps.plane.config.serving
        return await self._legs.decode_stream(
            self._decode_address(),
            self._call(Leg.DECODE),
            self.ticket,
            first_token_timeout_s=serving.first_token_timeout_s,
            silence_timeout_s=serving.stream_silence_timeout_s,
        )

    def _decode_address(self) -> EngineAddress:
        return EngineAddress(self.decode.id, self.decode.url)

    def _call(self, leg: Leg) -> LegCall:
        order = self._order
        completion = order.completion
        phase = DECODE if leg is Leg.DECODE and self.prefill is not None else ADMIT
        return LegCall(
            completion.path,
            completion.body,
            completion.raw,
            leg_headers(order.internal_id, order.trace, order.token, leg, phase=phase),
            order.deadline,
            completion.choices,
        )
