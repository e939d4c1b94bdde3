"""What every HandoffStore promises, and what the fenced mirror in Redis promises beyond it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from narwhal.core.vocabulary import FencingToken
from narwhal.errors import HandoffRefused
from narwhal.ports import HandoffStore, LeaseStore
from narwhal.store.file_store import FileHandoffStore
from tests.contract.samples import candidate, granted, handoff
from tests.contract.worlds import FakeWorld, MemoryWorld, RealWorld, World


class Place:
    """A handoff store and a way to begin terms whose documents it takes."""

    def __init__(self, store: HandoffStore, world: World | None) -> None:
        self.store = store
        self._world = world
        self._lease: LeaseStore | None = world.stores()[0] if world is not None else None
        self._token = 0

    async def begin_term(self) -> int:
        """Return the fencing token of a new term, higher than all before."""
        if self._world is None or self._lease is None:
            self._token += 1
            return self._token
        await self._world.drop_lease()
        return (await granted(self._lease, candidate())).token


@pytest.fixture(params=["file", "memory", "fakeredis", "redis", "valkey"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    match request.param:
        case "file":
            yield Place(FileHandoffStore(tmp_path / "state" / "handoff.json"), None)
            return
        case "memory":
            world: World = MemoryWorld()
        case "fakeredis":
            world = FakeWorld()
        case server:
            world = RealWorld(request.getfixturevalue(f"{server}_url"))
    yield Place(world.stores()[1], world)
    await world.aclose()


async def test_an_empty_place_holds_no_document(place: Place) -> None:
    assert await place.store.get() is None


async def test_what_was_put_is_what_is_got(place: Place) -> None:
    token = await place.begin_term()
    for version in (1, 2, 7):
        document = handoff(token, version)
        await place.store.put(document)
        assert await place.store.get() == document


async def test_a_document_of_an_older_term_is_refused_and_both_tokens_are_named(place: Place) -> None:
    old = await place.begin_term()
    await place.store.put(handoff(old, 9))
    new = await place.begin_term()
    await place.store.put(handoff(new, 10))
    with pytest.raises(HandoffRefused, match=rf"STALE_TOKEN.*\b{old}\b.*\b{new}\b"):
        await place.store.put(handoff(old, 11))
    assert await place.store.get() == handoff(new, 10)


async def test_a_higher_token_wins_over_any_version(place: Place) -> None:
    await place.store.put(handoff(await place.begin_term(), 900))
    newest = handoff(await place.begin_term(), 1)
    await place.store.put(newest)
    assert await place.store.get() == newest


@pytest.mark.parametrize("version", [1, 4])
async def test_an_older_version_of_the_same_term_is_refused_and_both_versions_are_named(
    place: Place, version: int
) -> None:
    token = await place.begin_term()
    await place.store.put(handoff(token, 5))
    with pytest.raises(HandoffRefused, match=rf"VERSION.*\b{version}\b.*\b5\b"):
        await place.store.put(handoff(token, version))
    assert await place.store.get() == handoff(token, 5)


async def test_the_same_document_may_be_put_again_and_another_of_its_version_may_not(place: Place) -> None:
    token = await place.begin_term()
    await place.store.put(handoff(token, 5))
    await place.store.put(handoff(token, 5))
    with pytest.raises(HandoffRefused, match="VERSION"):
        await place.store.put(handoff(token, 5, mark=1))
    assert await place.store.get() == handoff(token, 5)


async def test_of_documents_put_at_once_the_newest_stays(place: Place) -> None:
    token = await place.begin_term()
    answers = await asyncio.gather(
        *(place.store.put(handoff(token, version)) for version in (3, 1, 8, 2, 7)), return_exceptions=True
    )
    assert all(answer is None or isinstance(answer, HandoffRefused) for answer in answers), answers
    assert await place.store.get() == handoff(token, 8)


async def test_the_mirror_takes_nothing_from_who_never_held_the_lease(world: World) -> None:
    _, mirror = world.stores()
    with pytest.raises(HandoffRefused, match=r"NOT_HOLDER.*\b5\b.*\b0\b"):
        await mirror.put(handoff(5, 1))
    assert await mirror.get() is None


async def test_the_mirror_takes_nothing_above_the_holders_token(world: World) -> None:
    lease, mirror = world.stores()
    mine = await granted(lease, candidate())
    with pytest.raises(HandoffRefused, match=rf"NOT_HOLDER.*\b{mine.token + 1}\b.*\b{mine.token}\b"):
        await mirror.put(handoff(mine.token + 1, 1))
    assert await mirror.get() is None


async def test_the_mirror_refuses_a_former_holder_before_its_successor_has_written(world: World) -> None:
    lease, mirror = world.stores()
    old = await granted(lease, candidate())
    await mirror.put(handoff(old.token, 1))
    await lease.release(old, successor=None)
    new = await granted(lease, candidate("router-b"))
    with pytest.raises(HandoffRefused, match=rf"STALE_TOKEN.*\b{old.token}\b.*\b{new.token}\b"):
        await mirror.put(handoff(old.token, 2))


async def test_the_mirror_takes_the_last_document_of_a_term_that_just_ended(world: World) -> None:
    lease, mirror = world.stores()
    mine = await granted(lease, candidate())
    await lease.release(mine, successor=None)
    await mirror.put(handoff(mine.token, 1))
    assert await mirror.get() == handoff(mine.token, 1)


async def test_an_observation_names_the_order_of_the_mirrored_document(world: World) -> None:
    lease, mirror = world.stores()
    mine = await granted(lease, candidate(), floor=2**53 - 3)
    assert (await lease.observe()).handoff is None
    await mirror.put(handoff(mine.token, 12))
    assert (await lease.observe()).handoff == (FencingToken(2**53 - 2), 12)


async def test_a_new_document_wakes_whoever_waits(world: World) -> None:
    lease, mirror = world.stores()
    waiting = world.stores()[0]
    mine = await granted(lease, candidate())
    await waiting.wait_for_event(timeout_s=10)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        task = group.create_task(waiting.wait_for_event(timeout_s=60))
        await asyncio.sleep(0.05)
        assert not task.done(), "nothing was written"
        await mirror.put(handoff(mine.token, 1))
