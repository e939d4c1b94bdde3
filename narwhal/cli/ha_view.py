"""The pair as seen from outside: lease and announcements from Redis, /ready from each router, and a judgement.

Source: ops.md, 5.7: healthy means exactly one active router that serves and at least one warm standby.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import aiohttp

from narwhal.core.lease import LeaseObservation
from narwhal.core.vocabulary import FencingToken, RouterRole
from narwhal.errors import HandoffRejected
from narwhal.ports import Member
from narwhal.store.keys import Keys
from narwhal.store.opening import RedisStores
from narwhal.store.replies import items, text

READY_TIMEOUT_S: Final = 1.0
WARM_REASON: Final = "standby"


class Reach(StrEnum):
    """Whether a router's /ready could be asked."""

    ANSWERED = "answered"
    SILENT = "silent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ReadyView:
    """One look at a router's /ready. `document` is empty unless it answered; UNKNOWN means no way from here."""

    reach: Reach
    status: int = 0
    document: Mapping[str, Any] | None = None
    detail: str = ""

    @property
    def ready(self) -> bool:
        """Whether it said that it serves."""
        return self.reach is Reach.ANSWERED and self.status == 200


@dataclass(frozen=True, slots=True)
class RouterView:
    """One router: what it announced, what its /ready says, how long ago it announced itself (seconds)."""

    member: Member
    ready: ReadyView
    age_s: float | None
    behind: int | None

    @property
    def role(self) -> str:
        """What it says it is now; what it announced when it cannot be asked."""
        document = self.ready.document or {}
        return str(document.get("role") or self.member.role)

    @property
    def reason(self) -> str:
        """Why it is ready or not, in its own words where it can be asked."""
        if self.ready.reach is Reach.ANSWERED:
            return str((self.ready.document or {}).get("reason") or f"status {self.ready.status}")
        return self.ready.detail

    @property
    def warm(self) -> bool:
        """Whether it could take over now; judged by its announcement only where it cannot be asked."""
        if self.ready.reach is Reach.UNKNOWN:
            return self.member.role == RouterRole.STANDBY and self.member.eligible
        document = self.ready.document or {}
        return self.role == RouterRole.STANDBY and self.reason == WARM_REASON and document.get("control_ready") is True


@dataclass(frozen=True, slots=True)
class PairView:
    """Everything that one look showed. `handoff_age_s` is None when there is no readable handoff."""

    seen: LeaseObservation
    routers: Sequence[RouterView]
    handoff_age_s: float | None

    def problems(self) -> list[str]:
        """Return what keeps this from being exactly one serving active and at least one warm standby."""
        record = self.seen.record
        found = []
        serving = [view.member.router for view in self.routers if view.ready.ready]
        if record is None:
            found.append("no active router: nobody holds the lease")
        elif record.router not in serving:
            found += self._why_the_holder_does_not_serve(record.router)
        if len(serving) > 1:
            found.append(f"{len(serving)} routers say that they are ready: {', '.join(serving)}")
        found += [
            f"{router} says that it is ready but does not hold the lease"
            for router in serving
            if record is not None and router != record.router
        ]
        standbys = [view for view in self.routers if record is None or view.member.router != record.router]
        if not any(view.warm for view in standbys):
            cold = [f"{view.member.router} is {view.role}: {view.reason}" for view in standbys]
            found.append("no warm standby: " + ("; ".join(cold) or "no other router has announced itself"))
        return found

    def _why_the_holder_does_not_serve(self, router: str) -> list[str]:
        view = next((view for view in self.routers if view.member.router == router), None)
        if view is None:
            return [f"{router} holds the lease but has not announced itself"]
        if view.ready.reach is Reach.UNKNOWN and view.member.role == RouterRole.ACTIVE:
            return []
        return [f"{router} holds the lease but does not serve: {view.reason}"]


async def look(stores: RedisStores, *, cluster: str) -> PairView:
    """Return the pair as it is now. Raises StoreUnavailable or StoreMisused when Redis does not tell."""
    seen = await stores.lease.observe()
    members = await stores.lease.members()
    ages = await _ages(stores, Keys.of(cluster))
    known = {member.router: member for member in members}
    if seen.record is not None and seen.record.router not in known:
        known[seen.record.router] = _unannounced(seen)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), trust_env=False, auto_decompress=False
    ) as session:
        answers = await asyncio.gather(*(ask_ready(session, member.url) for member in known.values()))
    routers = [
        RouterView(member, answer, ages.get(member.router), _behind(member.handoff, seen.handoff))
        for member, answer in zip(known.values(), answers, strict=True)
    ]
    return PairView(seen, sorted(routers, key=lambda view: view.member.router), await _handoff_age_s(stores))


async def ask_ready(session: aiohttp.ClientSession, url: str) -> ReadyView:
    """Return what `url`/ready says; never raises."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S), session.get(f"{url}/ready", allow_redirects=False) as answer:
            return ReadyView(Reach.ANSWERED, answer.status, json.loads(await answer.read()))
    except TimeoutError:
        return ReadyView(Reach.SILENT, detail=f"/ready gave no answer in {READY_TIMEOUT_S:g} s")
    except aiohttp.ClientConnectorDNSError:
        return ReadyView(Reach.UNKNOWN, detail="its name is not known here; shown as it announced itself")
    except aiohttp.ClientError as error:
        return ReadyView(Reach.SILENT, detail=f"/ready: {error}" if str(error) else f"/ready: {type(error).__name__}")
    except ValueError:
        return ReadyView(Reach.SILENT, detail="/ready answered something that is not JSON")


async def _ages(stores: RedisStores, keys: Keys) -> dict[str, float]:
    """Return the seconds since each router announced itself, on Redis' own clock."""
    now_s, now_us = items(await stores.control.run("TIME"))
    index = items(await stores.control.run("ZRANGE", keys.members, 0, -1, "WITHSCORES", what="MEMBERS"))
    now_ms = int(text(now_s)) * 1000 + int(text(now_us)) // 1000
    names, scores = index[::2], index[1::2]
    return {text(name): max(0.0, now_ms - float(text(score))) / 1000 for name, score in zip(names, scores, strict=True)}


async def _handoff_age_s(stores: RedisStores) -> float | None:
    try:
        document = await stores.handoff.get()
    except HandoffRejected:
        return None
    return None if document is None else max(0.0, datetime.now(UTC).timestamp() - document.written_wall)


def _behind(followed: tuple[FencingToken, int] | None, newest: tuple[FencingToken, int] | None) -> int | None:
    """Return how many versions a router is behind, None when it follows another term or none."""
    if followed is None or newest is None or followed[0] != newest[0]:
        return None
    return max(0, newest[1] - followed[1])


def _unannounced(seen: LeaseObservation) -> Member:
    """Return what the lease says of a holder that is not among the members."""
    record = seen.record
    assert record is not None
    return Member(
        router=record.router,
        incarnation=record.incarnation,
        url=record.url,
        admin_url=record.admin_url,
        role="unannounced",
        engine_set=record.engine_set,
        handoff=None,
        eligible=False,
        reason="",
        version=record.version,
    )
