"""Worlds that are taken down after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.live.world import Worlds, worlds_in


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    """Return a maker of worlds."""
    async with worlds_in(tmp_path) as maker:
        yield maker
