"""A router over stub engines, stopped after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.serving.world import World


@pytest.fixture
async def empty_world() -> AsyncIterator[World]:
    """Return a world that the test starts with settings of its own."""
    world = World()
    yield world
    await world.stop()


@pytest.fixture
async def world(empty_world: World) -> World:
    """Return a running world with default settings."""
    await empty_world.start()
    return empty_world
