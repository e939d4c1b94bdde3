"""What every LeaseStore promises. Times are compared only as tightly as the protocol promises them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from narwhal.core.lease import Claim, DataLost, Granted, LeaseRecord, Lost, Occupied, Release, Renewed
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.ports import LeaseStore
from tests.contract.samples import NONE, candidate, granted, handoff, member
from tests.contract.worlds import World

B = RouterId("router-b")


async def until(condition: Callable[[], Awaitable[bool]], *, deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_an_empty_store_shows_nothing(lease: LeaseStore) -> None:
    seen = await lease.observe()
    assert (seen.record, seen.pttl_ms, seen.token, seen.epoch) == (None, 0, 0, None)
    assert (seen.claim, seen.release, seen.handoff) == (None, None, None)


async def test_a_free_lease_is_granted_and_seen_by_others(lease: LeaseStore, other: LeaseStore) -> None:
    answer = await lease.acquire(candidate(), floor=NONE, epoch=None)
    assert isinstance(answer, Granted)
    assert answer.fresh
    assert answer.record == candidate().with_token(answer.record.token)
    seen = await other.observe()
    assert (seen.record, seen.token) == (answer.record, answer.record.token)
    assert 0 < seen.pttl_ms <= 30_000
    assert seen.epoch is not None


async def test_a_held_lease_is_not_granted_to_another(lease: LeaseStore, other: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    answer = await other.acquire(candidate("router-b"), floor=NONE, epoch=None)
    assert isinstance(answer, Occupied)
    assert answer.record == mine
    assert 0 < answer.pttl_ms <= 30_000
    assert (await lease.observe()).token == mine.token


async def test_a_held_lease_is_not_granted_to_a_later_life_of_its_holder(lease: LeaseStore) -> None:
    mine = await granted(lease, candidate(incarnation="first"))
    answer = await lease.acquire(candidate(incarnation="second"), floor=NONE, epoch=None)
    assert isinstance(answer, Occupied)
    assert answer.record == mine


async def test_acquiring_again_is_answered_with_the_same_token_and_a_full_life(lease: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    await until(lambda: _left_at_most(lease, 29_900))
    answer = await lease.acquire(candidate(), floor=FencingToken(mine.token + 7), epoch=None)
    assert answer == Granted(mine, fresh=False)
    assert (await lease.observe()).pttl_ms > 29_900


async def _left_at_most(store: LeaseStore, pttl_ms: int) -> bool:
    return (await store.observe()).pttl_ms <= pttl_ms


async def _is_free(store: LeaseStore) -> bool:
    return (await store.observe()).record is None


async def test_a_lease_that_is_not_renewed_ends_and_goes_to_another_with_a_higher_token(
    lease: LeaseStore, other: LeaseStore
) -> None:
    mine = await granted(lease, candidate(ttl_ms=100))
    await until(lambda: _is_free(other))
    theirs = await granted(other, candidate("router-b"))
    assert theirs.token > mine.token
    assert (await other.observe()).release is None


async def test_of_many_that_ask_at_once_one_is_granted(world: World) -> None:
    routers = [candidate(f"router-{n}") for n in range(12)]
    stores = [world.stores()[0] for _ in routers]
    answers = await asyncio.gather(
        *(store.acquire(router, floor=NONE, epoch=None) for store, router in zip(stores, routers, strict=True))
    )
    (winner,) = (answer for answer in answers if isinstance(answer, Granted))
    assert [answer.record for answer in answers if isinstance(answer, Occupied)] == [winner.record] * 11


@pytest.mark.parametrize("above_ms", [1, 10**9])
async def test_a_token_is_above_the_floor(lease: LeaseStore, above_ms: int) -> None:
    first = await granted(lease, candidate())
    await lease.release(first, successor=None)
    floor = first.token + above_ms
    assert (await granted(lease, candidate(), floor=floor)).token > floor


async def test_tokens_of_any_size_are_kept_to_the_last_digit(lease: LeaseStore) -> None:
    mine = await granted(lease, candidate(), floor=2**53 - 3)
    assert mine.token == 2**53 - 2
    assert (await lease.observe()).record == mine
    assert isinstance(await lease.renew(mine), Renewed)


async def test_tokens_rise_over_a_loss_of_all_data(world: World, lease: LeaseStore) -> None:
    tokens: list[int] = []
    for _ in range(4):
        tokens.append((await granted(lease, candidate(), floor=max(tokens, default=0))).token)
        await world.lose_data()
    assert tokens == sorted(set(tokens))


async def test_tokens_rise_over_a_loss_of_all_data_even_where_nobody_remembers(world: World, lease: LeaseStore) -> None:
    """The store's clock sees to it, once it has moved by a millisecond."""
    before = (await granted(lease, candidate())).token
    await world.lose_data()
    await asyncio.sleep(0.005)
    assert (await granted(lease, candidate())).token > before


