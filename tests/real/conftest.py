"""Real engines for these tests, and a pair of routers in front of them. Without engines every test here is skipped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from narwhal.demo.redis_server import NoRedisServer, RedisServer
from tests.real.engines import TOOLS_VARIABLE, NoEngines, RealEngine, Tools, bring_up, engines_from, tools_from
from tests.real.routers import PATIENT, Pair, running


@pytest.fixture(scope="session")
def engines() -> Iterator[tuple[RealEngine, ...]]:
    """The engines of NARWHAL_REAL_ENGINES, healthy and acquainted; those that had to be started are ended again."""
    tools = tools_from(os.environ)
    started: list[str] = []
    try:
        fleet = engines_from(os.environ)
        started = asyncio.run(bring_up(fleet, tools))
    except NoEngines as error:
        pytest.skip(str(error))
    yield fleet
    if tools is not None and started:
        tools.stop(*started)


@pytest.fixture(scope="session")
def tools() -> Tools:
    """The scripts that start and stop the engines."""
    found = tools_from(os.environ)
    if found is None:
        pytest.skip(f"ends engines and starts them again: set {TOOLS_VARIABLE} to a folder with up.sh and down.sh")
    return found


@pytest.fixture
def prefill(engines: tuple[RealEngine, ...]) -> RealEngine:
    """The first prefill engine."""
    return next(engine for engine in engines if engine.role == "prefill")


@pytest.fixture
def decode(engines: tuple[RealEngine, ...]) -> RealEngine:
    """The first decode engine."""
    return next(engine for engine in engines if engine.role == "decode")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of its own for one pair."""
    try:
        server = RedisServer.start()
    except NoRedisServer as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
async def pair(engines: tuple[RealEngine, ...], redis: RedisServer, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two routers in front of every engine."""
    async with running(Pair(tmp_path, redis, engines, PATIENT)) as routers:
        yield routers
