"""A simulated world writes its own history; the product's log stays quiet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from narwhal.testing.simulation import quiet


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    before = structlog.get_config()
    quiet()
    yield
    structlog.configure(**before)
