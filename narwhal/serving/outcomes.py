"""How a request ended, and what the client is told when an engine failed it: one table.

503 with `X-Narwhal-Not-Executed` means that no engine has seen anything of the request, so it may be retried anywhere.
After a leg was sent, 502 and 504 forbid a blind retry; a 503 says that no decode engine took the request up.
Source: decision 38; ops.md, 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from narwhal.core.faults import (
    DeadlinePassed,
    EngineFailedStatus,
    EngineFault,
    EngineOverloaded,
    EnginePaused,
    EngineTimeout,
    EngineUnreachable,
    KvTicketUnreadable,
    PoolFull,
    StreamBroken,
)
from narwhal.ports import KvTicketUnusable, NothingSent, StreamSilent
from narwhal.serving.headers import NOT_EXECUTED, RETRY_AFTER, SHOULD_RETRY
from narwhal.serving.openai import ApiError


class Outcome(StrEnum):
    """The word for a finished request in logs and metrics."""

    SERVED = "served"
    REFUSED_BY_ENGINE = "refused_by_engine"
    REJECTED = "rejected"
    NOT_READY = "not_ready"
    NO_CAPACITY = "no_capacity"
    SATURATED = "saturated"
    OVERLOADED = "overloaded"
    FENCED = "fenced"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    BROKEN = "broken"
    DISCONNECTED = "disconnected"
    CRASHED = "crashed"


UNSUCCESSFUL: Final = frozenset(
    {Outcome.OVERLOADED, Outcome.FENCED, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.BROKEN, Outcome.CRASHED}
)
"""What counts as failed after admission."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a client is told: status, the word in `error.code`, and how it is counted."""

    status: int
    code: str
    outcome: Outcome


TOLD: Final[dict[type[EngineFault], Told]] = {
    PoolFull: Told(503, "saturated", Outcome.SATURATED),
    EngineOverloaded: Told(503, "engine_overloaded", Outcome.OVERLOADED),
    EnginePaused: Told(503, "engine_paused", Outcome.OVERLOADED),
    KvTicketUnusable: Told(503, "kv_ticket_expired", Outcome.FAILED),
    DeadlinePassed: Told(504, "request_timeout", Outcome.TIMED_OUT),
    EngineTimeout: Told(504, "engine_timeout", Outcome.TIMED_OUT),
    StreamSilent: Told(504, "engine_silent", Outcome.TIMED_OUT),
    StreamBroken: Told(502, "stream_broken", Outcome.FAILED),
    EngineUnreachable: Told(502, "engine_unreachable", Outcome.FAILED),
    EngineFailedStatus: Told(502, "engine_failed", Outcome.FAILED),
    KvTicketUnreadable: Told(502, "kv_handoff_failed", Outcome.FAILED),
    EngineFault: Told(502, "engine_failed", Outcome.FAILED),
}
"""By the fault's class, or the nearest class above it that has a row."""

RETRY_AFTER_S: Final = 1


def told(fault: EngineFault, *, sent: bool) -> tuple[ApiError, Outcome]:
    """Return the answer to a request that ended in `fault`; `sent`: an engine had seen something of it before."""
    row = next(TOLD[cls] for cls in type(fault).__mro__ if cls in TOLD)
    untouched = not sent and isinstance(fault, NothingSent | PoolFull)
    if untouched or row.status == 503:
        wait_s = fault.retry_after_s if isinstance(fault, EngineOverloaded) else None
        return unavailable(str(fault), row.code, retry_after_s=wait_s, executed=not untouched), row.outcome
    return ApiError(row.status, str(fault), "engine_error", row.code, headers={SHOULD_RETRY: "false"}), row.outcome


def unavailable(message: str, code: str, *, retry_after_s: float | None = None, executed: bool) -> ApiError:
    """Return a 503; unless `executed`, it says that no engine has seen the request."""
    headers = {RETRY_AFTER: str(RETRY_AFTER_S if retry_after_s is None else round(retry_after_s))}
    if not executed:
        headers[NOT_EXECUTED] = "1"
    return ApiError(503, message, "service_unavailable", code, headers=headers)
