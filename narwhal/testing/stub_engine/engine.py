"""The stub engine as a whole: its settings, its life and death, and the faults in force."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal
from uuid import uuid4

from aiohttp import web

from narwhal.testing.stub_engine.faults import Fault, FaultKind
from narwhal.testing.stub_engine.fence import Fence
from narwhal.testing.stub_engine.listener import Listener, ResetAtOnce
from narwhal.testing.stub_engine.schedule import FaultBook
from narwhal.testing.stub_engine.state import Generation, StubState, wall_s
from narwhal.testing.stub_engine.tickets import Fetched, KvFetcher, KvOutcome, TicketLedger

VLLM_VERSION: Final = "0.32.0"
KEEPALIVE_S: Final = 5.0
"""vLLM's own: an idle connection is closed after this (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""

_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class StubSettings:
    """What a stub engine is. Times of generation are milliseconds, as engines report them.

    `admin_port` opens a second door for the admin endpoints, which stays open when a fault closes the first; None
    means no second door. `strict_death`: a malformed ticket kills the engine, as it kills a real one.
    """

    role: Literal["prefill", "decode"] = "decode"
    model: str = "stub-model"
    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int | None = None
    advertise_url: str | None = None
    engine_id: str | None = None
    itl_ms: float = 0.0
    prefill_ms: float = 0.0
    max_model_len: int = 32_768
    kv_lease_s: float = 30.0
    kv_fetch_timeout_s: float = 5.0
    strict_death: bool = False
    api_key: str | None = field(default=None, repr=False)
    request_id_headers: bool = False
    faults: tuple[Fault, ...] = ()


