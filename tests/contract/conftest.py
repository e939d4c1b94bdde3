"""One suite, four backends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from narwhal.ports import HandoffStore, LeaseStore
from tests.contract.worlds import FakeWorld, MemoryWorld, RealWorld, World


@pytest.fixture(params=["memory", "fakeredis", "redis", "valkey"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    match request.param:
        case "memory":
            world: World = MemoryWorld()
        case "fakeredis":
            world = FakeWorld()
        case server:
            world = RealWorld(request.getfixturevalue(f"{server}_url"))
    yield world
    await world.aclose()


@pytest.fixture
def lease(world: World) -> LeaseStore:
    """What router-a has in hand."""
    return world.stores()[0]


@pytest.fixture
def other(world: World) -> LeaseStore:
    """What router-b has in hand."""
    return world.stores()[0]


@pytest.fixture
def mirror(world: World) -> HandoffStore:
    return world.stores()[1]
