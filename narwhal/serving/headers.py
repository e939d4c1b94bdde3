"""What engines are told about a request in headers: its id, its trace, and the term under which it was admitted.

Nothing of the client's headers is passed on but the trace context; its Authorization is for us, not for the engines.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Final

from narwhal.core.vocabulary import FencingToken, Leg

REQUEST_ID: Final = "X-Request-Id"
ROUTER: Final = "X-Narwhal-Router"
OWNER: Final = "X-Narwhal-Owner"
NOT_EXECUTED: Final = "X-Narwhal-Not-Executed"
FENCE: Final = "X-Narwhal-Fence"
PHASE: Final = "X-Narwhal-Phase"
RETRY_AFTER: Final = "Retry-After"
SHOULD_RETRY: Final = "x-should-retry"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_REQUEST_ID: Final = re.compile(r"[\w.:@/+=~-]{1,128}", re.ASCII)
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")

ADMIT: Final = "admit"
DECODE: Final = "decode"
"""Phases: new work, which only the lease's holder may bring, and the completion of what was admitted."""


class RequestIds:
    """Names requests: a client's own id is kept where it is harmless, and engines see it with a unique suffix."""

    __slots__ = ("_count", "_prefix")

    def __init__(self) -> None:
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    def public(self, sent: str | None) -> str:
        """Return the id that the client will see: its own, or a new one."""
        if sent is not None and _REQUEST_ID.fullmatch(sent):
            return sent
        return f"{self._prefix}-{next(self._count):x}"

    def internal(self, public: str) -> str:
        """Return the id for one attempt's legs, unique among all routers."""
        return f"{public}-{self._prefix}{next(self._count):x}"


class Trace:
    """A W3C trace context that a request came with, or a new one; each leg is a child of its own."""

    __slots__ = ("_flags", "_spans", "_state", "trace_id")

    def __init__(self, headers: Mapping[str, str]) -> None:
        entropy = os.urandom(32).hex()
        self._spans = {Leg.PREFILL: entropy[32:48], Leg.DECODE: entropy[48:64]}
        sent = headers.get(TRACEPARENT)
        parsed = _TRACEPARENT.fullmatch(sent) if sent is not None else None
        if parsed is None or not _valid(parsed):
            self.trace_id, self._flags, self._state = entropy[:32], "01", None
            return
        self.trace_id, self._flags = parsed[2], parsed[4]
        state = headers.get(TRACESTATE)
        self._state = state if state is not None and _TRACESTATE.fullmatch(state) else None

    def add_to(self, headers: dict[str, str], leg: Leg) -> None:
        """Put the context of `leg` into `headers`."""
        headers[TRACEPARENT] = f"00-{self.trace_id}-{self._spans[leg]}-{self._flags}"
        if self._state is not None:
            headers[TRACESTATE] = self._state


def _valid(parsed: re.Match[str]) -> bool:
    version, trace_id, span_id, _, rest = parsed.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return False
    return trace_id.strip("0") != "" and span_id.strip("0") != ""


def leg_headers(internal_id: str, trace: Trace, token: FencingToken, leg: Leg, *, phase: str) -> dict[str, str]:
    """Return everything that an engine is told about one leg."""
    headers = {REQUEST_ID: internal_id, FENCE: str(token), PHASE: phase}
    trace.add_to(headers, leg)
    return headers
