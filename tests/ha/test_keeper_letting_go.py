"""Nothing of an ended term is left in the store, and an idle holder asks little."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from narwhal.core.lease import Lost
from tests.ha.holding import Holder
from tests.ha.parts import NONE, B, make_candidate, now
from tests.virtual import virtual


@virtual
async def test_letting_go_frees_the_lease_at_once() -> None:
    a = Holder()
    record = await a.acquire()
    a.keeper.fence("test", planned=True)
    await a.keeper.let_go(successor=B)
    seen = a.shared.redis.observe()
    assert seen.record is None
    assert seen.release is not None
    assert (seen.release.token, seen.release.successor) == (record.token, B)


@virtual
async def test_a_lease_is_never_let_go_before_the_fence() -> None:
    a = Holder()
    record = await a.acquire()
    with pytest.raises(AssertionError, match="fence before"):
        await a.keeper.let_go()
    assert a.shared.redis.observe().record == record


@virtual
async def test_a_release_without_an_answer_is_logged_and_may_be_repeated() -> None:
    a = Holder()
    await a.acquire()
    a.keeper.fence("test", planned=True)
    a.link.unreachable = True
    with capture_logs() as logs:
        await a.keeper.let_go()
    assert logs[-1]["event"] == "lease_release_failed"
    a.link.unreachable = False
    await a.keeper.let_go()
    assert a.shared.redis.observe().record is None


@virtual
async def test_letting_go_of_nothing_asks_nobody() -> None:
    a = Holder()
    a.link.unreachable = True
    await a.keeper.let_go()
    assert now() == 0


@virtual
async def test_a_lease_that_another_holds_is_not_released() -> None:
    a = Holder()
    await a.acquire()
    async with a.holding() as holding:
        a.shared.redis.drop_lease()
        theirs = await a.shared.grant(make_candidate(B))
        await holding
    await a.keeper.let_go()
    assert a.shared.redis.observe().record == theirs


@pytest.mark.parametrize("cut_at_s", [0.0, 0.04, 0.06, 0.099])
@virtual
async def test_a_question_that_was_cut_short_leaves_no_lease_behind(cut_at_s: float) -> None:
    """Cancelled before or after Redis granted it: in both cases nobody waits for a lease that nobody uses."""
    a = Holder(latency_s=0.1)
    asking = asyncio.create_task(a.acquire())
    await asyncio.sleep(cut_at_s)
    asking.cancel()
    await asyncio.wait({asking})
    granted = a.shared.redis.observe().record is not None
    assert granted == (cut_at_s > 0.05)
    await a.keeper.let_go()
    assert a.shared.redis.observe().record is None


@virtual
async def test_after_a_cut_question_the_lease_of_another_is_left_alone() -> None:
    a = Holder(latency_s=0.1)
    theirs = await a.shared.grant(make_candidate(B))
    asking = asyncio.create_task(a.keeper.acquire(a.candidate, floor=NONE, epoch=None))
    await asyncio.sleep(0.06)
    asking.cancel()
    await asyncio.wait({asking})
    await a.keeper.let_go()
    assert a.shared.redis.observe().record == theirs


@virtual
async def test_an_idle_holder_asks_redis_two_and_a_half_times_a_second() -> None:
    a = Holder()
    await a.acquire()
    async with a.holding():
        await asyncio.sleep(100)
    assert len(a.store.renewals) <= 250
    assert all(isinstance(began, float) for began, _ in a.store.renewals)


@virtual
async def test_a_renewal_says_lost_only_when_the_store_says_so() -> None:
    a = Holder()
    record = await a.acquire()
    a.shared.redis.drop_lease()
    assert await a.store.renew(record) == Lost(None)