async def test_a_token_is_above_that_of_the_mirrored_handoff(world: World) -> None:
    lease, mirror = world.stores()
    mine = await granted(lease, candidate(), floor=2**50)
    await mirror.put(handoff(mine.token, 1))
    await world.drop_lease()
    await world.drop_token()
    assert (await granted(lease, candidate("router-b"))).token > mine.token


async def test_another_data_set_than_the_observed_one_grants_nothing(world: World, lease: LeaseStore) -> None:
    await granted(lease, candidate())
    epoch = (await lease.observe()).epoch
    assert epoch is not None
    await world.drop_lease()
    assert isinstance(await lease.acquire(candidate(), floor=NONE, epoch="another"), DataLost)
    assert isinstance(await lease.acquire(candidate(), floor=NONE, epoch=epoch), Granted)
    await world.lose_data()
    assert isinstance(await lease.acquire(candidate(), floor=NONE, epoch=epoch), DataLost)
    seen = await lease.observe()
    assert (seen.record, seen.token) == (None, 0)


async def test_another_term_since_the_look_grants_nothing(world: World, lease: LeaseStore) -> None:
    """A candidate that was stopped between its look and its attempt must look again, whatever became of the lease."""
    empty = await lease.observe()
    first = await granted(lease, candidate())
    await world.drop_lease()
    late = candidate("router-b")
    assert isinstance(await lease.acquire(late, floor=NONE, epoch=empty.epoch, after=empty.token), DataLost)
    answer = await lease.acquire(late, floor=NONE, epoch=(await lease.observe()).epoch, after=first.token)
    assert isinstance(answer, Granted)


async def test_exactly_the_term_that_is_over_is_deposed(world: World, lease: LeaseStore, other: LeaseStore) -> None:
    over = await granted(lease, candidate())
    answer = await other.acquire(candidate("router-b"), floor=NONE, epoch=None, after=over.token, deposing=over)
    assert isinstance(answer, Granted)
    assert answer.fresh
    assert answer.record.token > over.token
    seen = await lease.observe()
    assert (seen.record, seen.token) == (answer.record, answer.record.token)
    assert 0 < seen.pttl_ms <= 30_000
    assert await lease.renew(over) == Lost(answer.record)
    assert await world.event_types() == ["acquire", "depose", "acquire"]


@pytest.mark.parametrize("change", [{"token": FencingToken(1)}, {"incarnation": "later"}, {"router": RouterId("c")}])
async def test_no_other_term_than_the_one_that_is_over_is_deposed(
    lease: LeaseStore, other: LeaseStore, change: dict[str, object]
) -> None:
    mine = await granted(lease, candidate())
    almost = replace(mine, **change)  # type: ignore[arg-type]
    answer = await other.acquire(candidate("router-b"), floor=NONE, epoch=None, deposing=almost)
    assert isinstance(answer, Occupied)
    assert (await lease.observe()).record == mine


async def test_of_two_that_depose_at_once_one_is_granted(lease: LeaseStore, other: LeaseStore) -> None:
    over = await granted(lease, candidate())
    first, second = await asyncio.gather(
        lease.acquire(candidate("router-b"), floor=NONE, epoch=None, after=over.token, deposing=over),
        other.acquire(candidate("router-c"), floor=NONE, epoch=None, after=over.token, deposing=over),
    )
    assert sorted(type(answer).__name__ for answer in (first, second)) == ["Granted", "Occupied"]


