"""The lease and the mirrored handoff in Redis. Every decision is one Lua script, so that no two routers interleave.

What `redis-cli` shows is plain: `get narwhal:{default}:lease`, `hgetall narwhal:{default}:handoff`,
`xrevrange narwhal:{default}:events + - count 10`.
Source: source, "Warm standby and lease ownership"; ha.md, 2.1 to 2.4; decisions 25 and 36.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Final

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
from narwhal.errors import HandoffRefused, HandoffRejected, StoreMisused
from narwhal.ports import Member
from narwhal.store import scripts
from narwhal.store.codec import encode
from narwhal.store.connection import RedisLink, Reply
from narwhal.store.keys import CLAIM_TTL_MS, EVENTS_MAX, MEMBER_TTL_MS, Keys
from narwhal.store.refusals import refusal
from narwhal.store.replies import items, lease_record, number, text, value
from narwhal.store.tail import EventTail

BEFORE_NUMBER: Final = '"token":'


class RedisLeaseStore:
    """The LeaseStore of `narwhal.ports` over three links, so that no purpose waits behind another."""

    def __init__(self, lease: RedisLink, control: RedisLink, tail: RedisLink, keys: Keys) -> None:
        self._lease = lease
        self._control = control
        self._keys = keys
        self._tail = EventTail(tail, keys.events)

    async def observe(self) -> LeaseObservation:
        """Return one consistent look at lease, token, epoch, claim, last release and handoff version."""
        k = self._keys
        reply = await self._lease.call(scripts.OBSERVE, keys=(k.lease, k.token, k.epoch, k.claim, k.release, k.handoff))
        lease, pttl, token, epoch, claim, release, handoff_token, handoff_version = items(reply, count=8)
        record = lease_record(lease, key=k.lease)
        return LeaseObservation(
            record=record,
            pttl_ms=_life_ms(record, number(pttl)),
            token=FencingToken(number(token)),
            epoch=None if epoch is None else text(epoch),
            claim=value(Claim, claim, key=k.claim),
            release=value(Release, release, key=k.release),
            handoff=(
                None if handoff_version is None else (FencingToken(number(handoff_token)), number(handoff_version))
            ),
        )

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

        `epoch` and `after` are the data set and its highest token as observed; others in the store answer DataLost, and
        None expects nothing. A lease that is exactly `deposing`, a term known to be over, counts as free.
        Idempotent for one incarnation: a second call extends the lease and returns the same token.
        """
        k = self._keys
        head, tail = around_token(candidate)
        reply = await self._lease.call(
            scripts.ACQUIRE,
            keys=(k.lease, k.token, k.epoch, k.claim, k.handoff, k.events),
            args=(
                *(candidate.router, candidate.incarnation, head, tail, candidate.ttl_ms),
                *(floor, epoch or "", "" if after is None else after, secrets.token_hex(8), EVENTS_MAX),
                "" if deposing is None else deposing.encode(),
            ),
        )
        match [text(item) if isinstance(item, bytes) else item for item in items(reply)]:
            case ["granted" | "mine" as verdict, str(stored)]:
                return Granted(self._own(stored), fresh=verdict == "granted")
            case ["occupied", str(stored), int(pttl)]:
                record = lease_record(stored.encode(), key=k.lease)
                assert record is not None, "an occupied lease has a holder"
                return Occupied(record, _life_ms(record, pttl))
            case ["data_lost"]:
                return DataLost()
            case ["exhausted", str(highest)]:
                raise StoreMisused(
                    f"ACQUIRE: fencing token {highest} leaves no room for a higher one; {k.token}, the handoff or the"
                    " local record was set by hand. Correct it, with every router of the cluster stopped"
                )
            case other:
                raise StoreMisused(f"ACQUIRE: Redis at {self._lease.address} answered {other!r}; is it Redis at all?")

    async def renew(self, record: LeaseRecord) -> RenewAnswer:
        """Extend the lease by its TTL if it is still exactly `record`; never create it."""
        k = self._keys
        reply = await self._lease.call(scripts.RENEW, keys=(k.lease, k.claim), args=(record.encode(), record.ttl_ms))
        verdict, detail = items(reply, count=2)
        if text(verdict) == "renewed":
            return Renewed(value(Claim, detail, key=k.claim))
        return Lost(lease_record(detail, key=k.lease))

    async def release(self, record: LeaseRecord, *, successor: RouterId | None) -> bool:
        """Give the lease up and say so in the event stream. False when it was not ours any more."""
        k = self._keys
        farewell = Release(record.router, record.incarnation, record.token, successor)
        reply = await self._lease.call(
            scripts.RELEASE,
            keys=(k.lease, k.claim, k.release, k.events),
            args=(
                *(record.encode(), encode(farewell), record.router, record.incarnation, record.token),
                *(successor or "", EVENTS_MAX),
            ),
        )
        return reply == 1

    async def claim(self, expected: LeaseRecord, claim: Claim) -> bool:
        """Ask the holder of exactly `expected` to give way.

        False when it no longer holds, or when another router's claim stands. A claim lives for 5 s.
        """
        k = self._keys
        reply = await self._lease.call(
            scripts.CLAIM,
            keys=(k.lease, k.claim, k.events),
            args=(
                *(expected.encode(), encode(claim), CLAIM_TTL_MS),
                *(claim.router, claim.incarnation, claim.token, claim.reason, EVENTS_MAX),
            ),
        )
        return reply == 1

    async def announce(self, member: Member) -> None:
        """Record this router among the members for a while (10 s)."""
        k = self._keys
        await self._control.call(
            scripts.ANNOUNCE,
            keys=(k.member(member.router), k.members),
            args=(encode(member), MEMBER_TTL_MS, member.router),
        )

    async def members(self) -> Sequence[Member]:
        """Return the routers that announced themselves lately, sorted by id."""
        k = self._keys
        index = items(await self._control.run("ZRANGE", k.members, 0, -1, what="MEMBERS"))
        keys = [k.member(text(router)) for router in index]
        if not keys:
            return ()
        replies = items(await self._control.run("MGET", *keys, what="MEMBERS"))
        found = (value(Member, reply, key=key) for key, reply in zip(keys, replies, strict=True))
        return sorted((member for member in found if member is not None), key=lambda member: member.router)

    async def wait_for_event(self, *, timeout_s: float) -> None:
        """Return when something was written to the event stream since the last call, or after `timeout_s`.

        Never raises for what Redis does: a wait without Redis ends after `timeout_s`, and `observe` says why.
        """
        await self._tail.wait(timeout_s)

    def _own(self, stored: str) -> LeaseRecord:
        """Return the granted record, and make sure that we would write the very bytes that Redis now compares."""
        record = lease_record(stored.encode(), key=self._keys.lease)
        if record is None or record.encode() != stored:
            raise StoreMisused(f"{self._keys.lease}: holds our term in other bytes than ours: {stored}; it was edited")
        return record


