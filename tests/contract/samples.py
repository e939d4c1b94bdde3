"""The values that store tests write."""

from __future__ import annotations

from narwhal.core.handoff import EnginePart, HandoffDocument, LeasePart
from narwhal.core.lease import Granted, LeaseRecord, ProcessIdentity
from narwhal.core.vocabulary import EngineId, FencingToken, Role, RouterId
from narwhal.ports import LeaseStore, Member

NONE = FencingToken(0)


def candidate(router: str = "router-a", *, incarnation: str = "first", ttl_ms: int = 30_000) -> LeaseRecord:
    """A router's template; the default TTL outlives any test."""
    return LeaseRecord(
        router=RouterId(router),
        incarnation=incarnation,
        token=NONE,
        ttl_ms=ttl_ms,
        url=f"http://{router}:8000",
        admin_url=f"http://{router}:8100",
        engine_set="sha256:0123456789abcdef",
        schema=1,
        version="0.1.0",
        process=ProcessIdentity(host=router, boot_id="boot", pid_namespace="pid:[1]", pid=4242, start_ticks=1234567),
    )


async def granted(store: LeaseStore, record: LeaseRecord, *, floor: int = 0) -> LeaseRecord:
    """Acquire and return the record, or fail."""
    answer = await store.acquire(record, floor=FencingToken(floor), epoch=None)
    assert isinstance(answer, Granted), answer
    return answer.record


def handoff(token: int, version: int, *, mark: int = 0) -> HandoffDocument:
    """A document; `mark` tells apart two of the same order."""
    return HandoffDocument(
        cluster="test",
        version=version,
        lease=LeasePart(router=RouterId("router-a"), incarnation="first", token=FencingToken(token)),
        engines=(EnginePart(id=EngineId("p1"), url="http://p1:8000", role=Role.PREFILL),),
        counters={"mark": mark},
    )


def member(router: str, *, reason: str = "", handoff_order: tuple[FencingToken, int] | None = None) -> Member:
    """An announcement."""
    return Member(
        router=RouterId(router),
        incarnation="first",
        url=f"http://{router}:8000",
        admin_url=f"http://{router}:8100",
        role="standby",
        engine_set="sha256:0123456789abcdef",
        handoff=handoff_order,
        eligible=not reason,
        reason=reason,
        version="0.1.0",
    )
