"""The control pool: health, what engines say of themselves, and inference probes. Never a client's request.

A result is inconclusive when it says more about us than about the engine: our own pool was full, or our loop was so
late that the deadline passed before we could look. An engine that is only too busy to be probed, or is paused, has not
failed either.
Source: source, "Connection pools"; decision 13.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

import orjson

from narwhal.core.events import PairFinding
from narwhal.core.faults import EngineFault, EngineOverloaded, EnginePaused, PoolFull
from narwhal.core.vocabulary import Leg
from narwhal.engine import wire
from narwhal.engine.caller import Caller
from narwhal.engine.classify import LegKind, Mishap
from narwhal.engine.wire import RawAnswer
from narwhal.ports import (
    EngineAddress,
    EngineRefusal,
    EngineTelemetry,
    HealthAnswer,
    KvTicket,
    NothingPinned,
)

PROBE_PATH: Final = "/v1/completions"
PROBE_TOKENS: Final = 4
LOOP_LATE_S: Final = 0.25
"""If the loop looks at a deadline this much after it passed, the deadline measured us and not the engine."""

NOT_OFFERED: Final = 404

_SAMPLE: Final = re.compile(
    rb"^(?:\w+:)?(process_start_time_seconds|num_requests_running|num_requests_waiting|kv_cache_usage_perc|token_usage"
    rb"|num_running_reqs|num_queue_reqs)(?:\{[^}\n]*\})? ([-+.\w]+)",
    re.MULTILINE,
)
_RUNNING: Final = ("num_requests_running", "num_running_reqs")
_WAITING: Final = ("num_requests_waiting", "num_queue_reqs")
_KV_USAGE: Final = ("kv_cache_usage_perc", "token_usage")


class _Inconclusive(Exception):
    """Our own pool or loop was in the way."""


class ControlClient:
    """The reserved control pool; see `narwhal.ports.EngineControl`."""

    def __init__(self, caller: Caller, *, capacity: int, kv_lease_s: float) -> None:
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(capacity)
        self._capacity = capacity
        self._kv_lease_s = kv_lease_s

    async def health(self, engine: EngineAddress, *, timeout_s: float) -> HealthAnswer:
        """Ask /health once; only a 200 is healthy."""
        try:
            answer = await self._get(engine, "/health", timeout_s)
        except _Inconclusive as reason:
            return HealthAnswer(healthy=False, conclusive=False, detail=str(reason))
        except EngineFault as error:
            return HealthAnswer(healthy=False, detail=str(error))
        if answer.status == 200:
            return HealthAnswer(healthy=True)
        return HealthAnswer(healthy=False, detail=f"/health answered {answer.status}")

    async def models(self, engine: EngineAddress, *, timeout_s: float) -> tuple[Mapping[str, Any], ...] | None:
        """Return the cards of /v1/models, or None when it gave no readable answer."""
        try:
            answer = await self._get(engine, "/v1/models", timeout_s)
            document = orjson.loads(answer.body) if answer.status == 200 else None
        except (_Inconclusive, EngineFault, orjson.JSONDecodeError):
            return None
        cards = document.get("data") if isinstance(document, dict) else None
        if not isinstance(cards, list):
            return None
        return tuple(card for card in cards if isinstance(card, dict))

    async def telemetry(self, engine: EngineAddress, *, timeout_s: float) -> EngineTelemetry | None:
        """Return what /metrics says, nothing if it is not offered, or None when it gave no readable answer."""
        try:
            answer = await self._get(engine, "/metrics", timeout_s)
        except (_Inconclusive, EngineFault):
            return None
        if answer.status == NOT_OFFERED:
            return EngineTelemetry(generation=None)
        return read_telemetry(answer.body) if answer.status == 200 else None

    async def infer(
        self, prefill: EngineAddress, decode: EngineAddress, *, model: str, timeout_s: float
    ) -> PairFinding:
        """Run one tiny request over the pair and say which leg failed, if one did."""
        nonce = os.urandom(8).hex()
        body = {
            "model": model,
            "prompt": f"{nonce} one two three four",
            "max_tokens": PROBE_TOKENS,
            "temperature": 0,
            "stream": False,
        }
        headers = {"X-Request-Id": f"narwhal-probe-{nonce}"}
        leg = Leg.PREFILL
        try:
            ticket = await self._probe_prefill(prefill, body, headers, timeout_s)
            leg = Leg.DECODE
            params = None if ticket is None else ticket.spend(now=self._loop.time())
            answer = await self._post(decode, wire.decode_body(orjson.dumps(body), params), headers, timeout_s)
            wire.read_choices(_result(answer, decode), decode.id)
        except _Inconclusive as reason:
            return PairFinding(prefill.id, decode.id, conclusive=False, detail=str(reason))
        except (EngineOverloaded, EnginePaused) as unwilling:
            return PairFinding(prefill.id, decode.id, conclusive=False, detail=str(unwilling))
        except EngineFault as error:
            return PairFinding(prefill.id, decode.id, failed_leg=leg, detail=str(error))
        return PairFinding(prefill.id, decode.id)

    async def _probe_prefill(
        self, engine: EngineAddress, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float
    ) -> KvTicket | None:
        answer = await self._post(engine, wire.prefill_body(body), headers, timeout_s)
        document = _result(answer, engine)
        wire.read_choices(document, engine.id)
        ticket = wire.read_ticket(document, engine.id)
        if isinstance(ticket, NothingPinned):
            return None
        params, engine_id = ticket
        return KvTicket(params, engine_id=engine_id, issued_at=self._loop.time(), max_age_s=self._kv_lease_s)

    async def _get(self, engine: EngineAddress, path: str, timeout_s: float) -> RawAnswer:
        request = self._caller.encode("GET", engine.url, path, {}, b"")
        return await self._call(engine, request, LegKind.OTHER, timeout_s)

    async def _post(
        self, engine: EngineAddress, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> RawAnswer:
        request = self._caller.encode("POST", engine.url, PROBE_PATH, headers, body)
        return await self._call(engine, request, LegKind.PROBE, timeout_s)

    async def _call(self, engine: EngineAddress, request: bytes, kind: LegKind, timeout_s: float) -> RawAnswer:
        """Send `request` on a slot of the control pool. Raises EngineFault, or _Inconclusive when it is our doing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise _Inconclusive(
                f"all {self._capacity} connections of the control pool (engine.control_connections) were busy"
            ) from None
        due = self._loop.time() + timeout_s
        try:
            return await self._caller.whole(engine, request, kind=kind, due=due, late=Mishap.UNANSWERED, resend=True)
        except PoolFull as full:
            raise _Inconclusive(str(full)) from full
        except EngineFault as error:
            lateness_s = self._loop.time() - due
            if lateness_s > LOOP_LATE_S:
                raise _Inconclusive(f"our own loop was {lateness_s:.2f} s late") from error
            raise
        finally:
            self._slots.release()


