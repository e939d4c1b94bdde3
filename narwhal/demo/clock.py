"""The clock of the drill's evidence: the one by which routers log their admissions, one for all processes of a host."""

from __future__ import annotations

import time


def lease_clock() -> float:
    """Return CLOCK_BOOTTIME in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
