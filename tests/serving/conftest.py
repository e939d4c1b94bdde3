"""A router over stub engines, stopped after the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

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


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on uvloop, as the product does."""
    return {"uvloop": uvloop.new_event_loop}
