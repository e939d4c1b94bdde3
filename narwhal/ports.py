"""The sockets that drivers plug into. The upper layers know engines, stores and peers only through these.

Every method may raise what its docstring names and nothing else that is expected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from narwhal.core.events import PairFinding
from narwhal.core.handoff import HandoffDocument
from narwhal.core.lease import AcquireAnswer, Claim, LeaseObservation, LeaseRecord, RenewAnswer
from narwhal.core.vocabulary import EngineId, FencingToken, PeerSign, RouterId

Clock = Callable[[], float]
"""Seconds that go on while the host is suspended (CLOCK_BOOTTIME); for the lease deadline only."""


@dataclass(frozen=True, slots=True)
class Member:
    """A router as it announces itself: who it is, what it could do, how far it has followed."""

    router: RouterId
    incarnation: str
    url: str
    admin_url: str
    role: str
    engine_set: str
    handoff: tuple[FencingToken, int] | None
    eligible: bool
    reason: str
    version: str


class LeaseStore(Protocol):
    """The shared lease. Source: ha.md, 2.1 to 2.3.

    Each method raises StoreUnavailable when the store gave no answer (what happened is then unknown) and StoreMisused
    when it answered that it never will (password, permission).
    """

    async def observe(self) -> LeaseObservation:
        """Return one consistent look at lease, token, epoch, claim, last release and handoff version."""
        ...

    async def acquire(self, candidate: LeaseRecord, *, floor: FencingToken, epoch: str | None) -> AcquireAnswer:
        """Take the lease for `candidate.ttl_ms` if nobody holds it, minting a token above `floor` and all before.

        `epoch` is the one observed; another one in the store answers DataLost. Idempotent for one incarnation.
        """
        ...

    async def renew(self, record: LeaseRecord) -> RenewAnswer:
        """Extend the lease by its TTL if it is still exactly `record`; never create it."""
        ...

    async def release(self, record: LeaseRecord, *, successor: RouterId | None) -> bool:
        """Give the lease up and say so in the event stream. False when it was not ours any more."""
        ...

    async def claim(self, expected: LeaseRecord, claim: Claim) -> bool:
        """Ask the holder of exactly `expected` to give way. False when it no longer holds."""
        ...

    async def announce(self, member: Member) -> None:
        """Record this router among the members for a while (10 s)."""
        ...

    async def members(self) -> Sequence[Member]:
        """Return the routers that announced themselves lately, sorted by id."""
        ...

    async def wait_for_event(self, *, timeout_s: float) -> None:
        """Return when something was written to the event stream since the last call, or after `timeout_s`.

        A wake-up, not a truth: whoever waits must observe afterwards.
        """
        ...


class HandoffStore(Protocol):
    """One place where handoffs are kept: the local file, or the mirror in Redis."""

    async def put(self, document: HandoffDocument) -> None:
        """Replace the stored document.

        Raises HandoffRefused when a newer token or version is recorded, StoreUnavailable when nothing is known.
        """
        ...

    async def get(self) -> HandoffDocument | None:
        """Return the stored document or None. Raises HandoffRejected (unreadable) or StoreUnavailable."""
        ...


class RouterPeer(Protocol):
    """The other router's /ready, read once."""

    async def look(self, url: str, *, timeout_s: float) -> PeerLook:
        """Return what `url`/ready says; never raises."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLook:
    """One look at a peer. `token` is what it claims to hold; `detail` goes to the log."""

    sign: PeerSign
    token: FencingToken | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a leg goes."""

    id: EngineId
    url: str


@dataclass(frozen=True, slots=True)
class LegCall:
    """One leg as the serving layer asks for it.

    `path` is the OpenAI path, `body` the client's document (never mutated by the driver), `headers` what the engine
    is told (request id, trace, fencing token). `timeout_s` bounds a prefill answer.
    """

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The opaque parameters that authorise one decode leg to fetch the KV of one prefill. Used once, never stored.

    `params` goes verbatim to the decode engine; `issued_at` is loop seconds; `generation` is the prefill process.
    """

    params: Mapping[str, Any]
    issued_at: float
    generation: str


@dataclass(frozen=True, slots=True)
class EngineRefusal:
    """The engine answered 4xx other than 408/429: the client's mistake, passed on as it is."""

    status: int
    body: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete non-streaming answer of an engine, already checked and stripped of internal addresses."""

    body: bytes
    usage: Mapping[str, int] | None = None


class DecodeStream(Protocol):
    """An accepted streaming decode. Iterating yields the bytes for the client, the first one from the first real token on.

    Iteration raises an EngineFault when the stream breaks, and ends normally only after a finish reason for every
    choice and the terminal marker. `aclose` cancels the leg; it is safe to call twice.
    """

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class EngineData(Protocol):
    """The data pool: the legs of client requests. Raises EngineFault subclasses only."""

    async def prefill(self, engine: EngineAddress, call: LegCall, *, timeout_s: float) -> KvTicket | EngineRefusal:
        """Run the prefill leg and return a ticket that was checked for shape."""
        ...

    async def decode(
        self, engine: EngineAddress, call: LegCall, ticket: KvTicket | None, *, timeout_s: float
    ) -> WholeAnswer | EngineRefusal:
        """Run a non-streaming decode leg; without a ticket the engine computes the whole request."""
        ...

    async def decode_stream(
        self,
        engine: EngineAddress,
        call: LegCall,
        ticket: KvTicket | None,
        *,
        first_token_timeout_s: float,
        silence_timeout_s: float,
    ) -> DecodeStream | EngineRefusal:
        """Start a streaming decode leg; returns once the engine has accepted or refused it."""
        ...

    async def forward(self, engine: EngineAddress, call: LegCall, *, timeout_s: float) -> WholeAnswer | EngineRefusal:
        """Pass a small request (token counting) through to one engine."""
        ...


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """One look at an engine's /health. `conclusive` is False when our own control pool was full."""

    healthy: bool
    conclusive: bool = True
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineTelemetry:
    """What an engine says of itself in /metrics; None where it does not say.

    `generation` is its process identity (start time); loads are counts.
    """

    generation: str | None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


class EngineControl(Protocol):
    """The reserved control pool: health, probes, readmission checks. Never raises for what an engine does."""

    async def health(self, engine: EngineAddress, *, timeout_s: float) -> HealthAnswer:
        """Ask /health once."""
        ...

    async def models(self, engine: EngineAddress, *, timeout_s: float) -> tuple[Mapping[str, Any], ...] | None:
        """Return the cards of /v1/models, or None when it gave no readable answer."""
        ...

    async def telemetry(self, engine: EngineAddress, *, timeout_s: float) -> EngineTelemetry | None:
        """Return what /metrics says, or None when it gave no readable answer."""
        ...

    async def infer(
        self, prefill: EngineAddress, decode: EngineAddress, *, model: str, timeout_s: float
    ) -> PairFinding:
        """Run one tiny request over the pair, with a fresh prompt and a fresh ticket; each leg has its own deadline."""
        ...
