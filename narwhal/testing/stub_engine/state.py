"""What a stub engine counts and remembers, so that a test can say what reached it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from multidict import CIMultiDict

from narwhal.testing.stub_engine.faults import FaultLeg


def wall_s() -> float:
    """Return Unix seconds, which real engines put into `created` and `process_start_time_seconds`."""
    return datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Generation:
    """One life of the engine process: who it is, and since when (Unix seconds)."""

    number: int
    engine_id: str
    start_time: float

    def successor(self, *, engine_id: str | None) -> Generation:
        """Return the process after this one; its start time differs as printed (10 ms)."""
        return Generation(self.number + 1, engine_id or str(uuid4()), max(wall_s(), self.start_time + 0.01))


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as it arrived. `body` is None for one that is large or not JSON."""

    leg: FaultLeg
    path: str
    headers: CIMultiDict[str]
    body: Any

    def describe(self) -> dict[str, Any]:
        """Return it as JSON: header names in lower case, values that came several times joined by ", "."""
        headers = {name.lower(): ", ".join(self.headers.getall(name)) for name in self.headers}
        return {"leg": self.leg.value, "path": self.path, "headers": headers, "body": self.body}


@dataclass(slots=True, eq=False)
class Residence:
    """One request that is being served. `severed` says that the engine itself broke the connection."""

    severed: bool = False


_NOT_COUNTERS = ("seen", "residences")


@dataclass(slots=True)
class StubState:
    """Counters since the stub started; they outlive a restart of the generation.

    Of the ticket counts, the prefill side keeps issued, fetched and lapsed; the decode side keeps consumed (good),
    and reused, expired, unknown, mismatched (answered with a wrong text), malformed and kv_load_failures.
    """

    requests: Counter[str] = field(default_factory=Counter)
    resident: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    severed: int = 0
    waiting: int = 0
    decode_alone: int = 0
    authorization_seen: int = 0
    tickets_issued: int = 0
    tickets_fetched: int = 0
    tickets_lapsed: int = 0
    tickets_consumed: int = 0
    tickets_reused: int = 0
    tickets_expired: int = 0
    tickets_unknown: int = 0
    tickets_mismatched: int = 0
    tickets_malformed: int = 0
    kv_load_failures: int = 0
    tokens_local: int = 0
    tokens_transferred: int = 0
    tokens_generated: int = 0
    connections_accepted: int = 0
    seen: deque[SeenRequest] = field(default_factory=lambda: deque(maxlen=32))
    residences: set[Residence] = field(default_factory=set)

    def note(self, leg: FaultLeg, path: str, headers: CIMultiDict[str], body: Any = None) -> None:
        """Count a request and remember what it looked like."""
        self.requests[leg.value] += 1
        self.authorization_seen += "Authorization" in headers
        self.seen.append(SeenRequest(leg, path, headers, body))

    @contextmanager
    def residing(self, leg: FaultLeg) -> Iterator[Residence]:
        """Count one generation request while it is here, and how it left."""
        residence = Residence()
        self.residences.add(residence)
        self.resident[leg.value] += 1
        try:
            yield residence
        except (asyncio.CancelledError, ConnectionResetError) as error:
            if residence.severed:
                self.severed += 1
            else:
                self.aborted[leg.value] += 1
            # A write that found the client gone ends as the cancellation does that is on its way.
            raise asyncio.CancelledError from error
        else:
            self.finished[leg.value] += 1
        finally:
            self.residences.discard(residence)
            self.resident[leg.value] -= 1

    def describe(self) -> dict[str, Any]:
        """Return the counters as JSON."""
        counters = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_COUNTERS}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in counters.items()}