class StubEngine:
    """An HTTP server that behaves on the wire like one vLLM engine of a prefill/decode pair.

    `state`, `fence` and `book` may be read at any time. A stopped engine can be started again: the same port, a new
    generation.
    """

    def __init__(self, settings: StubSettings) -> None:
        self.settings = settings
        self.state = StubState()
        self.fence = Fence()
        self.book = FaultBook(settings.faults)
        self.generation = Generation(1, settings.engine_id or str(uuid4()), wall_s())
        self.died = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._listener = Listener(self._accept, settings.host, settings.port)
        self._admin: Listener | None = None
        self._ledger: TicketLedger | None = None
        self._fetcher: KvFetcher | None = None
        self._busy: set[asyncio.Transport] = set()

    @property
    def url(self) -> str:
        """Where the engine is reached; known once it has been started."""
        host = "127.0.0.1" if self.settings.host in _WILDCARDS else self.settings.host
        return self.settings.advertise_url or f"http://{host}:{self._listener.port}"

    @property
    def admin_url(self) -> str | None:
        """The second door, or None."""
        return None if self._admin is None else f"http://127.0.0.1:{self._admin.port}"

    @property
    def ledger(self) -> TicketLedger:
        """The tickets that this generation issued."""
        assert self._ledger is not None, "start the engine first"
        return self._ledger

    @property
    def fetcher(self) -> KvFetcher:
        """The client that fetches KV from prefill engines."""
        assert self._fetcher is not None, "start the engine first"
        return self._fetcher

    @property
    def model(self) -> str:
        """The model that it serves now; a fault may have swapped it."""
        other = self.book.standing(FaultKind.OTHER_MODEL)
        return self.settings.model if other is None else other.fault.model

    @property
    def fingerprint(self) -> str:
        """The system fingerprint of answers: the same on both roles of a pair."""
        return f"vllm-{VLLM_VERSION}-9fca9ed3"

    async def start(self) -> str:
        """Open the door and return its address. Raises OSError when the port is taken."""
        from narwhal.testing.stub_engine.app import build_app

        assert self._runner is None, "the engine runs already"
        if self._ledger is not None:
            self._next_generation()
        self._renew_ledger()
        self._fetcher = KvFetcher(timeout_s=self.settings.kv_fetch_timeout_s)
        self._runner = web.AppRunner(
            build_app(self),
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            access_log=None,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await self._listener.open()
        if self.book.refuses():
            # Opened all the same, to learn the port that the address names.
            self._listener.close()
        if self.settings.admin_port is not None:
            self._admin = Listener(self._protocol, "127.0.0.1", self.settings.admin_port)
            await self._admin.open()
        return self.url

    async def stop(self) -> None:
        """Lose all connections and close every door; safe to call twice."""
        if self._runner is None:
            return
        self._listener.close()
        if self._admin is not None:
            self._admin.close()
        self.lose_connections()
        await self._runner.cleanup()
        await self.fetcher.close()
        self._runner = None

    async def set_faults(self, faults: Iterable[Fault] = ()) -> None:
        """Put exactly `faults` in force; none heals the engine. What hung in a fault that is gone goes on."""
        self.book.replace(faults)
        await self._settle_door()

    async def restart_generation(self, *, spare: asyncio.Transport | None = None) -> None:
        """Become a new process at the same address: new engine id and start time, old tickets void.

        Every connection is lost but `spare`.
        """
        self._next_generation()
        self.died.clear()
        self.lose_connections(spare=spare)
        await self._settle_door()

    def die(self) -> None:
        """Refuse new connections at once and lose the others a moment later, as a process whose engine core died."""
        if not self.died.is_set():
            self.died.set()
            self._listener.close()
            asyncio.get_running_loop().call_later(0.05, self._collapse)

    def _collapse(self) -> None:
        if self.died.is_set():
            self.lose_connections()

    def lose_connections(self, *, spare: asyncio.Transport | None = None) -> None:
        """Abort every connection through the first door, but `spare`. Their clients did not hang up: the engine did."""
        for residence in self.state.residences:
            residence.severed = True
        for handler in self._first_door():
            if handler.transport is not spare:
                handler.transport.abort()

    @contextmanager
    def busy(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Mark a connection as one that waits for an answer."""
        if transport is None:
            yield
            return
        self._busy.add(transport)
        try:
            yield
        finally:
            self._busy.discard(transport)

    async def until_resumed(self) -> None:
        """Return when the engine is not paused."""
        while (pause := self.book.standing(FaultKind.PAUSED)) is not None:
            self.state.waiting += 1
            try:
                await pause.lifted.wait()
            finally:
                self.state.waiting -= 1

    def honour(self, remote_request_id: str, engine_id: str) -> Fetched:
        """Hand out the KV of a ticket, once, and count it."""
        self.sweep_tickets()
        found = self.ledger.fetch(remote_request_id, engine_id)
        self.state.tickets_fetched += found.outcome is KvOutcome.FRESH
        return found

    def sweep_tickets(self) -> None:
        """Release the KV that nobody fetched in time, and count it."""
        self.state.tickets_lapsed += self.ledger.sweep()

    def url_for(self, request: web.Request) -> str:
        """Return where a decode engine reaches this one: behind a wildcard, the address that the router used."""
        if self.settings.host in _WILDCARDS and self.settings.advertise_url is None:
            return f"http://{request.host}"
        return self.url

    def describe(self) -> dict[str, Any]:
        """Return identity, counters, floors and faults as JSON."""
        self.sweep_tickets()
        return {
            "role": self.settings.role,
            "model": self.model,
            "url": self.url,
            "admin_url": self.admin_url,
            "alive": not self.died.is_set(),
            "generation": asdict(self.generation),
            "counters": self.state.describe(),
            "fence": self.fence.describe(),
            "faults": self.describe_faults(),
            "faults_fired": dict(self.book.fired),
        }

    def describe_faults(self) -> list[dict[str, Any]]:
        """Return the faults in force and how often each has met and fired, as JSON."""
        return [{**one.fault.describe(), "matched": one.matched, "fired": one.fired} for one in self.book]

    async def _settle_door(self) -> None:
        if self._runner is None or self.died.is_set():
            return
        if not self.book.refuses():
            await self._listener.open()
            return
        self._listener.close()
        for handler in self._first_door():
            # A client's pool must not outlive the closed door: idle connections end now, busy ones after their answer.
            if handler.transport in self._busy:
                handler.close()
            else:
                handler.transport.close()

    def _first_door(self) -> list[Any]:
        port = self._listener.port
        return [
            handler
            for handler in self._server().connections
            if handler.transport is not None and handler.transport.get_extra_info("sockname")[1] == port
        ]

    def _next_generation(self) -> None:
        self.generation = self.generation.successor(engine_id=self.settings.engine_id)
        self._renew_ledger()

    def _renew_ledger(self) -> None:
        self._ledger = TicketLedger(
            engine_id=self.generation.engine_id,
            lease_s=self.settings.kv_lease_s,
            now=asyncio.get_running_loop().time,
        )

    def _server(self) -> web.Server:
        assert self._runner is not None, "start the engine first"
        assert self._runner.server is not None, "the runner was not set up"
        return self._runner.server

    def _protocol(self) -> asyncio.BaseProtocol:
        return self._server()()

    def _accept(self) -> asyncio.BaseProtocol:
        self.state.connections_accepted += 1
        return ResetAtOnce() if self.book.resets_connection() else self._protocol()
