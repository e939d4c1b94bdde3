"""A router's hand on a lease in memory, for tests of the keeper."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from narwhal.core.lease import Claim, Granted, LeaseRecord, RenewAnswer
from narwhal.core.vocabulary import FencingToken, Stage
from narwhal.ha.keeper import LeaseKeeper, TermEnded
from narwhal.testing.memory_store import MemoryLeaseStore, MemoryLink
from tests.ha.parts import NONE, A, B, Shared, make_candidate, now, plane_of

VALID_S = 2.0 * (1 - 0.005) - 0.2
CLOCK_AHEAD_S = 1000.0


def clock() -> float:
    """A lease clock that is not the loop's."""
    return now() + CLOCK_AHEAD_S


class WatchedStore(MemoryLeaseStore):
    """Notes when it is asked to renew and what it answered, and may be made to fail at once."""

    def __init__(self, link: MemoryLink) -> None:
        super().__init__(link)
        self.link = link
        self.renewals: list[tuple[float, float]] = []
        self.trouble: Exception | None = None

    async def renew(self, record: LeaseRecord) -> RenewAnswer:
        began = now()
        try:
            if self.trouble is not None:
                raise self.trouble
            return await super().renew(record)
        finally:
            self.renewals.append((began, now()))


class Holder:
    """Router A and its hand on the lease."""

    def __init__(self, *, latency_s: float = 0.002) -> None:
        self.shared = Shared(latency_s=latency_s)
        self.plane = plane_of(A)
        self.store = WatchedStore(self.shared.link())
        self.keeper = LeaseKeeper(self.plane, self.store, ha=self.plane.config.ha, clock=clock)
        self.candidate = make_candidate(A)

    @property
    def link(self) -> MemoryLink:
        return self.store.link

    async def acquire(self) -> LeaseRecord:
        answer = await self.keeper.acquire(self.candidate, floor=NONE, epoch=None)
        assert isinstance(answer, Granted)
        return answer.record

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[asyncio.Task[TermEnded]]:
        task = asyncio.create_task(self.keeper.hold())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})

    def degrade(self) -> None:
        for _ in range(3):
            self.plane.monitoring.finish_pass({Stage.HEALTH: "OSError"})

    def claim(self, record: LeaseRecord, *, token: int | None = None) -> Claim:
        claim = Claim(B, "router-b-1", FencingToken(record.token if token is None else token), "3 bad signs in a row")
        assert self.shared.redis.claim(record, claim)
        return claim
