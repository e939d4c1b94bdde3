"""The drill's clients: the official OpenAI client, streaming and not, behind a load balancer's manners.

A request goes to the router that /ready names. It is sent again only when it is certain that no engine has seen it:
the connection was refused, the router said so with X-Narwhal-Not-Executed, or the router was dead before it was sent.
Everything else that goes wrong is a failure that a client would see.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from narwhal.demo.clock import lease_clock
from narwhal.demo.prober import Prober

if TYPE_CHECKING:
    from openai import AsyncOpenAI

REQUEST_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 0.5
NOBODY_TIMEOUT_S: Final = 15.0
NOBODY_PAUSE_S: Final = 0.005
RETRY_PAUSE_S: Final = 0.01
TOKENS: Final = 16
KINDS: Final = ("chat_stream", "chat", "completion_stream", "completion")
PAUSE_S: Final = 0.02


class Outcome(StrEnum):
    """How one request ended for its client."""

    OK = "ok"
    FAILED_IN_FLIGHT = "failed_in_flight"
    FAILED_OTHER = "failed_other"


@dataclass(slots=True)
class Attempt:
    """One try of a request at one router; instants are on the lease clock. `admitted_by` is None until it answered."""

    router: str
    sent_at: float
    admitted_by: float | None = None
    ended_at: float = 0.0
    error: str = ""


@dataclass(slots=True)
class DrillRequest:
    """One request of one client, with every try."""

    kind: str
    attempts: list[Attempt] = field(default_factory=list)
    outcome: Outcome = Outcome.FAILED_OTHER
    detail: str = ""


@dataclass(slots=True)
class Death:
    """The router that the drill killed: the signal left at `killed_at`, and it was gone at `gone_at`."""

    router: str
    killed_at: float
    gone_at: float = float("inf")

    def certain_at(self, at: float) -> bool:
        """Whether the router was surely dead at `at`."""
        return at >= self.gone_at


class Load:
    """Clients that go on until `stop`. `requests` holds what was done."""

    def __init__(self, prober: Prober, *, model: str) -> None:
        self.requests: list[DrillRequest] = []
        self.death: Death | None = None
        self._prober = prober
        self._model = model
        self._stopping = False
        self._clients: dict[str, AsyncOpenAI] = {}

    def count(self, outcome: Outcome, *, kind: str | None = None, router: str | None = None) -> int:
        """Return how many requests ended so; of one kind, or answered by one router, where given."""
        return sum(
            request.outcome is outcome
            and kind in (None, request.kind)
            and router in (None, request.attempts[-1].router if request.attempts else None)
            for request in self.requests
        )

    def stop(self) -> None:
        """Let every client finish what it does and send nothing more."""
        self._stopping = True

    async def run(self, *, workers: int) -> None:
        """Run `workers` clients of each kind until `stop`."""
        async with self._opened(), asyncio.TaskGroup() as group:
            for index, kind in enumerate(KINDS * workers):
                group.create_task(self._work(kind, patience_s=NOBODY_PAUSE_S * (index + 1)), name=f"client-{index}")

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        from openai import AsyncOpenAI, Timeout

        timeout = Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        for router, url in self._prober.urls.items():
            self._clients[router] = AsyncOpenAI(
                base_url=f"{url}/v1", api_key="drill", max_retries=0, timeout=timeout, organization="", project=""
            )
        try:
            yield
        finally:
            for client in self._clients.values():
                await client.close()

    async def _work(self, kind: str, *, patience_s: float) -> None:
        while not self._stopping:
            request = DrillRequest(kind)
            await self._serve(request, patience_s=patience_s)
            self.requests.append(request)
            await asyncio.sleep(PAUSE_S)

    async def _serve(self, request: DrillRequest, *, patience_s: float) -> None:
        """Try until the request is answered or has failed for good.

        Clients ask for a router that serves at different rates (`patience_s`), so that they do not all come at once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + NOBODY_TIMEOUT_S
        while loop.time() < deadline:
            router = self._prober.serving
            if router is None:
                await asyncio.sleep(patience_s)
                continue
            attempt = Attempt(router, lease_clock())
            request.attempts.append(attempt)
            if await self._try(request, attempt):
                return
            await asyncio.sleep(RETRY_PAUSE_S)
        request.detail = f"no router served it in {NOBODY_TIMEOUT_S:g} s"

    async def _try(self, request: DrillRequest, attempt: Attempt) -> bool:
        """Send it once; True when the request has ended, well or not, False when it may be sent again."""
        from openai import OpenAIError

        try:
            await self._call(request.kind, attempt)
        except (OpenAIError, OSError, EOFError, BrokenAnswer) as error:
            attempt.error = f"{type(error).__name__}: {error}"
            attempt.ended_at = lease_clock()
            if self._untouched(attempt, error):
                return False
            request.outcome = Outcome.FAILED_IN_FLIGHT if self._was_in_flight(attempt) else Outcome.FAILED_OTHER
            request.detail = f"{attempt.router}: {attempt.error}"
            return True
        attempt.ended_at = lease_clock()
        request.outcome = Outcome.OK
        return True

    async def _call(self, kind: str, attempt: Attempt) -> None:
        client = self._clients[attempt.router]
        common: dict[str, Any] = {"model": self._model, "max_tokens": TOKENS, "stream": kind.endswith("_stream")}
        if kind.startswith("chat"):
            raw = await client.chat.completions.with_raw_response.create(
                messages=[{"role": "user", "content": "Say something about the sea."}], **common
            )
        else:
            raw = await client.completions.with_raw_response.create(prompt="The sea is", **common)
        attempt.admitted_by = lease_clock()
        named = raw.headers.get("x-narwhal-router")
        if named != attempt.router:
            raise BrokenAnswer(f"the answer names router {named!r}")
        answer: Any = raw.parse()
        if common["stream"]:
            reasons = [choice.finish_reason async for chunk in answer for choice in chunk.choices]
        else:
            reasons = [choice.finish_reason for choice in answer.choices]
        if not reasons or reasons[-1] is None:
            raise BrokenAnswer("the answer has no finish reason")

    def _untouched(self, attempt: Attempt, error: BaseException) -> bool:
        """Whether it is certain that no engine has seen the request."""
        if attempt.admitted_by is not None:
            return False
        response = getattr(error, "response", None)
        if response is not None:
            return bool(response.status_code == 503 and response.headers.get("x-narwhal-not-executed") == "1")
        if was_refused(error):
            return True
        return self.death is not None and attempt.router == self.death.router and self.death.certain_at(attempt.sent_at)

    def _was_in_flight(self, attempt: Attempt) -> bool:
        """Whether the request was on the killed router when it died, which nobody can save."""
        death = self.death
        return (
            death is not None
            and attempt.router == death.router
            and attempt.sent_at < death.gone_at
            and attempt.ended_at >= death.killed_at
        )


class BrokenAnswer(Exception):
    """The client got an answer that is not a complete one of the router that it asked."""


def was_refused(error: BaseException | None) -> bool:
    """Whether `error` goes back to a connection that was never made."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError) or type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            return True
        error = error.__cause__ or error.__context__
    return False
