"""The engine drivers are tested on both loops: uvloop, which the product runs on, and asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from narwhal.engine.client import EngineClient
from tests.engine.legs import client


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test once on each loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def engines() -> AsyncIterator[EngineClient]:
    built = client()
    yield built
    await built.aclose()