def _result(answer: RawAnswer, engine: EngineAddress) -> dict[str, Any]:
    """Return the JSON object of a probe's answer; a refusal is a failure of the engine here, for we asked rightly."""
    document = wire.read_document(answer, engine.id)
    if isinstance(document, EngineRefusal):
        text = f"engine {engine.id} refused a probe with {document.status}: {wire.error_message(document.body)}"
        raise EngineFault(text)
    return document


def read_telemetry(text: bytes) -> EngineTelemetry:
    """Return what a metrics page says; counts of several models or ranks are added up, the fullest KV cache counts."""
    samples: dict[str, list[float]] = {}
    generation: str | None = None
    for name, value in _SAMPLE.findall(text):
        if name == b"process_start_time_seconds":
            generation = value.decode()
            continue
        if (number := _finite(value)) is not None:
            samples.setdefault(name.decode(), []).append(number)

    def first(names: tuple[str, ...]) -> list[float] | None:
        return next((samples[name] for name in names if name in samples), None)

    running, waiting, usage = first(_RUNNING), first(_WAITING), first(_KV_USAGE)
    return EngineTelemetry(
        generation=generation,
        running=None if running is None else int(sum(running)),
        waiting=None if waiting is None else int(sum(waiting)),
        kv_usage=None if usage is None else max(usage),
    )


def _finite(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
