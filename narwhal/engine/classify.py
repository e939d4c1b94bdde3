"""What went wrong on a leg, as one table: mishap and kind of leg -> fault, which carries its failure class.

The classes are the source's. A reset or an early end after the engine accepted a decode request is `stream`; before
that it is `connection`. A whole (non-streaming) decode has no deadline but the request's own: it is UNANSWERED when the
leg had at least the time of a first token, and DEADLINE, which is no evidence, when it had not.
Source: source, "Failure evidence"; decisions 11 and 30.
"""

from __future__ import annotations

import errno
import socket
from enum import StrEnum
from typing import Final

from narwhal.core.faults import (
    DeadlinePassed,
    EngineFault,
    EngineTimeout,
    EngineUnreachable,
    PoolFull,
    StreamBroken,
)
from narwhal.ports import ConnectRefused, ConnectTimedOut, StreamSilent


class LegKind(StrEnum):
    """How the answer of a leg is taken in. OTHER is health, metrics and token counting."""

    PREFILL = "prefill"
    WHOLE = "decode"
    STREAM = "streaming decode"
    PROBE = "probe"
    OTHER = "side"


OPENS_ITS_OWN: Final = frozenset({LegKind.PROBE})
"""Never sent over a kept connection, which would not show that the engine still accepts new ones."""

NEVER_TWICE: Final = frozenset({LegKind.WHOLE, LegKind.STREAM})
"""Cannot be sent again when a kept connection turns out dead: their ticket is good for one use."""


class Mishap(StrEnum):
    """What the driver saw, in the engine's words to the client."""

    NO_SOCKET = "could not be asked: this host has no descriptor, port or memory left for a connection"
    REFUSED = "refused the connection"
    CONNECT_TIMEOUT = "did not accept a connection in time"
    LOST = "closed the connection before it answered"
    CUT = "closed the connection in the middle of its answer"
    GARBLED = "answered something that is not HTTP/1.1"
    UNANSWERED = "gave no answer in time"
    NEVER_STARTED = "sent no token in time"
    SILENT = "fell silent in the middle of a stream"
    DEADLINE = "was still at work when the request's deadline passed"


FAULTS: Final[dict[Mishap, dict[LegKind, type[EngineFault]]]] = {
    Mishap.NO_SOCKET: dict.fromkeys(LegKind, PoolFull),
    Mishap.REFUSED: dict.fromkeys(LegKind, ConnectRefused),
    Mishap.CONNECT_TIMEOUT: dict.fromkeys(LegKind, ConnectTimedOut),
    Mishap.LOST: dict.fromkeys(LegKind, EngineUnreachable),
    Mishap.CUT: {
        LegKind.PREFILL: EngineUnreachable,
        LegKind.WHOLE: StreamBroken,
        LegKind.STREAM: StreamBroken,
        LegKind.PROBE: EngineUnreachable,
        LegKind.OTHER: EngineUnreachable,
    },
    Mishap.GARBLED: {
        LegKind.PREFILL: EngineUnreachable,
        LegKind.WHOLE: StreamBroken,
        LegKind.STREAM: StreamBroken,
        LegKind.PROBE: EngineUnreachable,
        LegKind.OTHER: EngineUnreachable,
    },
    Mishap.UNANSWERED: {
        LegKind.PREFILL: EngineTimeout,
        LegKind.WHOLE: EngineTimeout,
        LegKind.STREAM: StreamSilent,
        LegKind.PROBE: EngineTimeout,
        LegKind.OTHER: EngineTimeout,
    },
    Mishap.NEVER_STARTED: dict.fromkeys(LegKind, StreamSilent),
    Mishap.SILENT: dict.fromkeys(LegKind, StreamSilent),
    Mishap.DEADLINE: dict.fromkeys(LegKind, DeadlinePassed),
}
assert FAULTS.keys() == set(Mishap), "a new mishap needs a row"
assert all(row.keys() == set(LegKind) for row in FAULTS.values()), "every row needs every kind of leg"


OURS: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EADDRNOTAVAIL,
        socket.EAI_MEMORY,
        socket.EAI_SYSTEM,
    }
)
"""Error numbers of a failed attempt to connect that say something of this host alone."""


def connect_mishap(error: OSError) -> Mishap:
    """Return whose fault it is that no connection came about."""
    return Mishap.NO_SOCKET if error.errno in OURS else Mishap.REFUSED


def fault(mishap: Mishap, kind: LegKind, engine: str) -> EngineFault:
    """Return the fault of `mishap` on a leg of `kind` to `engine`, ready to be raised."""
    return FAULTS[mishap][kind](f"engine {engine} {mishap} ({kind} leg)")


class Verdict(StrEnum):
    """What a status other than 200 says about the engine."""

    REFUSED = "refused"
    OVERLOADED = "overloaded"
    PAUSED = "paused"
    FAILED = "failed"


BY_STATUS: Final[dict[int, Verdict]] = {
    408: Verdict.OVERLOADED,
    429: Verdict.OVERLOADED,
}
BY_HUNDREDS: Final[dict[int, Verdict]] = {
    2: Verdict.FAILED,
    3: Verdict.FAILED,
    4: Verdict.REFUSED,
    5: Verdict.FAILED,
}
PAUSED_WORDS: Final = (b"paused", b"sleep")
"""In the body of a 503: somebody told the engine to stop working. Health says 200 all the while."""

BUSY_WORDS: Final = (b"serviceunavailableerror", b"busy", b"overload", b"queue", b"too many")
"""In the body of a 503: admission control. Without any of these words a 503 is an engine whose core is dead."""


def verdict(status: int, body: bytes, *, retry_after: bool) -> Verdict:
    """Return what an answer other than 200 says. `retry_after`: it names a time after which to come again."""
    if status == 503:
        text = body[:4096].lower()
        if any(word in text for word in PAUSED_WORDS):
            return Verdict.PAUSED
        if retry_after or any(word in text for word in BUSY_WORDS):
            return Verdict.OVERLOADED
    return BY_STATUS.get(status) or BY_HUNDREDS.get(status // 100, Verdict.FAILED)
