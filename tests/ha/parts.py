"""The parts of a router's HA side, over memory and in virtual time, for unit tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from narwhal.core.control_plane import ControlPlane
from narwhal.core.handoff import HandoffDocument, LeasePart
from narwhal.core.lease import Granted, LeaseRecord, ProcessIdentity
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.testing.memory_file import MemoryDisk, MemoryFile
from narwhal.testing.memory_store import MemoryHandoffStore, MemoryLeaseStore, MemoryLink, MemoryRedis
from tests.core.fleets import make_plane

Order = tuple[FencingToken, int]

A, B, C = RouterId("router-a"), RouterId("router-b"), RouterId("router-c")
NONE = FencingToken(0)


def now() -> float:
    """The loop's time."""
    return asyncio.get_running_loop().time()


def make_candidate(router: RouterId = A, *, incarnation: str = "1", ttl_s: float = 2.0) -> LeaseRecord:
    """A router's template of a lease."""
    return LeaseRecord(
        router=router,
        incarnation=f"{router}-{incarnation}",
        token=NONE,
        ttl_ms=round(ttl_s * 1000),
        url=f"http://{router}:8000",
        admin_url=f"http://{router}:8100",
        engine_set="sha256:0",
        schema=1,
        version="test",
        process=ProcessIdentity(host="h", boot_id="b", pid_namespace="n", pid=1, start_ticks=1),
    )


def plane_of(router: RouterId = A, **sections: dict[str, Any]) -> ControlPlane:
    """The control plane of `router`, over p1 p2 d1 d2."""
    section = {"id": router, **sections.pop("router", {})}
    return make_plane(prefill=2, decode=2, router=section, **sections)


class Shared:
    """One Redis, and the way of each router to it."""

    def __init__(self, *, latency_s: float = 0.002) -> None:
        self.redis = MemoryRedis()
        self.latency_s = latency_s

    def link(self) -> MemoryLink:
        """Another router's way in."""
        return MemoryLink(self.redis, latency_s=self.latency_s)

    async def grant(self, candidate: LeaseRecord) -> LeaseRecord:
        """Let `candidate` hold the lease."""
        answer = await MemoryLeaseStore(self.link()).acquire(candidate, floor=NONE, epoch=None)
        assert isinstance(answer, Granted), answer
        return answer.record

    def mirror(self, link: MemoryLink | None = None) -> MemoryHandoffStore:
        """The mirrored handoff."""
        return MemoryHandoffStore(link or self.link())


class Host:
    """A host with its disk."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.file = MemoryFile(self.disk)


def document_of(plane: ControlPlane, record: LeaseRecord, *, version: int = 1) -> HandoffDocument:
    """What `plane` writes under `record`."""
    lease = LeasePart(router=record.router, incarnation=record.incarnation, token=record.token)
    return plane.capture(lease, version=version, now=now(), wall=0.0)


def with_order(document: HandoffDocument, token: int, version: int) -> HandoffDocument:
    """The same document under another order."""
    lease = document.lease.model_copy(update={"token": FencingToken(token)})
    return document.model_copy(update={"lease": lease, "version": version})


def renamed(document: HandoffDocument, engine: str, new_name: str) -> HandoffDocument:
    """The same document with another engine set."""
    engines = tuple(
        part.model_copy(update={"id": new_name}) if part.id == engine else part for part in document.engines
    )
    return document.model_copy(update={"engines": engines})


def under(record: LeaseRecord, token: int) -> LeaseRecord:
    """The same router's term under `token`."""
    return replace(record, token=FencingToken(token))


async def until(condition: Callable[[], object], *, within_s: float = 60.0) -> float:
    """Wait for `condition`, looking every virtual millisecond; return how long it took."""
    began = now()
    while not condition():
        assert now() - began < within_s, "waited in vain"
        await asyncio.sleep(0.001)
    return now() - began