async def test_a_term_that_is_over_and_gone_is_taken_as_a_free_lease_is(world: World, lease: LeaseStore) -> None:
    over = await granted(lease, candidate())
    await world.drop_lease()
    answer = await lease.acquire(candidate("router-b"), floor=NONE, epoch=None, after=over.token, deposing=over)
    assert isinstance(answer, Granted)
    assert await world.event_types() == ["acquire", "acquire"]


async def test_data_loss_shows_in_the_epoch(world: World, lease: LeaseStore) -> None:
    await granted(lease, candidate())
    before = (await lease.observe()).epoch
    await world.lose_data()
    assert (await lease.observe()).epoch is None
    await granted(lease, candidate())
    assert (await lease.observe()).epoch not in (None, before)


async def test_an_epoch_outlives_terms(lease: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    before = (await lease.observe()).epoch
    await lease.release(mine, successor=None)
    await granted(lease, candidate("router-b"))
    assert (await lease.observe()).epoch == before


async def test_renewing_gives_a_full_life(lease: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    await until(lambda: _left_at_most(lease, 29_900))
    assert await lease.renew(mine) == Renewed(claim=None)
    assert (await lease.observe()).pttl_ms > 29_900


@pytest.mark.parametrize(
    "change",
    [
        {"token": FencingToken(7)},
        {"incarnation": "second"},
        {"router": B},
        {"ttl_ms": 99},
        {"url": "http://elsewhere:1"},
    ],
    ids=str,
)
async def test_only_the_very_same_term_renews(lease: LeaseStore, change: dict[str, object]) -> None:
    mine = await granted(lease, candidate())
    await until(lambda: _left_at_most(lease, 29_900))
    assert await lease.renew(replace(mine, **change)) == Lost(mine)  # type: ignore[arg-type]
    seen = await lease.observe()
    assert seen.record == mine
    assert seen.pttl_ms <= 29_900


async def test_renewing_never_creates_a_lease(world: World, lease: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    await world.drop_lease()
    assert await lease.renew(mine) == Lost(None)
    assert (await lease.observe()).record is None


async def test_a_former_holder_does_not_renew_after_another_came_and_went(lease: LeaseStore, other: LeaseStore) -> None:
    mine = await granted(lease, candidate(ttl_ms=100))
    await until(lambda: _is_free(other))
    theirs = await granted(other, candidate("router-b"))
    assert await lease.renew(mine) == Lost(theirs)
    await other.release(theirs, successor=None)
    assert await lease.renew(mine) == Lost(None)


async def test_releasing_frees_the_lease_at_once_and_says_who_let_go(lease: LeaseStore, other: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    assert await lease.release(mine, successor=B)
    seen = await other.observe()
    assert (seen.record, seen.pttl_ms, seen.token) == (None, 0, mine.token)
    assert seen.release == Release(mine.router, mine.incarnation, mine.token, B)
    assert (await granted(other, candidate("router-b"))).token > mine.token


async def test_the_last_release_stays_visible(lease: LeaseStore) -> None:
    first = await granted(lease, candidate())
    await lease.release(first, successor=B)
    second = await granted(lease, candidate("router-b"))
    assert (await lease.observe()).release == Release(first.router, first.incarnation, first.token, B)
    await lease.release(second, successor=None)
    assert (await lease.observe()).release == Release(second.router, second.incarnation, second.token, None)


async def test_only_the_very_same_term_releases(lease: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    assert not await lease.release(mine.with_token(FencingToken(mine.token - 1)), successor=None)
    assert not await lease.release(replace(mine, incarnation="second"), successor=None)
    seen = await lease.observe()
    assert (seen.record, seen.release) == (mine, None)
    assert await lease.release(mine, successor=None)
    assert not await lease.release(mine, successor=None)


async def test_a_holder_learns_of_a_claim_with_its_next_renewal(lease: LeaseStore, other: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    claim = Claim(B, "its-life", mine.token, 'monitoring degraded: health "ClientError" \u20ac')
    assert await other.claim(mine, claim)
    assert await lease.renew(mine) == Renewed(claim)
    assert (await lease.observe()).claim == claim


async def test_a_claim_against_another_term_is_refused(lease: LeaseStore, other: LeaseStore) -> None:
    claim = Claim(B, "its-life", FencingToken(1), "unfit")
    assert not await other.claim(candidate().with_token(FencingToken(1)), claim)
    mine = await granted(lease, candidate())
    assert not await other.claim(mine.with_token(FencingToken(mine.token - 1)), claim)
    assert (await lease.observe()).claim is None


async def test_a_standing_claim_is_not_overwritten(lease: LeaseStore, other: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    first = Claim(B, "its-life", mine.token, "unfit")
    assert await other.claim(mine, first)
    assert await other.claim(mine, replace(first, reason="again")), "the claimant's own claim stands"
    assert not await lease.claim(mine, Claim(RouterId("router-c"), "its-life", mine.token, "unfit"))
    assert (await lease.observe()).claim == first


async def test_a_claim_ends_with_the_term_that_it_was_against(world: World, lease: LeaseStore) -> None:
    mine = await granted(lease, candidate())
    assert await lease.claim(mine, Claim(B, "its-life", mine.token, "unfit"))
    await lease.release(mine, successor=B)
    assert (await lease.observe()).claim is None
    next_term = await granted(lease, candidate())
    assert await lease.claim(next_term, Claim(B, "its-life", next_term.token, "unfit"))
    await world.drop_lease()
    await granted(lease, candidate())
    assert (await lease.observe()).claim is None


@pytest.mark.parametrize("text", ['"token":0', '\\"token":0', "\u20ac \U0001f40b", "}{", "%d %.0f %1", "a\nb\x00c"])
async def test_a_record_survives_any_text(lease: LeaseStore, text: str) -> None:
    template: LeaseRecord = replace(candidate(), incarnation=text, url=text, version=text)
    mine = await granted(lease, template)
    assert mine == template.with_token(mine.token)
    assert (await lease.observe()).record == mine
    assert await lease.acquire(template, floor=NONE, epoch=None) == Granted(mine, fresh=False)
    assert await lease.renew(mine) == Renewed(None)
    assert await lease.release(mine, successor=None)


async def test_members_are_listed_by_id_as_they_last_announced_themselves(lease: LeaseStore, other: LeaseStore) -> None:
    assert list(await lease.members()) == []
    a = member("router-a", handoff_order=(FencingToken(2**53 - 2), 3))
    await other.announce(member("router-b", reason="engines differ"))
    await lease.announce(a)
    await other.announce(member("router-b"))
    assert list(await lease.members()) == [a, member("router-b")]


async def test_each_change_is_an_event(world: World) -> None:
    lease, mirror = world.stores()
    mine = await granted(lease, candidate())
    await lease.renew(mine)
    await lease.claim(mine, Claim(B, "its-life", mine.token, "unfit"))
    await mirror.put(handoff(mine.token, 1))
    await lease.release(mine, successor=None)
    assert await world.event_types() == ["acquire", "claim", "handoff", "release"]


async def test_a_wait_ends_with_the_next_event(lease: LeaseStore, other: LeaseStore) -> None:
    await lease.wait_for_event(timeout_s=0.01)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(lease.wait_for_event(timeout_s=60))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "nothing was written"
        await granted(other, candidate())


async def test_an_event_between_two_waits_is_not_missed(lease: LeaseStore, other: LeaseStore) -> None:
    await lease.wait_for_event(timeout_s=0.01)
    mine = await granted(other, candidate())
    async with asyncio.timeout(20):
        await lease.wait_for_event(timeout_s=60)
        await other.release(mine, successor=None)
        await lease.wait_for_event(timeout_s=60)


async def test_a_wait_without_events_ends_after_its_time(lease: LeaseStore, other: LeaseStore) -> None:
    await granted(other, candidate())
    await lease.wait_for_event(timeout_s=10)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await lease.wait_for_event(timeout_s=0.3)
    assert 0.25 <= loop.time() - began < 5


async def test_a_loss_of_all_data_ends_the_next_wait_and_events_are_heard_after_it(
    world: World, lease: LeaseStore, other: LeaseStore
) -> None:
    await granted(other, candidate())
    await lease.wait_for_event(timeout_s=10)
    await world.lose_data()
    async with asyncio.timeout(20):
        await lease.wait_for_event(timeout_s=60)
        await granted(other, candidate())
        await lease.wait_for_event(timeout_s=60)
