"""The lease is renewed until it may be lost, and then nothing of the term is left: neither here nor in the store."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from narwhal.core.lease import DataLost, Occupied
from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.ha.keeper import PAUSE_S_MIN, TermEnded
from tests.ha.holding import CLOCK_AHEAD_S, VALID_S, Holder, clock
from tests.ha.parts import NONE, B, make_candidate, now
from tests.virtual import virtual


@virtual
async def test_a_grant_begins_a_term_whose_deadline_counts_from_before_the_question() -> None:
    a = Holder(latency_s=0.2)
    asked_at = clock()
    record = await a.acquire()
    assert a.keeper.held
    assert a.plane.tenure.record == record
    assert a.plane.tenure.valid_until == pytest.approx(asked_at + VALID_S)
    assert a.keeper.remaining_s == pytest.approx(VALID_S - 0.2)


@virtual
async def test_a_lease_that_another_holds_begins_nothing() -> None:
    a = Holder()
    theirs = await a.shared.grant(make_candidate(B))
    answer = await a.keeper.acquire(a.candidate, floor=NONE, epoch=None)
    assert isinstance(answer, Occupied)
    assert answer.record == theirs
    assert not a.keeper.held


@virtual
async def test_a_grant_by_another_data_set_begins_nothing() -> None:
    a = Holder()
    assert isinstance(await a.keeper.acquire(a.candidate, floor=NONE, epoch="another"), DataLost)
    assert not a.keeper.held


@virtual
async def test_no_answer_to_the_question_begins_nothing() -> None:
    a = Holder()
    a.link.lose_reply_once()
    with pytest.raises(StoreUnavailable):
        await a.acquire()
    assert not a.keeper.held


@virtual
async def test_a_grant_whose_answer_was_lost_begins_when_it_is_asked_for_again() -> None:
    a = Holder()
    a.link.lose_reply_once()
    with pytest.raises(StoreUnavailable):
        await a.acquire()
    granted = a.shared.redis.observe().record
    asked_at = clock()
    assert await a.acquire() == granted
    assert a.plane.tenure.valid_until == pytest.approx(asked_at + VALID_S)


@virtual
async def test_a_term_that_is_over_does_not_begin_again_although_it_stands_in_the_store() -> None:
    a = Holder()
    record = await a.acquire()
    a.keeper.fence("test")
    answer = await a.keeper.acquire(a.candidate, floor=NONE, epoch=None)
    assert isinstance(answer, Occupied)
    assert answer.record == record
    assert not a.keeper.held


@virtual
async def test_a_held_lease_is_renewed_at_its_rate() -> None:
    a = Holder()
    await a.acquire()
    async with a.holding() as holding:
        for _ in range(600):
            await asyncio.sleep(0.1)
            assert a.keeper.held
        assert not holding.done()
    gaps = {round(b[0] - a[0], 2) for a, b in zip(a.store.renewals, a.store.renewals[1:], strict=False)}
    assert gaps == {0.4}


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
@virtual
async def test_lost_answers_do_not_end_a_term_that_the_next_one_saves(lost: int) -> None:
    a = Holder()
    await a.acquire()
    async with a.holding() as holding:
        for _ in range(lost):
            a.link.lose_reply_once()
        for _ in range(40):
            await asyncio.sleep(0.1)
            assert a.keeper.held
        assert not holding.done()


@pytest.mark.parametrize(
    "trouble", [StoreUnavailable("refused"), StoreMisused("WRONGPASS")], ids=["no-answer", "wrong-password"]
)
@virtual
async def test_trouble_with_the_store_ends_the_term_at_its_deadline_and_not_before(trouble: Exception) -> None:
    a = Holder()
    await a.acquire()
    deadline = a.plane.tenure.valid_until
    a.store.trouble = trouble
    async with a.holding() as holding:
        await asyncio.sleep(deadline - clock() - 0.001)
        assert not holding.done()
        assert await holding == TermEnded()
        assert clock() == pytest.approx(deadline, abs=0.001)
    assert a.plane.tenure.fenced_reason == "the local lease deadline has passed"


@virtual
async def test_a_silent_store_ends_the_term_at_its_deadline_and_not_one_answer_later() -> None:
    a = Holder()
    await a.acquire()
    deadline = a.plane.tenure.valid_until
    a.link.unreachable = True
    a.link.op_timeout_s = 60
    async with a.holding() as holding:
        assert await holding == TermEnded()
        assert clock() == pytest.approx(deadline, abs=0.001)


@virtual
async def test_after_a_failure_the_next_try_comes_in_half_of_what_is_left_and_tries_are_few() -> None:
    """Source: dynamo#4363; a keeper that counts from its last answer skips past the expiry."""
    a = Holder()
    await a.acquire()
    deadline_at = a.plane.tenure.valid_until - CLOCK_AHEAD_S
    a.store.trouble = StoreUnavailable("refused")
    async with a.holding() as holding:
        await holding
    assert a.store.renewals[0][0] == pytest.approx(0.4, abs=0.01)
    for (_, ended), (began, _) in zip(a.store.renewals, a.store.renewals[1:], strict=False):
        assert began - ended <= max(min(0.3, (deadline_at - ended) / 2), PAUSE_S_MIN) + 1e-9
    assert 8 < len(a.store.renewals) < 20


