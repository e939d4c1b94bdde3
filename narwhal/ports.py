"""The sockets that drivers plug into. The upper layers know engines, stores and peers only through these.

Every method may raise what its docstring names and nothing else that is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from narwhal.core.events import PairFinding
from narwhal.core.faults import EngineFault, EngineTimeout, EngineUnreachable, StreamBroken
from narwhal.core.handoff import HandoffDocument
from narwhal.core.lease import AcquireAnswer, Claim, LeaseObservation, LeaseRecord, RenewAnswer
from narwhal.core.vocabulary import EngineId, FencingToken, PeerSign, RouterId
from narwhal.errors import NarwhalError

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

    async def acquire(
        self,
        candidate: LeaseRecord,
        *,
        floor: FencingToken,
        epoch: str | None,
        after: FencingToken | None = None,
        deposing: LeaseRecord | None = None,
    ) -> AcquireAnswer:
        """Take the lease for `candidate.ttl_ms` if nobody holds it, minting a token above `floor` and all before.

        `epoch` is the data set observed, and `after` the highest token granted in it: if the store is another one, or
        has granted another term since, the answer is DataLost. None expects nothing. Idempotent for one incarnation.
        A lease that is exactly the term in `deposing`, which is known to be over, counts as held by nobody.
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
    """One look at a peer. `token` is its latest term, `term_over` its word that it will never admit under it again.

    `detail` goes to the log.
    """

    sign: PeerSign
    token: FencingToken | None = None
    detail: str = ""
    term_over: bool = False


class HolderWatch(Protocol):
    """The kernel's word on the process that holds the lease."""

    async def death(self, holder: LeaseRecord) -> str:
        """Return once the process of `holder` is proven dead, with the proof in words; never raises.

        Where nothing can prove it this waits for ever; a hang, a pause and a network fault are no proof.
        """
        ...


class EngineAddress(NamedTuple):
    """Where a leg goes."""

    id: EngineId
    url: str


class LegCall(NamedTuple):
    """One leg as the serving layer asks for it.

    `path` is the OpenAI path. `body` is the client's document and `raw` its bytes; drivers change neither, and a decode
    engine gets `raw` as the client wrote it. `headers` is what the engine is told (request id, trace, fencing token);
    `choices` is how many choices the answer must finish; `deadline` is the request's own, in loop seconds.
    """

    path: str
    body: Mapping[str, Any]
    raw: bytes
    headers: Mapping[str, str]
    deadline: float
    choices: int = 1


class NothingSent(NarwhalError):
    """Marks a fault that came before the first byte: no engine has seen anything of the request."""


class ConnectRefused(EngineUnreachable, NothingSent):
    """The engine did not take the connection."""


class ConnectTimedOut(EngineTimeout, NothingSent):
    """The engine did not answer the attempt to connect."""


class StreamSilent(StreamBroken):
    """The stream's first token, or the next one, did not come in time."""


class KvTicketUnusable(EngineFault):
    """A ticket was dropped before any decode engine saw it: too old, or of a process that is gone. Not evidence."""


class KvTicket:
    """The opaque parameters that authorise one decode leg to fetch the KV of one prefill.

    It can be spent once; then its parameters are gone. `issued_at` is loop seconds, `engine_id` names the process that
    holds the KV. `fate` tells what became of it: `orphaned` until it is spent (`consumed`) or dropped (`discarded`).
    Source: a reference that is used twice answers with another text under HTTP 200.
    """

    __slots__ = ("_params", "age_s", "engine_id", "fate", "issued_at", "max_age_s")

    def __init__(self, params: bytes, *, engine_id: str, issued_at: float, max_age_s: float) -> None:
        self._params: bytes | None = params
        self.engine_id = engine_id
        self.issued_at = issued_at
        self.max_age_s = max_age_s
        self.age_s: float | None = None
        self.fate = "orphaned"

    def spend(self, *, now: float) -> bytes:
        """Return the parameters as JSON and forget them. Raises KvTicketUnusable when they are too old."""
        params = self._params
        assert params is not None, "a ticket was spent twice"
        self.age_s = age_s = now - self.issued_at
        if age_s > self.max_age_s:
            self.discard()
            raise KvTicketUnusable(f"the ticket is {age_s:.1f} s old, more than {self.max_age_s:.1f} s: dropped unused")
        self._params = None
        self.fate = "consumed"
        return params

    def discard(self) -> None:
        """Forget the parameters of a ticket that must not be used."""
        self._params = None
        self.fate = "discarded"


@dataclass(frozen=True, slots=True)
class NothingPinned:
    """The prefill ran but holds no KV for anybody: the decode engine must compute the whole prompt."""


@dataclass(frozen=True, slots=True)
class EngineRefusal:
    """The engine answered 4xx other than 408/429: the client's mistake, passed on in OpenAI's error shape."""

    status: int
    body: bytes


class Usage(NamedTuple):
    """Tokens as the engine counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class WholeAnswer(NamedTuple):
    """A complete non-streaming answer of an engine, already checked and stripped of internal addresses."""

    body: bytes
    usage: Usage | None = None


class ByteSink(Protocol):
    """Where a stream's bytes go."""

    def write(self, data: bytes) -> bool:
        """Take `data`; False asks the writer to wait for `drain` before it writes more."""
        ...

    async def drain(self) -> None:
        """Return when more may be written."""
        ...


class DecodeStream(Protocol):
    """A streaming decode whose first real token has come. Only whole frames leave it, as the engine wrote them.

    `head` is everything up to that token.
    """

    head: bytes

    @property
    def frames(self) -> int:
        """How many frames have been passed on."""
        ...

    @property
    def usage(self) -> Usage | None:
        """The engine's token counts, if they have come."""
        ...

    async def pipe(self, sink: ByteSink) -> None:
        """Pass on everything after `head`.

        Returns after a finish reason for every choice and the terminal marker; raises an EngineFault when the stream
        breaks. What the engine reported as an error is in the fault, not in the bytes.
        """
        ...

    def close(self) -> None:
        """Cancel the leg unless it is complete; safe to call twice."""
        ...


class Legs(Protocol):
    """The legs of one request, which share one slot of the data pool: one leg at a time. Raise EngineFaults only."""

    async def prefill(
        self, engine: EngineAddress, call: LegCall, *, timeout_s: float
    ) -> KvTicket | NothingPinned | EngineRefusal:
        """Run the prefill leg and return a ticket that was checked for shape."""
        ...

    async def decode(
        self, engine: EngineAddress, call: LegCall, ticket: KvTicket | None
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
        """Start a streaming decode leg and return at its first real token, or when the engine refused it."""
        ...

    async def forward(self, engine: EngineAddress, call: LegCall, *, timeout_s: float) -> WholeAnswer | EngineRefusal:
        """Pass a small request (token counting) through to one engine."""
        ...


class EngineData(Protocol):
    """The data pool: the legs of client requests."""

    in_use: int
    capacity: int

    def reserve(self) -> AbstractContextManager[Legs]:
        """Hold one slot of the pool for a whole request. Raises PoolFull at once when there is none."""
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
