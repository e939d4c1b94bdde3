"""Stub engines that are stopped after the test, and one HTTP client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from narwhal.testing.stub_engine import StubEngine
from tests.testing.wire import Engines


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """Return a factory of running stub engines."""
    factory = Engines()
    yield factory
    await factory.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Return a client that gives up after ten seconds."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


@pytest.fixture
async def prefill(engines: Engines) -> StubEngine:
    """Return a running prefill engine."""
    return await engines.start(role="prefill")


@pytest.fixture
async def decode(engines: Engines) -> StubEngine:
    """Return a running decode engine."""
    return await engines.start(role="decode")