@virtual
async def test_an_answer_after_the_deadline_revives_nothing() -> None:
    a = Holder()
    await a.acquire()
    deadline = a.plane.tenure.valid_until
    await asyncio.sleep(deadline - clock() - 0.1)
    a.link.latency_s = 0.2
    async with a.holding() as holding:
        assert await holding == TermEnded()
        await asyncio.sleep(1)
        assert not a.keeper.held
    assert clock() < deadline + 1.01


@virtual
async def test_a_router_that_was_stopped_past_its_deadline_does_not_renew() -> None:
    a = Holder()
    await a.acquire()
    await asyncio.sleep(3)
    async with a.holding() as holding:
        assert await holding == TermEnded()
    assert a.store.renewals == []


@virtual
async def test_a_lease_that_another_took_ends_the_term_at_once() -> None:
    a = Holder()
    record = await a.acquire()
    async with a.holding() as holding:
        a.shared.redis.release(record, successor=None)
        await a.shared.grant(make_candidate(B))
        assert await holding == TermEnded()
    assert not a.keeper.held
    assert a.plane.tenure.fenced_reason == "the lease is not ours any more; router-b holds it"


@virtual
async def test_a_term_stays_over_when_its_lease_comes_back() -> None:
    """Source: kubernetes#44887: the lease was overwritten for one renewal and then restored to the byte."""
    a = Holder()
    record = await a.acquire()
    kept = a.shared.redis._data.lease
    async with a.holding() as holding:
        a.shared.redis.drop_lease()
        await a.shared.grant(make_candidate(B))
        await holding
        a.shared.redis._data.lease = kept
        assert a.shared.redis.observe().record == record
        await asyncio.sleep(1)
    assert not a.keeper.held


@virtual
async def test_a_lease_that_vanished_may_be_retaken_until_the_deadline_of_the_term() -> None:
    a = Holder()
    await a.acquire()
    async with a.holding() as holding:
        await asyncio.sleep(1)
        deadline = a.plane.tenure.valid_until
        a.shared.redis.drop_lease()
        assert await holding == TermEnded(retake_before=deadline)
    assert not a.keeper.held
    assert a.keeper.before(deadline)
    assert a.shared.redis.observe().record is None, "a renewal never creates the lease"


@virtual
async def test_a_fit_holder_refuses_a_claim_says_so_once_and_goes_on() -> None:
    a = Holder()
    record = await a.acquire()
    with capture_logs() as logs:
        async with a.holding() as holding:
            a.claim(record)
            await asyncio.sleep(3)
            assert not holding.done()
            assert a.keeper.held
    refusals = [line for line in logs if line["event"] == "claim_refused"]
    assert [line["reason"] for line in refusals] == ["this router is fit"]


@virtual
async def test_an_unfit_holder_honours_a_claim_and_still_holds_for_its_last_handoff() -> None:
    a = Holder()
    record = await a.acquire()
    a.degrade()
    async with a.holding() as holding:
        claim = a.claim(record)
        assert await holding == TermEnded(claim=claim)
    assert a.keeper.held


@virtual
async def test_a_holder_that_becomes_unfit_while_a_claim_stands_honours_it() -> None:
    a = Holder()
    record = await a.acquire()
    async with a.holding() as holding:
        claim = a.claim(record)
        await asyncio.sleep(1)
        a.degrade()
        assert await holding == TermEnded(claim=claim)


@virtual
async def test_a_claim_against_an_earlier_term_is_refused_even_by_an_unfit_holder() -> None:
    a = Holder()
    record = await a.acquire()
    a.degrade()
    async with a.holding() as holding:
        a.claim(record, token=record.token - 1)
        await asyncio.sleep(2)
        assert not holding.done()


@virtual
async def test_holding_without_a_term_ends_at_once() -> None:
    a = Holder()
    assert await a.keeper.hold() == TermEnded()
    assert now() == 0


@virtual
async def test_a_term_that_is_fenced_by_others_is_not_renewed_again() -> None:
    a = Holder()
    await a.acquire()
    async with a.holding() as holding:
        await asyncio.sleep(1)
        asked = len(a.store.renewals)
        a.keeper.fence("stopping", planned=True)
        assert await holding == TermEnded()
    assert len(a.store.renewals) == asked
    assert a.plane.tenure.fenced_reason == "stopping"


@virtual
async def test_the_first_reason_for_a_fence_stays() -> None:
    a = Holder()
    await a.acquire()
    with capture_logs() as logs:
        a.keeper.fence("first")
        a.keeper.fence("second")
    assert a.plane.tenure.fenced_reason == "first"
    assert len(logs) == 1
