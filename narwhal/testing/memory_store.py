"""Redis as the lease protocol sees it, in memory and on the loop's time: the twin of `narwhal.store.redis_store`.

A `MemoryRedis` is the world's one Redis. Each router reaches it through a `MemoryLink` of its own, which a test can
cut, slow down, or rob of one reply. There is no thread, no randomness and no clock but the loop's, so that a simulation
owns everything. What the twin promises is what the Lua scripts promise; one contract suite runs against both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from narwhal.core.handoff import HandoffDocument, decode_handoff
from narwhal.core.lease import (
    AcquireAnswer,
    Claim,
    DataLost,
    Granted,
    LeaseObservation,
    LeaseRecord,
    Lost,
    Occupied,
    Release,
    RenewAnswer,
    Renewed,
)
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.errors import HandoffRefused, StoreUnavailable
from narwhal.ports import Member
from narwhal.store.keys import CLAIM_TTL_MS, EVENTS_MAX, MEMBER_TTL_MS
from narwhal.store.refusals import refusal

T = TypeVar("T")

NOBODY: Final = FencingToken(0)


@dataclass(frozen=True, slots=True)
class _Fading(Generic[T]):
    """A value that is gone at `until` (the world's seconds)."""

    value: T
    until: float


@dataclass(slots=True)
class _Data:
    """What the keys of one cluster hold; see `narwhal.store.keys`."""

    lease: _Fading[LeaseRecord] | None = None
    token: FencingToken = NOBODY
    epoch: str | None = None
    claim: _Fading[Claim] | None = None
    release: Release | None = None
    handoff: HandoffDocument | None = None
    members: dict[RouterId, _Fading[Member]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


class MemoryRedis:
    """The shared state of one cluster.

    `clock_offset_s` is added to the loop's time, as Redis' wall clock may step.
    """

    def __init__(self, *, clock_offset_s: float = 0.0) -> None:
        self.clock_offset_s = clock_offset_s
        self.written = 0
        self.bell = asyncio.Event()
        self._data = _Data()
        self._epochs = 0

    def flush(self) -> None:
        """Lose all data, as FLUSHALL or a restart without persistence does."""
        self._data = _Data()
        self._ring()

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The stream, newest last."""
        return self._data.events

    def drop_lease(self) -> None:
        """Delete the lease key alone, as eviction or an operator's DEL does."""
        self._data.lease = None

    def drop_token(self) -> None:
        """Delete the token key alone."""
        self._data.token = NOBODY

    def observe(self) -> LeaseObservation:
        """Answer OBSERVE."""
        lease = self._standing(self._data.lease)
        return LeaseObservation(
            record=lease.value if lease else None,
            pttl_ms=self._left_ms(lease),
            token=self._data.token,
            epoch=self._data.epoch,
            claim=self._claimed(),
            release=self._data.release,
            handoff=self._data.handoff.order if self._data.handoff is not None else None,
        )

    def acquire(
        self,
        candidate: LeaseRecord,
        *,
        floor: FencingToken,
        epoch: str | None,
        after: FencingToken | None,
        deposing: LeaseRecord | None = None,
    ) -> AcquireAnswer:
        """Answer ACQUIRE."""
        lease = self._standing(self._data.lease)
        if lease is not None and lease.value != deposing:
            mine = (lease.value.router, lease.value.incarnation) == (candidate.router, candidate.incarnation)
            if not mine:
                return Occupied(lease.value, self._left_ms(lease))
            self._data.lease = self._fading(lease.value, candidate.ttl_ms)
            return Granted(lease.value, fresh=False)
        if (epoch is not None and epoch != self._data.epoch) or after not in (None, self._data.token):
            return DataLost()
        handed_off = self._data.handoff.lease.token if self._data.handoff is not None else NOBODY
        highest = max(self._data.token, handed_off, floor)
        self._data.token = FencingToken(max(highest + 1, int(self._now() * 1000)))
        record = candidate.with_token(self._data.token)
        self._data.lease = self._fading(record, candidate.ttl_ms)
        if self._data.epoch is None:
            self._epochs += 1
            self._data.epoch = f"epoch-{self._epochs}"
        self._data.claim = None
        if lease is not None:
            self._append("depose", router=record.router, incarnation=record.incarnation, token=lease.value.token)
        self._append("acquire", router=record.router, incarnation=record.incarnation, token=record.token)
        return Granted(record, fresh=True)

    def renew(self, record: LeaseRecord) -> RenewAnswer:
        """Answer RENEW."""
        lease = self._standing(self._data.lease)
        if lease is None or lease.value != record:
            return Lost(lease.value if lease else None)
        self._data.lease = self._fading(record, record.ttl_ms)
        return Renewed(self._claimed())

    def release(self, record: LeaseRecord, *, successor: RouterId | None) -> bool:
        """Answer RELEASE."""
        lease = self._standing(self._data.lease)
        if lease is None or lease.value != record:
            return False
        self._data.lease = self._data.claim = None
        self._data.release = Release(record.router, record.incarnation, record.token, successor)
        self._append(
            "release",
            router=record.router,
            incarnation=record.incarnation,
            token=record.token,
            successor=successor or "",
        )
        return True

    def claim(self, expected: LeaseRecord, claim: Claim) -> bool:
        """Answer CLAIM."""
        lease = self._standing(self._data.lease)
        if lease is None or lease.value != expected:
            return False
        standing = self._claimed()
        if standing is not None:
            return (standing.router, standing.incarnation) == (claim.router, claim.incarnation)
        self._data.claim = self._fading(claim, CLAIM_TTL_MS)
        self._append(
            "claim", router=claim.router, incarnation=claim.incarnation, token=claim.token, reason=claim.reason
        )
        return True

    def announce(self, member: Member) -> None:
        """Record `member` for a while."""
        self._data.members[member.router] = self._fading(member, MEMBER_TTL_MS)

    def members(self) -> Sequence[Member]:
        """Return the members that announced themselves lately, sorted by id."""
        self._data.members = {name: kept for name, kept in self._data.members.items() if self._standing(kept)}
        return [self._data.members[name].value for name in sorted(self._data.members)]

    def put_handoff(self, document: HandoffDocument) -> None:
        """Answer PUT_HANDOFF. Raises HandoffRefused."""
        token, version = document.order
        stored = self._data.handoff
        seen = max(self._data.token, stored.lease.token if stored is not None else NOBODY)
        lease = self._standing(self._data.lease)
        holder = lease.value.token if lease else NOBODY
        if token < seen:
            raise HandoffRefused(refusal("STALE_TOKEN", document.order, [seen]))
        if (lease and holder != token) or (not lease and token != seen):
            raise HandoffRefused(refusal("NOT_HOLDER", document.order, [holder, seen]))
        if stored == document:
            return
        if stored is not None and stored.lease.token == token and version <= stored.version:
            raise HandoffRefused(refusal("VERSION", document.order, [stored.version]))
        self._data.handoff = document
        self._append("handoff", token=token, version=version)

    def get_handoff(self) -> HandoffDocument | None:
        """Return a copy of the mirrored document, or None."""
        stored = self._data.handoff
        return decode_handoff(stored.encode()) if stored is not None else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time() + self.clock_offset_s

    def _fading(self, value: T, ttl_ms: int) -> _Fading[T]:
        return _Fading(value, self._now() + ttl_ms / 1000)

    def _standing(self, kept: _Fading[T] | None) -> _Fading[T] | None:
        return kept if kept is not None and self._now() < kept.until else None

    def _left_ms(self, kept: _Fading[T] | None) -> int:
        return max(0, round((kept.until - self._now()) * 1000)) if kept else 0

    def _claimed(self) -> Claim | None:
        claim = self._standing(self._data.claim)
        return claim.value if claim else None

    def _append(self, kind: str, **fields: Any) -> None:
        self._data.events.append({"type": kind, **fields})
        del self._data.events[:-EVENTS_MAX]
        self._ring()

    def _ring(self) -> None:
        self.written += 1
        self.bell.set()
        self.bell = asyncio.Event()


class MemoryLink:
    """One router's way to a `MemoryRedis`, with its faults.

    `unreachable`: commands hang for `op_timeout_s`, then raise, and never arrive. `latency_s` is the round trip; a link
    that is cut while an answer travels loses the answer, not the command.
    """

    def __init__(self, redis: MemoryRedis, *, op_timeout_s: float = 0.3, latency_s: float = 0.0) -> None:
        self.redis = redis
        self.op_timeout_s = op_timeout_s
        self.latency_s = latency_s
        self.unreachable = False
        self._replies_to_lose = 0

    def lose_reply_once(self) -> None:
        """Let the next command take place and its answer get lost."""
        self._replies_to_lose += 1

    async def run(self, what: str, command: Callable[[], T]) -> T:
        """Return the answer of `command`. Raises StoreUnavailable when it, or its answer, did not get through."""
        await asyncio.sleep(self.latency_s / 2)
        if self.unreachable:
            await self._give_up(what)
        answer = command()
        await asyncio.sleep(self.latency_s / 2)
        if self.unreachable:
            await self._give_up(what)
        if self._replies_to_lose:
            self._replies_to_lose -= 1
            await self._give_up(what)
        return answer

    async def _give_up(self, what: str) -> None:
        await asyncio.sleep(self.op_timeout_s)
        raise StoreUnavailable(f"{what}: Redis in memory gave no answer within {self.op_timeout_s:g} s")


class MemoryLeaseStore:
    """The LeaseStore of `narwhal.ports` over a `MemoryLink`; each method is as in `RedisLeaseStore`."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self._redis = link.redis
        self._seen = 0

    async def observe(self) -> LeaseObservation:
        """Return one consistent look."""
        return await self._link.run("OBSERVE", self._redis.observe)

    async def acquire(
        self,
        candidate: LeaseRecord,
        *,
        floor: FencingToken,
        epoch: str | None,
        after: FencingToken | None = None,
        deposing: LeaseRecord | None = None,
    ) -> AcquireAnswer:
        """Take the lease if nobody holds it, the data set is `epoch` and its highest token `after`."""
        return await self._link.run(
            "ACQUIRE",
            lambda: self._redis.acquire(candidate, floor=floor, epoch=epoch, after=after, deposing=deposing),
        )

    async def renew(self, record: LeaseRecord) -> RenewAnswer:
        """Extend exactly this term."""
        return await self._link.run("RENEW", lambda: self._redis.renew(record))

    async def release(self, record: LeaseRecord, *, successor: RouterId | None) -> bool:
        """Give exactly this term up."""
        return await self._link.run("RELEASE", lambda: self._redis.release(record, successor=successor))

    async def claim(self, expected: LeaseRecord, claim: Claim) -> bool:
        """Ask the holder of exactly `expected` to give way."""
        return await self._link.run("CLAIM", lambda: self._redis.claim(expected, claim))

    async def announce(self, member: Member) -> None:
        """Record this router among the members."""
        await self._link.run("ANNOUNCE", lambda: self._redis.announce(member))

    async def members(self) -> Sequence[Member]:
        """Return the members, sorted by id."""
        return await self._link.run("MEMBERS", self._redis.members)

    async def wait_for_event(self, *, timeout_s: float) -> None:
        """Return when an event was written since the last call, or after `timeout_s`; never raises."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._link.unreachable or self._seen == self._redis.written:
                    await self._redis.bell.wait()
        except TimeoutError:
            return
        self._seen = self._redis.written


class MemoryHandoffStore:
    """The HandoffStore of `narwhal.ports` over a `MemoryLink`."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link

    async def put(self, document: HandoffDocument) -> None:
        """Replace the stored document. Raises HandoffRefused, StoreUnavailable."""
        await self._link.run("PUT_HANDOFF", lambda: self._link.redis.put_handoff(document))

    async def get(self) -> HandoffDocument | None:
        """Return the stored document or None. Raises StoreUnavailable."""
        return await self._link.run("GET_HANDOFF", self._link.redis.get_handoff)
