"""Capped exponential back-off, as arithmetic."""

from __future__ import annotations


def delay_s(attempts: int, *, first_s: float, max_s: float) -> float:
    """Return the wait after `attempts` failed tries: `first_s`, doubled each time, never above `max_s`."""
    return float(min(max_s, first_s * 2 ** min(max(attempts - 1, 0), 30)))
