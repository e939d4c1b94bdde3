"""A router keeps itself on the list of members, whatever Redis does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from structlog.testing import capture_logs

from narwhal.core.vocabulary import RouterId
from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.ha.announcer import ANNOUNCE_EVERY_S, LOOK_EVERY_S, announce_forever
from narwhal.ports import LeaseStore, Member
from narwhal.testing.memory_store import MemoryLeaseStore, MemoryLink, MemoryRedis
from tests.virtual import virtual

MEMBER = Member(
    router=RouterId("router-b"),
    incarnation="b-1",
    url="http://b",
    admin_url="http://b:1",
    role="standby",
    engine_set="sha256:0",
    handoff=None,
    eligible=True,
    reason="",
    version="test",
)


@dataclass
class Router:
    """Who announces itself; its description may change."""

    member: Member = MEMBER
    redis: MemoryRedis = field(default_factory=MemoryRedis)

    def __post_init__(self) -> None:
        self.link = MemoryLink(self.redis)
        self.store = MemoryLeaseStore(self.link)

    @asynccontextmanager
    async def announcing(self, store: LeaseStore | None = None) -> AsyncIterator[None]:
        task = asyncio.create_task(announce_forever(store or self.store, lambda: self.member))
        await asyncio.sleep(0.001)
        yield
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def known(self) -> list[Member]:
        return list(self.redis.members())


@virtual
async def test_a_router_stays_on_the_list_while_it_lives_and_leaves_it_after() -> None:
    router = Router()
    async with router.announcing():
        for _ in range(60):
            assert router.known() == [MEMBER]
            await asyncio.sleep(1)
    await asyncio.sleep(10)
    assert router.known() == []


@pytest.mark.parametrize("change", [{"role": "active"}, {"eligible": False, "reason": "engines differ"}], ids=str)
@virtual
async def test_a_change_of_role_or_eligibility_is_announced_at_once(change: dict[str, object]) -> None:
    router = Router()
    async with router.announcing():
        await asyncio.sleep(0.1)
        router.member = replace(MEMBER, **change)  # type: ignore[arg-type]
        await asyncio.sleep(LOOK_EVERY_S)
        assert router.known() == [router.member]


@virtual
async def test_progress_alone_waits_for_the_next_turn() -> None:
    router = Router()
    async with router.announcing():
        router.member = replace(MEMBER, reason="another")
        await asyncio.sleep(ANNOUNCE_EVERY_S / 2)
        assert router.known() == [MEMBER]
        await asyncio.sleep(ANNOUNCE_EVERY_S / 2)
        assert router.known() == [router.member]


@virtual
async def test_an_outage_is_logged_once_and_survived() -> None:
    router = Router()
    with capture_logs() as logs:
        async with router.announcing():
            router.link.unreachable = True
            await asyncio.sleep(60)
            assert router.known() == []
            router.link.unreachable = False
            await asyncio.sleep(ANNOUNCE_EVERY_S + 1)
            assert router.known() == [MEMBER]
    assert [line["event"] for line in logs] == ["announcement_failed"]


class Refusing(MemoryLeaseStore):
    """A Redis whose password is wrong."""

    async def announce(self, member: Member) -> None:
        raise StoreMisused("NOPERM this user has no permission to run 'set'")


@virtual
async def test_a_refusal_is_no_reason_to_end() -> None:
    router = Router()
    with capture_logs() as logs:
        async with router.announcing(Refusing(router.link)):
            await asyncio.sleep(60)
    assert len(logs) == 1
    assert "NOPERM" in logs[0]["error"]


class Asking(MemoryLeaseStore):
    """Counts what it is asked."""

    asked = 0

    async def announce(self, member: Member) -> None:
        self.asked += 1
        raise StoreUnavailable("no answer")


@virtual
async def test_a_router_that_does_not_change_asks_redis_every_two_seconds_and_no_more() -> None:
    router = Router()
    store = Asking(router.link)
    async with router.announcing(store):
        await asyncio.sleep(100 * ANNOUNCE_EVERY_S)
    assert 99 <= store.asked <= 101
