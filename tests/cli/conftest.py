"""The cluster that command tests look at."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.cli.clusters import ScriptedCluster, scripted_cluster


@pytest.fixture
async def cluster(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedCluster]:
    """An empty cluster with two scripted routers; nothing in the environment names another one."""
    for name in ("NARWHAL_CONFIG", "NARWHAL_REDIS_URL", "NARWHAL_CLUSTER", "NARWHAL_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    async with scripted_cluster(redis_url) as scripted:
        yield scripted