class RedisHandoffStore:
    """The HandoffStore of `narwhal.ports`: the mirror of the handoff in a Redis hash."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def put(self, document: HandoffDocument) -> None:
        """Replace the stored document; writing the same document again is no error.

        Raises HandoffRefused when a newer token or version is recorded or another router holds the lease,
        StoreUnavailable when nothing is known.
        """
        k = self._keys
        doc = document.encode()
        token, version = document.order
        reply = await self._link.call(
            scripts.PUT_HANDOFF,
            keys=(k.handoff, k.lease, k.token, k.events),
            args=(
                *(token, version, f"{document.schema_id}/{document.schema_version}", document.engine_set),
                *(_digest(doc), doc, EVENTS_MAX),
            ),
        )
        match items(reply):
            case [bytes(b"stored" | b"same")]:
                return
            case [bytes(verdict), *numbers]:
                raise HandoffRefused(refusal(verdict.decode(), document.order, [number(item) for item in numbers]))
            case other:
                raise StoreMisused(f"PUT_HANDOFF: Redis at {self._link.address} answered {other!r}; is it Redis?")

    async def get(self) -> HandoffDocument | None:
        """Return the stored document or None. Raises HandoffRejected (unreadable) or StoreUnavailable."""
        reply = await self._link.run("HMGET", self._keys.handoff, "doc", "sha", what="GET_HANDOFF")
        doc, sha = items(reply, count=2)
        if doc is None:
            return None
        if _digest(text(doc)) != _optional(sha):
            raise HandoffRejected([f"{self._keys.handoff}: field sha does not fit field doc; one was edited by hand"])
        return decode_handoff(text(doc))


def around_token(candidate: LeaseRecord) -> tuple[str, str]:
    """Return what stands before and after the token in the canonical record, for the script that mints it.

    Inside JSON strings every quote is escaped, so the field's name can stand there only once; this is checked.
    """
    head, field, tail = candidate.with_token(FencingToken(0)).encode().partition(BEFORE_NUMBER + "0")
    probe = FencingToken(2**53 - 1)
    assert field, "a lease record has a token"
    assert f"{head}{BEFORE_NUMBER}{probe}{tail}" == candidate.with_token(probe).encode(), (
        "the token stands in one place"
    )
    return head + BEFORE_NUMBER, tail


def _life_ms(record: LeaseRecord | None, pttl_ms: int) -> int:
    """Return the remaining life; a lease that somebody made permanent counts as freshly renewed."""
    if record is not None and pttl_ms == -1:
        return record.ttl_ms
    return max(pttl_ms, 0)


def _digest(doc: str) -> str:
    return "sha256:" + hashlib.sha256(doc.encode()).hexdigest()


def _optional(reply: Reply) -> str | None:
    return None if reply is None else text(reply)
